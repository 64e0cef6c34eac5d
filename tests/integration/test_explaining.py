"""An overflow is explained by watching the next windows, or by running its window again: neither
changes a number."""

from __future__ import annotations

import copy
import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd, windows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_scaler.config import LOOKS_AFTER

pytestmark = pytest.mark.usefixtures("one_thread")

OVERFLOWS = (1.0, 1e9, 1e9, 1.0, 1.0, 1e9, 1.0, 1e9, 1e9, 1e9, 1.0, 1.0)


class Net(nn.Module):
    """``last`` overflows at a large factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)).float() * factor)
        return out

    def middle(self, x: Tensor) -> Tensor:
        return x


class Momentum(Net):
    """As MoCo: a second encoder follows the first one, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.key = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        for mine, theirs in zip(self.key.parameters(), self.first.parameters(), strict=True):
            mine.data = mine.data * 0.9 + theirs.data * 0.1
        return super().forward(x + self.key(x).float(), factor)


class Counting(Net):
    """An iterator and a counter among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.calls = itertools.count(), 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + (next(self.numbers) + self.calls) / 64)


class Layer(nn.Module):
    """Dropout, running statistics, a buffer, Python's and NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.inner(x)).float())
        self.mean.add_(x.detach().mean(0))
        return x * (1 + (random.random() + float(numpy.random.rand())) / 8)


class Random(Net):
    """One layer, and another one behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)
        return out


class Writes(Net):
    """Its forward writes to parameters: a frozen one, and those that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(8), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        self.slow.mul_(0.9).add_(self.first.bias.detach(), alpha=0.1)
        with torch.no_grad():
            self.last.weight.mul_(0.99)
        torch.mul(self.first.bias.data, 0.99, out=self.first.bias.data)
        return x + self.slow


def train(kind: type[Net], accumulation: int = 2, **settings: Any) -> tuple[Any, list[Any]]:
    """All there is afterwards, and what was found in each window."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    plain = kind()
    with attached(settings.pop("path", None), init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), momentum=0.9))
        for factor in OVERFLOWS:
            for _ in range(accumulation):
                loss = (model(torch.randn(4, 8), factor).float() - 1).square().mean() / 64
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        records = list(accelerator.scaler_history.records)
        assert [r.found_inf for r in records] == [factor > 1 for factor in OVERFLOWS]
        end = {
            "model": copy.deepcopy(plain.state_dict()),
            "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
            "scaler": accelerator.scaler.state_dict(),
            "random": (torch.get_rng_state(), random.getstate()),
            "numpy": numpy.random.get_state()[1].tolist(),
        }
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in plain.modules()]
    assert not any(hooks)
    return end, [None if r.first is None else r.first["module"] for r in records]


EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])


@EACH_MODE
@pytest.mark.parametrize("kind", [Momentum, Counting, Random])
def test_a_run_that_is_watched_ends_as_one_that_is_not(
    kind: type[Net], mode: str, tmp_path: Path
) -> None:
    """Whatever state the forward keeps; bit for bit."""
    plain, nothing = train(kind, find_overflow="off", step_mode=mode)
    given: dict[str, Any] = {"path": tmp_path / "run.jsonl", "max_consecutive_skips": 9}
    watched, found = train(kind, step_mode=mode, **given)
    assert_same(watched, plain)
    assert nothing == [None] * len(OVERFLOWS)
    assert found == [{2: "last", 7: "last"}.get(n) for n in range(len(OVERFLOWS))]


@EACH_MODE
def test_a_run_that_asks_for_nothing_is_watched_after_six_overflows_in_a_row(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = [1e9] * LOOKS_AFTER, [1e9] * (LOOKS_AFTER + 3)
    factors = (1.0, *few, 1.0, 1.0, *many, 1.0)  # no other follows the first ones
    monkeypatch.setattr(f"{__name__}.OVERFLOWS", factors)
    plain, _ = train(Random, find_overflow="off", step_mode=mode)
    watched, found = train(Random, step_mode=mode)
    assert_same(watched, plain)
    # Those of the first run have begun the watch that meets window 9; it ends there.
    assert [n for n, each in enumerate(found) if each == "last"] == [9, 15]
    assert found.count(None) == len(factors) - 2


@pytest.mark.parametrize(("mode", "accumulation"), [("sync", 3), ("overlap", 1)])
@pytest.mark.parametrize("kind", [Random, Momentum, Writes])
def test_a_window_that_runs_again_puts_parameters_buffers_and_random_state_back(
    kind: type[Net], mode: str, accumulation: int
) -> None:
    """The first window of each run of overflows runs again."""
    plain, _ = train(kind, accumulation, find_overflow="off", step_mode=mode)
    again, found = train(kind, accumulation, find_overflow="replay", step_mode=mode)
    assert_same(again, plain)
    assert found == [{1: "last", 5: "last", 7: "last"}.get(n) for n in range(len(OVERFLOWS))]


def test_statistics_that_a_batch_made_nan_stay_so_where_nothing_is_made_again() -> None:
    def statistics(find: str) -> Tensor:
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        with attached(None, init_scale=64.0, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
            accelerator.backward(model(torch.full((4, 8), math.inf)).float().mean())
            optimizer.step()
            assert optimizer.step_was_skipped
        found: Tensor = plain[1].running_mean
        return found

    assert statistics("replay").isnan().all()
    assert statistics("off").isnan().all()


def test_a_record_is_the_same_when_its_window_runs_again(tmp_path: Path) -> None:
    """But for the times, and for where it began."""

    def windows(find: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{find}.jsonl"
        train(Random, path=path, find_overflow=find)
        skipped = ("first", "time")
        return [
            {k: v for k, v in line.items() if k not in skipped and not k.endswith("_us")}
            for line in windows_of(path)
        ]

    assert windows("replay") == windows("off")
