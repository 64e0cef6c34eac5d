"""``accel-scaler replay``: a window that overflowed, from its file, run again in this process.

A file comes in, and a function of the user's that makes the model; what goes out is printed: where
it overflows, whether it is as it was, what differs. Nothing is trained.
"""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
