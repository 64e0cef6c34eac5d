"""``accel-scaler report``: from a telemetry file to a page or words.

The reader checks every line and adds it to the run's summary, whose size is bounded. Findings,
charts and the page are made from the summary alone. The report knows the file's format and nothing
of training, so it needs neither torch nor Accelerate.
"""

from .command import add_arguments as add_arguments, run as run
