"""``accel-scaler test``: are the numbers right on this machine?

Short trainings, written as users write them, run on the user's device and beside plain torch there;
each comparison is a row, a :class:`Result`. The folder uses the package through its public names
alone, and nothing of the test suite.
"""

from .command import add_arguments as add_arguments, run as run
