"""``accel-scaler report``: from a telemetry file to a page or words.

The reader adds up the lines of a file; findings, charts and the page are made from that alone. The
report knows the file's format and nothing of training, so it needs neither torch nor Accelerate.
"""

from .command import add_arguments as add_arguments, run as run
