"""Accuracy of a running server: ``pagealign eval``, WER on speech and ANLS on documents."""
