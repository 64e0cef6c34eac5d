"""SIGKILL at seeded moments, in ``save_state`` too: a new process goes on bit for bit.

From the newest checkpoint that ``load_state`` accepts. ``FAULT_MOMENTS=20`` kills twenty times as
often, ``FAULT_SEED`` at other moments. The children are forks: nothing is imported again.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Moments, Saves, die_in_files_above, in_child, killed, many, seeded
from fault_run import MODES, SAVED, Run, resume, saver
from support import reset, same, stock

from accel_scaler import ConfigError
from accel_scaler.integrations.checkpoints import MARK

pytestmark = pytest.mark.usefixtures("one_thread")

KILLS = 3
"""Of each kind and mode."""


def watched(folder: Path, saves: Saves) -> Callable[[Run], None]:
    """``saver``, through ``saves``."""
    save = saver(folder)

    def after(run: Run) -> None:
        if run.progress.window - 1 in SAVED:
            saves.call(save, run)

    return after


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
        run, saves = Run(mode), Saves()
        run.train(after=watched(Path(folder), saves))
        run.close()
    # Waits take some calls more or fewer; so late a moment might not come.
    counts = [9 * count // 10 for count in (moments.count, *saves.counts)]
    return {"result": result, "calls": counts[0], "saves": counts[1:]}


def resumed_equals_whole(mode: str, folder: Path) -> tuple[int, list[str]]:
    """In a new process; the window it began with, and what it was told of torn checkpoints.

    It saves as the other did, into the torn folder too: in ``delayed`` that publishes.
    """

    complete = sorted(p.name for p in folder.glob("after_*") if not list(p.glob(f"{MARK}.*")))
    # A folder that the kill left before its first file is no checkpoint either.
    complete = [name for name in complete if (folder / name / "scaler.pt").exists()]

    def body() -> None:
        run, refused = resume(mode, folder)
        began = run.progress.window
        result = run.train(after=saver(folder)).result()
        torch.save({"result": result, "began": began, "refused": refused}, folder / "resumed.pt")

    status = in_child(body, folder / "resumed.txt")
    assert status == 0, (folder / "resumed.txt").read_text()
    loaded = torch.load(folder / "resumed.pt", weights_only=True)
    began, result = loaded["began"], loaded["result"]
    expected = dict(whole(mode)["result"])
    expected["seen"] = expected["seen"][began:]
    for key in expected:
        assert same(result[key], expected[key]), (key, began)
    assert began == int((complete or ["after_00"])[-1][-2:])
    return began, loaded["refused"]


def lines_are_whole(path: Path) -> None:
    for line in path.read_text().splitlines() if path.exists() else ():
        json.loads(line)


def killed_run(mode: str, folder: Path, body: Callable[[Run], object], expected: int = -9) -> None:
    """A child trains in ``body`` and is killed there."""
    killed(folder, lambda: body(Run(mode, telemetry=str(folder / "run.jsonl"))), expected)
    lines_are_whole(folder / "run.jsonl")


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_a_random_moment_of_training(mode: str, tmp_path: Path) -> None:
    draw, folder = seeded(f"training {mode}"), tmp_path / "run"
    for _ in range(many(KILLS)):
        deadly = draw.randrange(1, whole(mode)["calls"])

        def body(run: Run, deadly: int = deadly) -> None:
            with Moments(deadly):
                run.train(after=saver(folder))

        killed_run(mode, folder, body)
        resumed_equals_whole(mode, folder)


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_in_the_middle_of_save_state(mode: str, tmp_path: Path) -> None:
    """The torn folder is refused by name, and the one before is taken."""
    draw, folder, refusals = seeded(f"saving {mode}"), tmp_path / "run", []
    for _ in range(many(KILLS)):
        number = draw.randrange(len(SAVED))
        deadly = draw.randrange(1, whole(mode)["saves"][number])

        def body(run: Run, number: int = number, deadly: int = deadly) -> None:
            run.train(after=watched(folder, Saves(number, deadly)))

        killed_run(mode, folder, body)
        refusals += resumed_equals_whole(mode, folder)[1]
    said = ("is not a complete checkpoint", "is empty")
    assert all("after_" in text and any(s in text for s in said) for text in refusals)
    assert refusals, "no kill left a torn folder: draw other moments"


@pytest.mark.parametrize("mode", ["sync", "delayed offload"])
def test_a_kill_in_the_middle_of_a_file(mode: str, tmp_path: Path) -> None:
    """By the kernel, in the write that passes so many bytes: some file of the second checkpoint
    is cut off there."""
    draw, folder = seeded(f"writing {mode}"), tmp_path / "run"
    for size in [20, *(draw.randrange(100, 9000) for _ in range(many(KILLS)))]:

        def body(run: Run, size: int = size) -> None:
            run.train(SAVED[1], saver(folder))
            die_in_files_above(size)
            run.train(after=saver(folder))

        killed_run(mode, folder, lambda run, body=body: body(run), -25)
        began, refused = resumed_equals_whole(mode, folder)
        assert (began, len(refused)) == (SAVED[0] + 1, 1)


def test_a_checkpoint_half_overwritten_is_refused_where_stock_takes_the_mixture(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"

    def body() -> None:
        run = Run("sync").train(2)
        run.accelerator.save_state(str(folder))
        run.train(5)
        die_in_files_above(4000)  # of the files here only the random numbers take more
        run.accelerator.save_state(str(folder))

    assert in_child(body, tmp_path / "child.txt") == -25
    run = Run("sync")
    fresh = run.state()
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        run.accelerator.load_state(str(folder))
    assert same(run.state(), fresh), "something was loaded before it was refused"
    run.close()
    theirs = stock()
    model = theirs.prepare(torch.nn.Sequential(*Run("sync").layers))
    theirs._custom_objects.clear()
    (folder / "custom_checkpoint_0.pkl").unlink()
    theirs.load_state(str(folder))  # without a word, the random numbers left as they are
    assert not same([p.detach() for p in model.parameters()], fresh["weights"])
    reset()


@pytest.mark.parametrize("kept", [0, 40, 5000])
def test_random_numbers_cut_off_by_a_stock_save_are_refused(kept: int, tmp_path: Path) -> None:
    """Stock goes on with other random numbers, silently; ours names the file."""
    run = Run("overlap").train(2)
    run.accelerator.save_state(str(tmp_path))
    numbers = tmp_path / "random_states_0.pkl"
    content = numbers.read_bytes()
    assert len(content) > kept
    numbers.write_bytes(content[:kept])
    with pytest.raises(ConfigError, match=r"random_states_0.pkl' is cut off \(\d+ bytes\)"):
        run.accelerator.load_state(str(tmp_path))
    run.close()


def test_an_empty_folder_is_refused_as_what_a_kill_leaves(tmp_path: Path) -> None:
    run = Run("sync")
    with pytest.raises(ConfigError, match="is empty"):
        run.accelerator.load_state(str(tmp_path))
    run.close()


def test_random_numbers_that_are_missing_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run("overlap").train(2)
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.load_state(str(tmp_path))
    assert not caplog.records
    (tmp_path / "random_states_0.pkl").unlink()
    run.accelerator.load_state(str(tmp_path))
    (record,) = caplog.records
    assert "has no random_states_0.pkl" in record.message
    run.close()


def test_a_complete_checkpoint_has_the_files_of_stock_and_no_more(tmp_path: Path) -> None:
    run = Run("sync").train(2)
    run.accelerator.save_state(str(tmp_path / "a"))
    names = {path.name for path in (tmp_path / "a").iterdir()}
    super_save = type(run.accelerator).__mro__[1].save_state
    super_save(run.accelerator, str(tmp_path / "b"))
    assert names == {path.name for path in (tmp_path / "b").iterdir()}
    run.close()


def test_automatic_naming_marks_and_refuses_too(tmp_path: Path) -> None:
    """There Accelerate chooses the folder, and would load the newest, torn or not."""
    run = Run("sync").train(2)
    run.accelerator.project_configuration.automatic_checkpoint_naming = True
    run.accelerator.project_configuration.set_directories(str(tmp_path))
    run.accelerator.save_state()
    run.accelerator.load_state()
    run.train(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.optimizer.optimizer, "state_dict", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.accelerator.save_state()
    with pytest.raises(ConfigError, match="checkpoint_1' is not a complete"):
        run.accelerator.load_state()
    run.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert run.progress.window == 2
    run.close()


def test_a_mark_of_a_rank_that_is_no_more_goes_with_the_next_save(tmp_path: Path) -> None:
    run = Run("sync").train(2)
    (tmp_path / f"{MARK}.1").write_text("")
    with pytest.raises(ConfigError, match=rf"{MARK}\.1"):
        run.accelerator.load_state(str(tmp_path))
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.load_state(str(tmp_path))
    run.close()
