"""An update that does not end: the process does, and says why."""

from __future__ import annotations

import os
import subprocess
import sys

from places import HELPERS, ROOT

SCRIPT = """
import sys, threading
import torch
from accel_scaler.async_optimizer import worker as worker
from accel_scaler.async_optimizer.replica import Replica
from fault_run import Run

worker.EXIT_LIMIT_S = 0.5
torch.set_num_threads(1)
run = Run("overlap").train(3)
run.optimizer.synchronize()
begun = threading.Event()

def hangs(*args):
    begun.set()
    threading.Event().wait()

Replica.step_part = hangs
run.train(4)
assert begun.wait(60)
print("end of the script")
"""


def test_an_exit_waits_for_a_hanging_update_no_longer_than_its_limit() -> None:
    """The limit is 60 s, here half a second; the status is that of a script that ran through."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end of the script\n"
    assert "the optimizer thread did not finish its step within 0.5 s" in done.stderr
