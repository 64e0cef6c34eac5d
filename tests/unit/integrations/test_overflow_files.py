"""``save_overflow``: when a file is written, what is told, and that training does not notice."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from async_support import assert_same
from telemetry_runs import MODES, attached, batch, sgd
from torch import Tensor, nn

from accel_scaler import ConfigError, ScalerConfig
from accel_scaler.integrations.overflow_files import MOST_FILES
from accel_scaler.overflow_finder import read

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Given:
    """No plain value."""

    factor: float


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, given: Any = 1.0) -> Tensor:
        factor = given.factor if isinstance(given, Given) else given
        return self.head(self.body(x).float() * factor)


Loop = Callable[[int], Any]


def train(
    bad: str, make: Loop = lambda number: 1e9, net: Callable[[], nn.Module] = Net, **settings: Any
) -> Any:
    """One window a letter, those with an x overflow; state of all there is at the end."""
    torch.manual_seed(5)
    plain = net()
    with attached(None, init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number, letter in enumerate(bad):
            x, y = batch(number)
            out = model(x, make(number) if letter == "x" else 1.0)
            accelerator.backward((out.float() - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = [plain.state_dict(), optimizer.state_dict()["state"]]
        return [*state, accelerator.scaler.state_dict(), torch.get_rng_state()]


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_as_without_it(mode: str, tmp_path: Path) -> None:
    bad = "-x-xx-"
    without = train(bad, find_overflow="replay", **MODES[mode])
    saving = train(bad, save_overflow=str(tmp_path / "a" / "b"), **MODES[mode])
    assert_same(saving, without)
    names = sorted(os.listdir(tmp_path / "a" / "b"))
    assert names == ["overflow-000001-rank0.pt", "overflow-000003-rank0.pt"]


def test_the_weights_are_those_of_the_forward(tmp_path: Path) -> None:
    train("---x-", save_overflow=str(tmp_path), step_mode="overlap")
    state, *_ = train("---")
    file = read(tmp_path / "overflow-000003-rank0.pt")
    assert file.weights is not None
    for name, p in state.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(file.weights[name], p), name
    assert file.about["scale"] == 64.0


def test_a_handful_of_files_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train("x-" * (MOST_FILES + 2), save_overflow=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == MOST_FILES
    assert caplog.text.count("accel-scaler replay") == MOST_FILES
    assert f"the last of {MOST_FILES}" in caplog.text


def test_a_file_of_a_run_before_stays(tmp_path: Path) -> None:
    for _ in range(2):
        train("x", save_overflow=str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert names == ["overflow-000000-rank0-2.pt", "overflow-000000-rank0.pt"]


def test_what_cannot_be_saved_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("x-x-x", lambda number: Given(1e9), save_overflow=str(tmp_path))
    assert caplog.text.count("is not saved: argument 1 is a ") == 1
    assert "Given" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_window_that_cannot_be_run_again_is_not_saved_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changes(Net):
        def forward(self, x: Tensor, given: Any = 1.0) -> Tensor:
            out: Tensor = super().forward(x, given)
            x += 1
            return out

    train("x-x", net=Changes, save_overflow=str(tmp_path))
    assert caplog.text.count("is not saved: a forward was not kept") == 1
    assert not list(tmp_path.iterdir())


def test_batch_statistics_of_several_ranks_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process that takes itself for two; such a layer has no kernel on a CPU."""

    class Synced(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.SyncBatchNorm(8).requires_grad_(False)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    train("x", save_overflow=str(tmp_path), net=Synced)
    assert "norm (SyncBatchNorm) takes the batches of all ranks" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_becomes_unwritable_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out"

    def spoil(number: int) -> float:
        if folder.is_dir():
            shutil.rmtree(folder)
            folder.write_text("a file now")
        return 1e9

    with caplog.at_level(logging.WARNING):
        state = train("x-x--", spoil, save_overflow=str(folder))
    assert_same(state, train("x-x--", find_overflow="replay"))
    assert caplog.text.count("no file was written") == 1


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing/here"])
def test_a_folder_that_cannot_be_is_refused_before_anything_starts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be written to"),
        attached(Path("run.jsonl"), save_overflow=place),
    ):
        pass
    assert not Path("run.jsonl").exists()


@pytest.mark.parametrize("how", ["always", "off", True])
def test_it_needs_a_window_that_is_run_again(how: Any) -> None:
    with pytest.raises(ConfigError, match="leave it at 'auto'"):
        ScalerConfig(save_overflow="out", find_overflow=how)
