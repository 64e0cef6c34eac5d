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
from fault_run import MODES, WINDOWS, Run, resume, saver
from support import same
from versions import before_torch

from accel_scaler import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS = 3
"""Of each mode."""
FAILS = 5
"""Windows before the checkpoint that fails; two were saved before."""
RAISES = 4
"""The window whose update raises, before it has changed anything; window 2 overflowed, so it is
the fourth update too."""


@functools.cache
def undisturbed(mode: str) -> tuple[dict[str, Any], int]:
    """What the run leaves, and how many calls it makes."""
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
    """A new process goes on from the last complete checkpoint, bit for bit. It saves as the other
    did: in ``delayed`` that publishes."""
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
    ("mode", "file"),
    [
        ("sync", "optimizer.bin"),
        ("sync", "custom_checkpoint_0.pkl"),
        ("overlap", "scaler.pt"),
        ("delayed offload", "random_states_0.pkl"),
    ],
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


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_raises(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ``sync`` its own error, out of the same window; else ``StepError`` by the end of the next,
    which names what was updated. Nothing has changed, and training can go on."""
    reference = Run(mode).train(RAISES)
    expected = reference.state()
    reference.close()
    step, updates = torch.optim.SGD.step, 0

    def failing(self: Any, closure: Any = None) -> Any:
        nonlocal updates
        updates += 1
        if updates == RAISES:
            raise ArithmeticError("the kernel failed")
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", failing)
    run = Run(mode)
    with pytest.raises((ArithmeticError, StepError)) as caught:  # noqa: PT012
        run.train(RAISES + 2)
        run.optimizer.synchronize()
    if mode == "sync":
        assert type(caught.value) is ArithmeticError
    else:
        assert type(caught.value) is StepError
        assert type(caught.value.__cause__) is ArithmeticError
        updated = "Updated: none. Of 0.weight, 0.bias, 3.weight, 3.bias some may have moved"
        assert updated in str(caught.value)
    assert run.progress.window - RAISES in ((0,) if mode.startswith("sync") else (0, 1))
    state = run.state()
    assert same([state["weights"], state["state"]], [expected["weights"], expected["state"]])
    run.model.zero_grad()
    run.train()
    assert run.progress.window == WINDOWS
    assert all(bool(p.isfinite().all()) for p in run.layers.parameters())
    run.close()
