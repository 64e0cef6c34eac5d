"""A checkpoint that the disk cannot take: an error at once, and training goes on as if nothing was.

A way that needs no rights: one file of the checkpoint is ``/dev/full``, whose writes fail with
ENOSPC as on a full disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_run import Run, saver
from support import same
from versions import before_torch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system"),
]

FAILS = 5
"""Windows before the checkpoint that fails; two were saved before."""


@before_torch(2, 7, "torch 2.6 reports no error of a disk that is full")
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
    """The error is torch's own, and the run equals one that saved well, bit for bit."""
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
    # What was saved elsewhere is the state of that moment.
    run = Run(mode)
    run.accelerator.load_state(str(tmp_path / "elsewhere"))
    result = run.train(after=saver(tmp_path / "later")).result()
    expected["seen"] = expected["seen"][FAILS:]
    assert same(result, expected)
    run.close()
