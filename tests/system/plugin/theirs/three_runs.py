"""Run ``sample_training.py`` three times: with us in ``sync`` and ``overlap``, and stock.

Not a test: ``test_plugin_training.py`` starts it; one process, so that the libraries load once.
The first run meets libraries that are not imported yet, the later ones such that are. Arguments:
a folder for the results. Prints what pytest prints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = ["-q", "-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider"]
OURS = "--with-accel-scaler"
RUNS = {"sync": [OURS], "stock": ["-p", "as_on_a_gpu"], "overlap": [OURS]}


def main(folder: Path) -> None:
    """Ends with the first status that is not 0."""
    for name, options in RUNS.items():
        print(f"RUN {name}", flush=True)
        results = folder / name
        results.mkdir()
        os.environ |= {
            "RESULTS": str(results),
            "ACCEL_SCALER_STEP_MODE": "overlap" if name == "overlap" else "sync",
        }
        sample = str(HERE / "sample_training.py")
        status = pytest.main([*QUICK, "--rootdir", str(folder), *options, sample])
        if status:
            sys.exit(int(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
