"""Ctrl-C and SIGTERM while an update is being made: the process ends, with Python's own status.
So it does when an update never ends, and says why.

In ``sync`` the signal comes inside the optimizer's step; else while the optimizer thread makes a
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
from launching import run
from places import HELPERS
from signal_script import ENDED, ENDINGS, LIMIT_S, WINDOW, name_of
from support import same

pytestmark = pytest.mark.usefixtures("one_thread")

STATUS = {
    "ctrl-c": -signal.SIGINT,
    "ctrl-c, saved": -signal.SIGINT,
    "sigterm": -signal.SIGTERM,
    "sigterm, saved": 128 + signal.SIGTERM,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("signals")
    code, out, err = run([sys.executable, HELPERS / "signal_script.py", folder], folder)
    assert code == 0, out + err
    return folder, json.loads((folder / "statuses.json").read_text())


@pytest.mark.parametrize("mode", ENDED)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_pythons_own_status(ended: Any, ending: str, mode: str) -> None:
    folder, statuses = ended
    name = name_of(ending, mode)
    output = (folder / name / "output.txt").read_text()
    status, after_s = statuses[name]
    assert status == STATUS[ending], output  # -14: it hung for LIMIT_S
    assert after_s < LIMIT_S, "the signal was never sent"
    assert ("KeyboardInterrupt" in output) == ending.startswith("ctrl-c")
    assert "StepError" not in output, "the interrupt was taken for a failure of the optimizer"
    lines = [json.loads(line) for line in (folder / name / "run.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    # SIGTERM without a handler ends it where it stands, as kill -9 does.
    assert (kinds[-1] == "end") == (ending != "sigterm")
    assert kinds[0] == "start"


@pytest.mark.parametrize("mode", ENDED)
@pytest.mark.parametrize("ending", ["ctrl-c, saved", "sigterm, saved"])
def test_what_was_saved_then_has_the_update_whole(ended: Any, ending: str, mode: str) -> None:
    """Beside it was being made when the signal came, and was finished; in ``sync``, where the
    signal comes before the first kernel, nothing has moved but the scale."""
    reference = Run(mode).train(WINDOW + (mode != "sync"))
    expected = reference.state()
    expected["scaler"] = reference.train(WINDOW + 1).state()["scaler"]
    reference.close()
    run = Run(mode)
    run.accelerator.load_state(str(ended[0] / name_of(ending, mode) / "saved"))
    mine = run.state()
    run.close()
    for key in ("weights", "state", "scaler"):
        assert same(mine[key], expected[key]), key


HANGS = """
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


def test_an_exit_waits_for_a_hanging_update_no_longer_than_its_limit(tmp_path: Path) -> None:
    """The limit is 60 s, here half a second; the status is that of a script that ran through."""
    code, out, err = run([sys.executable, "-c", HANGS], tmp_path)
    assert code == 0, err
    assert out == "end of the script\n"
    assert "the optimizer thread did not finish its step within 0.5 s" in err
