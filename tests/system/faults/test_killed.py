"""SIGKILL at seeded moments: a new process goes on from the last complete checkpoint, bit for bit.

``FAULT_MOMENTS=20`` kills twenty times as often, ``FAULT_SEED`` at other moments. The children are
forks: nothing is imported again.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Moments, in_child, killed, many, seeded
from fault_run import MODES, Run, resume, saver
from support import same

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS = 3
"""Of each mode."""


@functools.cache
def whole(mode: str) -> dict[str, Any]:
    """The run that nobody disturbs, and how many calls it takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(mode)
        result = run.train(after=saver(Path(folder))).result()
        run.close()
        run = Run(mode)
        with Moments() as moments:
            run.train(after=saver(Path(folder)))
        assert same(run.result(), result)
        run.close()
    # Waits take some calls more or fewer; so late a moment might not come.
    return {"result": result, "calls": 9 * moments.count // 10}


def resumed_equals_whole(mode: str, folder: Path) -> None:
    """In a new process. It saves as the other did: in ``delayed`` that publishes."""
    complete = sorted(path.name for path in folder.glob("after_*"))

    def body() -> None:
        run = resume(mode, folder)
        began = run.progress.window
        result = run.train(after=saver(folder)).result()
        torch.save({"result": result, "began": began}, folder / "resumed.pt")

    status = in_child(body, folder / "resumed.txt")
    assert status == 0, (folder / "resumed.txt").read_text()
    loaded = torch.load(folder / "resumed.pt", weights_only=True)
    began, result = loaded["began"], loaded["result"]
    expected = dict(whole(mode)["result"])
    expected["seen"] = expected["seen"][began:]
    for key in expected:
        assert same(result[key], expected[key]), (key, began)
    assert began == int((complete or ["after_00"])[-1][-2:])


def lines_are_whole(path: Path) -> None:
    for line in path.read_text().splitlines() if path.exists() else ():
        json.loads(line)


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_a_random_moment_of_training(mode: str, tmp_path: Path) -> None:
    draw, folder = seeded(f"training {mode}"), tmp_path / "run"
    for _ in range(many(KILLS)):
        deadly = draw.randrange(1, whole(mode)["calls"])

        def body(deadly: int = deadly) -> None:
            run = Run(mode, telemetry=str(folder / "run.jsonl"))
            with Moments(deadly):
                run.train(after=saver(folder))

        killed(folder, body)
        lines_are_whole(folder / "run.jsonl")
        resumed_equals_whole(mode, folder)
