"""What stops a training run that its caller described rightly."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run cannot go on: the loss is not finite, a file cannot be read, the disk is full.

    What was written before is whole; the message says how to go on.
    """
