"""An overflow is explained by watching the next windows, which changes no number."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from async_support import assert_same
from telemetry_runs import MODES, attached, sgd
from torch import Tensor, nn

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


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Cached(Net):
    """As a key-value cache, which a forward that is given it appends to."""

    def forward(self, x: Tensor, factor: float, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        cache.seen.append(x.detach())
        return super().forward(x + torch.stack(cache.seen).mean(0), factor)


class Counting(Net):
    """An iterator and a counter among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.calls = itertools.count(), 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + (next(self.numbers) + self.calls) / 64)


class CountsBackwards(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        CountsBackwards.count += 1
        return grad * (1 + CountsBackwards.count / 64)


class Backwards(Net):
    """Its backward depends on how many there were before."""

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = CountsBackwards.apply(x)
        return out


class Random(Net):
    """Dropout, running statistics, Python's and NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(x.float()))
        return out * (1 + (random.random() + float(numpy.random.rand())) / 8)


def train(kind: type[Net], accumulation: int = 2, **settings: Any) -> tuple[Any, list[Any]]:
    """All there is afterwards, and what was found in each window."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    CountsBackwards.count = 0
    plain, cache = kind(), Cache()
    more = {"cache": cache} if kind is Cached else {}
    with attached(settings.pop("path", None), init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), momentum=0.9))
        for factor in OVERFLOWS:
            for _ in range(accumulation):
                loss = (model(torch.randn(4, 8), factor, **more).float() - 1).square().mean() / 64
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
            "cache": len(cache.seen),
            "backwards": CountsBackwards.count,
        }
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in plain.modules()]
    assert not any(hooks)
    return end, [None if r.first is None else r.first["module"] for r in records]


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("kind", [Momentum, Cached, Counting, Backwards, Random])
def test_a_run_that_is_looked_at_ends_as_one_that_is_not(
    kind: type[Net], mode: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever state the forward keeps; bit for bit."""
    plain, nothing = train(kind, find_overflow="off", **mode)
    looked, found = train(kind, path=tmp_path / "run.jsonl", max_consecutive_skips=9, **mode)
    assert_same(looked, plain)
    assert nothing == [None] * len(OVERFLOWS)
    assert found == [{2: "last", 7: "last"}.get(n) for n in range(len(OVERFLOWS))]
