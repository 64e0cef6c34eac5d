"""Killed, a full disk, an optimizer that raises: what is left, and a run goes on from there.

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
from versions import before_torch

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS = 3
"""Of each mode."""
FAILS = 5
"""Windows before the checkpoint that fails; two were saved before."""


@functools.cache
def undisturbed(mode: str) -> tuple[dict[str, Any], int]:
    """The result of the run, and how many calls it makes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(mode)
        result = run.train(after=saver(Path(folder))).result()
        run.close()
        run = Run(mode)
        with Moments() as moments:
            run.train(after=saver(Path(folder)))
        run.close()
    # Waits take some calls more or fewer; so late a moment might not come.
    return result, 9 * moments.count // 10


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_a_random_moment_of_training(mode: str, tmp_path: Path) -> None:
    """A new process goes on from the last complete checkpoint, bit for bit."""
    (whole, calls), folder = undisturbed(mode), tmp_path / "run"
    draw = seeded(f"training {mode}")
    for _ in range(many(KILLS)):
        deadly = draw.randrange(1, calls)

        def train(deadly: int = deadly) -> None:
            run = Run(mode, telemetry=str(folder / "run.jsonl"))
            with Moments(deadly):
                run.train(after=saver(folder))

        def go_on() -> None:
            run = resume(mode, folder)
            began = run.progress.window
            result = run.train(after=saver(folder)).result()
            torch.save({"result": result, "began": began}, folder / "resumed.pt")

        killed(folder, train)
        file = folder / "run.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            json.loads(line)  # none is torn
        complete = sorted(path.name for path in folder.glob("after_*"))
        assert in_child(go_on, folder / "new.txt") == 0, (folder / "new.txt").read_text()
        loaded = torch.load(folder / "resumed.pt", weights_only=True)
        began = loaded["began"]
        assert began == int((complete or ["after_00"])[-1][-2:])
        assert same(loaded["result"], whole | {"seen": whole["seen"][began:]})


@before_torch(2, 7, "torch 2.6 reports no error of a disk that is full")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
# safetensors writes the model under another name and renames it, so not through this link.
@pytest.mark.parametrize(
    ("mode", "file"), [("sync", "custom_checkpoint_0.pkl"), ("overlap", "optimizer.bin")]
)
def test_a_full_disk_in_a_checkpoint_loses_nothing_but_the_checkpoint(
    mode: str, file: str, tmp_path: Path
) -> None:
    """Writes to ``/dev/full`` fail as on a full disk; the run equals one that saved well."""
    well = Run(mode).train(FAILS)
    well.accelerator.save_state(str(tmp_path / "well"))
    expected = well.train(after=saver(tmp_path / "later")).result()
    well.close()
    run, folder = Run(mode).train(FAILS), tmp_path / "full"
    folder.mkdir()
    (folder / file).symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        run.accelerator.save_state(str(folder))
    run.accelerator.save_state(str(tmp_path / "elsewhere"))
    assert same(run.train(after=saver(tmp_path / "later")).result(), expected)
    run.close()
    run = Run(mode)
    run.accelerator.load_state(str(tmp_path / "elsewhere"))
    result = run.train(after=saver(tmp_path / "later")).result()
    assert same(result, expected | {"seen": expected["seen"][FAILS:]})
    run.close()
