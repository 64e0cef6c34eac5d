"""Ctrl-C and SIGTERM while an update is being made: the process ends, with Python's own status.

In ``sync`` the signal comes inside the optimizer's step; else while the optimizer thread makes a
slow update that the training thread waits for or runs beside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_run import Run, same
from places import HELPERS
from signal_script import ENDED, ENDINGS, LIMIT_S, WINDOW, name_of

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
    script = HELPERS / "signal_script.py"
    subprocess.run(
        [sys.executable, str(script), str(folder)],
        check=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
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
