"""``python -m accel_scaler`` is ``accel-scaler``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
