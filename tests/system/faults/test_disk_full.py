"""A checkpoint that the disk cannot take: an error at once, and training goes on as if nothing was.

Two ways that need no rights: one file of the checkpoint is ``/dev/full``, whose writes fail with
ENOSPC as on a full disk; or files may not grow beyond a limit (EFBIG, in a child).
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from children import in_child
from fault_run import Run, saver
from support import same

from accel_scaler import ConfigError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system"),
]

FAILS = 5
"""Windows before the checkpoint that fails; two were saved before."""


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
    mode: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is torch's own, a line in the log says what it means, and the run equals one that
    saved well, bit for bit."""
    well = Run(mode).train(FAILS)
    well.accelerator.save_state(str(tmp_path / "well"))
    expected = well.train(after=saver(tmp_path / "later")).result()
    well.close()
    run, folder = Run(mode).train(FAILS), tmp_path / "full"
    folder.mkdir()
    (folder / file).symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        run.accelerator.save_state(str(folder))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"{str(folder)!r} was not finished" in record.message
    assert " MiB are free there" in record.message
    assert "save elsewhere" in record.message
    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        run.accelerator.load_state(str(folder))
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


def test_space_again_and_the_same_folder_is_mended(tmp_path: Path) -> None:
    run = Run("sync").train(2)
    (tmp_path / "scaler.pt").symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        run.accelerator.save_state(str(tmp_path))
    (tmp_path / "scaler.pt").unlink()
    run.accelerator.save_state(str(tmp_path))
    state = run.state()
    run.train(4)
    run.accelerator.load_state(str(tmp_path))
    assert same(run.state(), state)
    run.close()


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed offload"])
def test_files_that_may_not_grow_are_an_error_too(mode: str, tmp_path: Path) -> None:
    """Whichever file meets the limit, the model's too."""

    def body() -> None:
        run = Run(mode).train(FAILS)
        for limit in (0, 60, 300, 1500, 4000):
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                run.accelerator.save_state(str(tmp_path / f"{limit}"))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            else:
                text = ""
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            print(f"{limit} {text}")
            assert text, f"a limit of {limit} bytes was never met"
            refused = ""
            try:
                run.accelerator.load_state(str(tmp_path / f"{limit}"))
            except ConfigError as error:
                refused = str(error)
            assert "is not a complete checkpoint" in refused
        run.accelerator.save_state(str(tmp_path / "well"))
        torch.save(run.train(after=saver(tmp_path)).result(), tmp_path / "result.pt")

    status = in_child(body, tmp_path / "child.txt")
    assert status == 0, (tmp_path / "child.txt").read_text()
    run = Run(mode).train(FAILS)
    run.accelerator.save_state(str(tmp_path / "well"))
    expected = run.train(after=saver(tmp_path)).result()
    run.close()
    assert same(torch.load(tmp_path / "result.pt", weights_only=True), expected)
