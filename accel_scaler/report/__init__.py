"""``accel-scaler report``: from a telemetry file to a page or words.

Lines come in through the reader, which trusts none, and are added up in a run's summary of bounded
size; findings, charts and the page are made from the summary alone. It knows the file's format
and nothing of training: neither torch nor Accelerate is needed here.
"""

from .command import add_arguments as add_arguments, run as run
