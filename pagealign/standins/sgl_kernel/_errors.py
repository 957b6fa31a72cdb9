"""What the stand-in raises beyond the real kernels' own ``RuntimeError`` texts."""


class StrictnessError(RuntimeError):
    """The real kernels would run this call and give a wrong answer without a word."""


class DeviceLostError(RuntimeError):
    """A request without keys: on hardware this has been seen to take the device down."""
