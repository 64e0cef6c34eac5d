"""What ranks tell the launcher, and the line that it makes of it."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from attached import cpu, prepared, train
from support import mlp

from accel_scaler import attach, detach
from accel_scaler.integrations import attachment as attachment_module
from accel_scaler.launch.totals import VARIABLE, Totals, closing_line, read_totals, tell_at_end


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's, and this process is one that it has started."""
    monkeypatch.setattr(attachment_module, "_listeners", [tell_at_end])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "told"))
    (tmp_path / "told").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "told"


def run(steps: int, bad: int = 0, **settings: Any) -> None:
    """Train a little, and forget it."""
    accelerator: Any = attach(cpu(), init_scale=2.0, **settings)
    model, optimizer = prepared(accelerator)
    for step in range(steps):
        loss = model(torch.ones(2, 8)).mean() * (float("inf") if step < bad else 1.0)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler_history.boundaries == steps
    detach(accelerator)


def test_each_accelerator_tells_once_it_is_over(folder: Path) -> None:
    run(3)
    run(4, bad=2, telemetry="a.jsonl")
    run(0, telemetry="a.jsonl")
    run(1, telemetry="out/b-{rank}.jsonl")
    gc.collect()
    paths = (os.path.abspath("a.jsonl"), os.path.abspath("out/b-0.jsonl"))
    told = read_totals(folder)
    assert told == Totals(windows=8, skips=2, runs=3, paths=paths, is_known=True)
    assert [file.name for file in folder.iterdir()] == [f"{os.getpid()}.jsonl"]


def test_what_is_alive_has_not_told_and_others_than_rank_0_never_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = attach(cpu())
    train(accelerator, *prepared(accelerator))
    assert read_totals(folder) == Totals()
    detach(accelerator)
    del accelerator
    gc.collect()
    assert read_totals(folder).windows == 3
    other = cpu()
    monkeypatch.setattr(type(other), "process_index", property(lambda self: 1))
    attach(other)
    detach(other)
    del other
    gc.collect()
    assert read_totals(folder).windows == 3
    assert len(next(folder.iterdir()).read_text().splitlines()) == 1


def test_a_run_without_fp16_tells_nothing(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(Accelerator(cpu=True))
    gc.collect()
    assert read_totals(folder) == Totals()


@pytest.mark.parametrize("gone", ["folder", "variable"])
def test_without_a_launcher_there_is_nobody_to_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    if gone == "variable":
        monkeypatch.delenv(VARIABLE)
    else:
        folder.rmdir()
    run(1)
    gc.collect()
    assert not folder.exists() or not list(folder.iterdir())


def test_the_files_of_several_processes_are_added_up(folder: Path) -> None:
    for pid in (7, 8):
        row = {"windows": 5, "skips": 1, "path": None if pid == 7 else "/x/run.jsonl"}
        (folder / f"{pid}.jsonl").write_text(json.dumps(row) + "\n")
    assert read_totals(folder) == Totals(10, 2, 2, ("/x/run.jsonl",), True)
    assert mlp()  # the rest of the folder is not looked at


HERE = "to see them: accel-scaler report"


@pytest.mark.parametrize(
    ("totals", "grown", "status", "expected"),
    [
        (Totals(), [], 0, None),
        (Totals(), [], 1, None),
        # Killed, so nobody has told; the file has grown all the same.
        (Totals(), ["run.jsonl"], 137, f"{HERE} run.jsonl"),
        (Totals(1, 0, 1, (), True), [], 0, "1 window, 0 skipped"),
        (Totals(120, 3, 1, ("{}/a b.jsonl",), True), ["a b.jsonl"], 0,
         f"120 windows, 3 skipped; {HERE} 'a b.jsonl'"),
        (Totals(9, 1, 2, ("/elsewhere/x.jsonl", "{}/out/y.jsonl"), True), [], 1,
         f"9 windows, 1 skipped in 2 runs; {HERE} /elsewhere/x.jsonl out/y.jsonl"),
        (Totals(9, 1, 6, tuple(f"{{}}/{i}" for i in range(6)), True), [], 0,
         f"9 windows, 1 skipped in 6 runs; {HERE} 0 1 2 3 (and 2 more files)"),
        (Totals(0, 0, 0, ("{}/a.jsonl",), True), [], 0,
         "no window: no optimizer step of an attached Accelerator was seen"),
        (Totals(0, 0, 0, ("{}/a.jsonl",), True), [], 1, None),  # it failed before
    ],
)  # fmt: skip
def test_the_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    totals: Totals,
    grown: list[str],
    status: int,
    expected: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = tuple(path.format(tmp_path) for path in totals.paths)
    totals = Totals(totals.windows, totals.skips, totals.runs, paths, totals.is_known)
    line = closing_line(totals, grown, status)
    assert line == (None if expected is None else f"accel-scaler: {expected}")
