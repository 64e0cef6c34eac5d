"""SIGKILL and a full disk in a Trainer's checkpoint: what goes on from there, bit for bit.

``FAULT_MOMENTS=20`` kills twenty times as often. The children are forks of this process.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Saves, die_in_files_above, in_child, killed, many, seeded
from support import same, weights
from trainer_support import CONFIG, as_stock, logs, make, train
from transformers.utils import logging

from accel_scaler import ConfigError, attach

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, EVERY = 8, 2
KILLS = 4
STATE = "trainer_state.json"


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    """Their lock is shared with forks: one killed while it holds it would stop all the others."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def trainer(path: Path, mode: str = "sync", **kwargs: Any) -> Any:
    return attach(plain(path, **kwargs), replace(CONFIG, step_mode=mode))  # type: ignore[arg-type]


def plain(path: Path, **kwargs: Any) -> Any:
    every: dict[str, Any] = {"save_strategy": "steps", "save_steps": EVERY, "max_steps": STEPS}
    return make(path, (), **(every | kwargs))[0]


def left_by(run: Any) -> dict[str, Any]:
    """What a training leaves; every run here ends at the same step."""
    return {
        "weights": weights(run.model),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.accelerator.scaler.state_dict(),
        "logs": json.loads(json.dumps(logs(run)[:STEPS])),
        "random": torch.get_rng_state(),
    }


def watched(run: Any, saves: Saves) -> Any:
    """Its checkpoints go through ``saves``."""
    run._save_checkpoint = functools.partial(saves.call, run._save_checkpoint)
    return run


@functools.cache
def whole(mode: str) -> tuple[dict[str, Any], list[int]]:
    """The run that nobody disturbs, and the calls that each of its checkpoints takes."""
    with tempfile.TemporaryDirectory() as folder:
        result = left_by(train(trainer(Path(folder, "a"), mode)))
        saves = Saves()
        train(watched(trainer(Path(folder, "b"), mode), saves))
    return result, [9 * count // 10 for count in saves.counts]  # a wait more or less


def resumed_equals_whole(mode: str, path: Path) -> list[str]:
    """From the newest complete checkpoint, which the error names; what was refused."""

    def body() -> None:
        refused, start = [], any(path.glob("checkpoint-*")) or None
        run = trainer(path, mode)
        try:
            train(run, resume_from_checkpoint=start)
        except ConfigError as error:
            refused.append(str(error))
            named = re.search(r"resume_from_checkpoint='([^']*)'", str(error))
            train(run, resume_from_checkpoint=named and named[1])
        torch.save({"result": left_by(run), "refused": refused}, path / "resumed.pt")

    status = in_child(body, path / "resumed.txt")
    assert status == 0, (path / "resumed.txt").read_text()
    loaded = torch.load(path / "resumed.pt", weights_only=True)
    expected = whole(mode)[0]
    for key in expected:
        assert same(loaded["result"][key], expected[key]), key
    refused: list[str] = loaded["refused"]
    return refused


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_a_kill_in_a_trainers_checkpoint(mode: str, tmp_path: Path) -> None:
    """A folder that it tore is refused by name, with the one to take instead."""
    draw, path, refused = seeded(f"trainer {mode}"), tmp_path / "run", []
    for turn in range(many(KILLS)):
        number = draw.randrange(1, STEPS // EVERY)
        # Half of them early: later calls only write the state, rotate and clean up.
        deadly = draw.randrange(1, whole(mode)[1][number] // (1 + turn % 2))
        killed(path, lambda n=number, d=deadly: train(watched(trainer(path, mode), Saves(n, d))))
        found = resumed_equals_whole(mode, path)
        assert all(f"checkpoint-{EVERY * (number + 1)}'" in text for text in found)
        refused += found
    assert refused, "no kill left a torn folder: draw other moments"


@pytest.mark.parametrize("size", [100, 3_000, 30_000])
def test_a_kill_in_a_file_of_a_trainers_checkpoint(size: int, tmp_path: Path) -> None:
    """By the kernel, in the write that passes so many bytes; the first checkpoint is complete."""
    path, count = tmp_path / "run", 0

    def body() -> None:
        run = trainer(path)
        save = run._save_checkpoint

        def saving(*args: Any) -> None:
            nonlocal count
            if count == 1:
                die_in_files_above(size)
            count += 1
            save(*args)

        run._save_checkpoint = saving
        train(run)

    killed(path, body, -25)
    (text,) = resumed_equals_whole("sync", path)
    assert "checkpoint-4' is not a complete checkpoint: its trainer_state.json" in text
    assert "is missing" in text
    assert "checkpoint-2'), the newest complete one." in text


def test_a_checkpoint_written_over_is_refused_where_stock_takes_the_mixture(
    tmp_path: Path,
) -> None:
    """A run begun anew in the same folder, other data, dies in the middle of its checkpoint."""
    checkpoint = tmp_path / "checkpoint-2"

    def body(attached: bool) -> None:
        makes = trainer if attached else (lambda *a, **k: as_stock(plain(*a, **k)))
        train(makes(tmp_path, max_steps=2))
        again = makes(tmp_path, max_steps=2)
        again.train_dataset = again.train_dataset[::-1]
        again._save_scaler = lambda *_: signal.raise_signal(signal.SIGKILL)
        train(again)

    for attached, there in ((True, False), (False, True)):
        killed(tmp_path, lambda attached=attached: body(attached))
        assert (checkpoint / "optimizer.pt").exists()
        assert (checkpoint / STATE).exists() is there
    stock = as_stock(plain(tmp_path, max_steps=3, save_strategy="no"))
    train(stock, resume_from_checkpoint=True)  # the mixture, without a word
    (checkpoint / STATE).unlink()
    with pytest.raises(ConfigError, match=r"is missing.*no complete one beside it: start anew"):
        train(trainer(tmp_path), resume_from_checkpoint=True)


def test_a_state_cut_off_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    train(trainer(tmp_path))
    state = tmp_path / "checkpoint-8" / STATE
    state.write_bytes(state.read_bytes()[:-3])
    run = trainer(tmp_path)
    before = weights(run.model).clone()
    with pytest.raises(ConfigError) as caught:
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert str(caught.value) == (
        f"train: '{tmp_path}/checkpoint-8' is not a complete checkpoint: its trainer_state.json, "
        "which is written last, is cut off, so the process was ended while it saved. Call "
        f"train(resume_from_checkpoint='{tmp_path}/checkpoint-6'), the newest complete one."
    )
    assert torch.equal(weights(run.model), before)
    train(run, resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(left_by(run), whole("sync")[0])


def test_a_full_disk_in_a_trainers_checkpoint_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path)
    save = run._save_checkpoint

    def full(*args: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
        try:
            save(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)

    run._save_checkpoint = full
    with pytest.raises(Exception, match=r"(?i)large|write|pos|file"):
        train(run)
    (line,) = [text for text in caplog.messages if "was not finished" in text]
    assert f"the checkpoint '{tmp_path}/checkpoint-2' was not finished" in line
    with pytest.raises(ConfigError, match="is missing"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_complete_checkpoint_has_the_files_of_stock(tmp_path: Path) -> None:
    train(trainer(tmp_path / "ours", max_steps=2))
    train(as_stock(plain(tmp_path / "stock", max_steps=2)))
    names = [{p.name for p in (tmp_path / k / "checkpoint-2").iterdir()} for k in ("ours", "stock")]
    assert names[0] == names[1] > {STATE, "scaler.pt"}


def test_asked_to_go_on_where_there_is_nothing_it_says_what_stock_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises((ValueError, OSError)):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "not there"))
