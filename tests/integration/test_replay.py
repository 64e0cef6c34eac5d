"""A window that overflowed is run again: what it says, and that nothing of it stays."""

from __future__ import annotations

import collections
import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd, windows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
MODES = pytest.mark.parametrize(
    "mode",
    [
        {},
        {"step_mode": "overlap"},
        {"step_mode": "overlap", "offload": "cpu"},
        {"step_mode": "delayed"},
        {"step_mode": "delayed", "offload": "cpu", "delay_compensation": "none"},
        {"fold_unscale": True},
    ],
    ids=lambda mode: "-".join(map(str, mode.values())) or "sync",
)


class Layer(nn.Module):
    """Everything in it that a second forward would move on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.calls, self.seen = 0, collections.deque([0.0], maxlen=3)
        self.running = torch.zeros(8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(random.random() + float(numpy.random.rand()))
        x = self.norm(self.drop(self.inner(x)).float())
        self.running += x.detach().mean(0)
        self.mean.add_(x.detach().mean(0))
        self.last = self.seen[-1]
        return x * (1 + self.last / 8)


class Net(nn.Module):
    """Layers, one of them behind a checkpoint; ``factor`` makes the last one's forward too large,
    ``steep`` its backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor, factor: float = 1.0, steep: float = 1.0) -> dict[str, Tensor]:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=self.reentrant)
        logits = self.head(x * factor)
        return {"logits": logits * steep / steep, "loss": logits.float().square().mean() / 64}


def loss_inside(out: dict[str, Tensor]) -> Tensor:
    return out["loss"]


def loss_outside(out: dict[str, Tensor]) -> Tensor:
    return (out["logits"].float() - 1).square().mean() / 64


def both(out: dict[str, Tensor]) -> Tensor:
    return out["loss"] + (out["logits"].float() - 1).square().mean() / 64


def train(
    loss: Callable[[dict[str, Tensor]], Tensor],
    factors: tuple[float, ...],
    accumulation: int = 1,
    make: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """State of all there is after each window, and what was found."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    plain = make()
    seen, found = [], []
    with attached(None, init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), momentum=0.9))
        for number, factor in enumerate(factors):
            for micro in range(accumulation):
                x = torch.randn(4, 8)
                is_last = micro == accumulation - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                accelerator.backward(loss(model(x, factor=factor if is_last else 1.0)))
            optimizer.step()
            grads = [p.grad.view(torch.int32).clone() for p in plain.parameters()]  # NaN too
            optimizer.zero_grad()
            found.append(accelerator.scaler_history.records[-1].first)
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in plain.modules()]
            attributes = [
                {k: copy.deepcopy(v) for k, v in vars(m).items() if k in KEPT}
                for m in plain.modules()
            ]
            seen.append(
                {
                    "grads": grads,
                    "model": copy.deepcopy(plain.state_dict()),
                    "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
                    "scaler": accelerator.scaler.state_dict(),
                    "random": (torch.get_rng_state(), random.getstate(), number),
                    "numpy": numpy.random.get_state()[1].tolist(),
                    "attributes": attributes,
                    "names": [sorted(vars(m)) for m in plain.modules()],
                }
            )
            found_hooks.append(hooks)
    return seen, found


KEPT = ("calls", "seen", "running", "last", "training")
found_hooks: list[list[int]] = []


@MODES
@pytest.mark.parametrize("loss", [loss_inside, loss_outside, both])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_nothing_of_it_stays(mode: dict[str, Any], loss: Any, accumulation: int) -> None:
    """Beside the same run without it: every number, bit for bit."""
    factors = (1.0, 1e9, 1.0, 1.0, 1e9, 1.0)
    found_hooks.clear()
    plain, _ = train(loss, factors, accumulation, find_overflow="off", **mode)
    without = found_hooks[0]
    again, found = train(loss, factors, accumulation, find_overflow="replay", **mode)
    assert [each is not None for each in found] == [factor > 1 for factor in factors]
    for one, other in zip(again, plain, strict=True):
        assert_same(one, other)
    # The root has two hooks more, before and after.
    assert all(sum(hooks) == sum(without) + 2 for hooks in found_hooks[len(factors) :])


class Secret(Net):
    """A random number of a generator that nobody knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator()

    def forward(self, x: Tensor, factor: float = 1.0, steep: float = 1.0) -> dict[str, Tensor]:
        drawn = torch.rand((), generator=self.chance)
        return super().forward(x + drawn, factor, steep) | {"drawn": drawn}


@pytest.mark.parametrize("asked", [True, False])
def test_what_differs_is_said_and_the_next_window_is_watched(
    asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"find_overflow": "replay"} if asked else {"max_consecutive_skips": 9}
    with caplog.at_level(logging.INFO):
        _, found = train(loss_inside, (1.0, 1e9, 1e9, 1.0), make=Secret, **settings)
    assert [each is not None for each in found] == [False, False, True, False]
    (said,) = [r for r in caplog.records if "could not be run again" in r.getMessage()]
    assert "it did not give the same numbers: output drawn was " in said.getMessage()
    assert (said.levelno == logging.WARNING) == asked


def test_telemetry_is_as_without_it(tmp_path: Path) -> None:
    """But for the times, and for where it began."""

    def windows(**settings: Any) -> list[dict[str, Any]]:
        path = tmp_path / f"{settings['find_overflow']}.jsonl"
        train(both, (1.0, 1e9, 1.0, 1e9), 2, telemetry=str(path), underflow_interval=1, **settings)
        lines = windows_of(path)
        for line in lines:
            line.pop("first", None)
            for name in [name for name in line if name == "time" or name.endswith("_us")]:
                del line[name]
        return lines

    assert windows(find_overflow="replay") == windows(find_overflow="off")
