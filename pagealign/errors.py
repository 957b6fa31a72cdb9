"""The one exception that the command line prints without a traceback."""


class PagealignError(Exception):
    """Something that the user can put right; the message says how."""
