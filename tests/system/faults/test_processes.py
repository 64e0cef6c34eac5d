"""A process, or one of two ranks, is signalled, killed or stopped within an update: how it ends.

In ``sync`` a signal comes inside the optimizer's step; else while the optimizer thread makes a
slow update that the training thread waits for or runs beside.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_run import Run
from fault_script import CASES, LIMIT_S, SIGNALLED, SIGNALS, TIMEOUT_S, WINDOW
from launching import run
from places import HELPERS
from support import same

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_S = 30.0
"""How long a process may go on, or hang, after the fault; a rank with gloo's limit of 90."""
ENDS: dict[str, tuple[list[int], float, tuple[str, ...]]] = {
    "ctrl-c": ([-signal.SIGINT], MAX_S, ("KeyboardInterrupt",)),
    "ctrl-c saved": ([-signal.SIGINT], MAX_S, ("KeyboardInterrupt",)),
    "sigterm saved": ([128 + signal.SIGTERM], MAX_S, ()),
    # The connection is closed, nobody waits for a timeout.
    "killed": ([1, -signal.SIGKILL], MAX_S, ("Traceback", "gloo")),
    # It may come back, so the other waits as long as its group allows, and no longer.
    "stopped": ([1, -signal.SIGKILL], TIMEOUT_S + MAX_S, ("Traceback", f"{TIMEOUT_S}000ms")),
    "raises": ([1, 1], MAX_S, ("Traceback", "gloo")),
}
"""Exit statuses, the limit in seconds, what rank 0 prints."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    code, out, err = run([sys.executable, HELPERS / "fault_script.py", folder], folder)
    assert code == 0, out + err
    return folder, json.loads((folder / "ended.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_with_its_own_status_in_time(ended: Any, case: str) -> None:
    folder, ends = ended
    fault, _ = case.split(", ")
    statuses, limit, printed = ENDS[fault]
    output = (folder / f"{case}0.txt").read_text()
    assert ends[case]["statuses"] == statuses, output  # -14: it hung for LIMIT_S
    assert (ends[case]["after_s"] or 0.0) < min(limit, LIMIT_S)
    assert all(part.lower() in output.lower() for part in printed), output
    if fault in SIGNALS:
        assert "StepError" not in output, "the interrupt was taken for a failure of the optimizer"
        lines = (folder / f"{case}.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in lines]
        assert (kinds[0], kinds[-1]) == ("start", "end")
    elif fault == "raises":
        other = (folder / f"{case}1.txt").read_text()
        assert "StepError" in other
        assert "the kernel of rank 1 failed" in other
    else:
        assert f"window {WINDOW - 1}" in output
        assert f"window {WINDOW + 1}" not in output, "it trained on alone"


@pytest.mark.parametrize("mode", SIGNALLED)
@pytest.mark.parametrize("ending", ["ctrl-c saved", "sigterm saved"])
def test_what_was_saved_then_has_the_update_whole(ended: Any, ending: str, mode: str) -> None:
    """An asynchronous one was finished; in ``sync``, where the signal comes before the first
    kernel, nothing has moved but the scale."""
    reference = Run(mode).train(WINDOW + (mode != "sync"))
    expected = reference.state()
    expected["scaler"] = reference.train(WINDOW + 1).state()["scaler"]
    reference.close()
    resumed = Run(mode)
    resumed.accelerator.load_state(str(ended[0] / f"{ending}, {mode} saved"))
    mine = resumed.state()
    resumed.close()
    for key in ("weights", "state", "scaler"):
        assert same(mine[key], expected[key]), key


HANGS = """
import threading
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


def test_an_exit_waits_for_a_hanging_update_no_longer_than_its_limit(tmp_path: Path) -> None:
    """The limit is 60 s, here half a second; the status is that of a script that ran through."""
    code, out, err = run([sys.executable, "-c", HANGS], tmp_path)
    assert code == 0, err
    assert out == "end of the script\n"
    assert "the optimizer thread did not finish its step within 0.5 s" in err
