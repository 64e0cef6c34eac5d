"""Whole training loops: ours against the stock loop, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from async_support import assert_same
from boundary_support import ours
from support import mlp, reset, stock, stock_fp16_on_cpu, weights
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from accel_scaler import ScalerConfig, attach

INF = float("inf")
WINDOWS = 8
OVERFLOWS = (0, 3, 4)
"""Windows whose gradients overflow."""
POWER_OF_TWO = {"init_scale": 4096.0, "growth_interval": 2}
OTHER_SCALE = {"init_scale": 1000.0, "growth_factor": 1.5, "growth_interval": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equals(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    # After an overflow torch returns inf or nan, ours always inf.
    mine, theirs = (
        run | {"norms": [n for n in run["norms"] if math.isfinite(n)]} for run in (mine, theirs)
    )
    assert_same(mine, theirs)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


Clip = tuple[str, float, float] | None


def train(
    build: Callable[..., Any],
    make: Callable[..., Optimizer],
    clip: Clip,
    *,
    accumulation: int = 1,
    scale: dict[str, Any] = POWER_OF_TWO,
    overflows: tuple[int, ...] = OVERFLOWS,
    clip_always: bool = False,
) -> dict[str, Any]:
    """An Accelerate loop with an LR schedule; ``clip_always``: on every micro-batch."""
    reset()
    handlers = [GradScalerKwargs(**scale)]
    accelerator = build(gradient_accumulation_steps=accumulation, kwargs_handlers=handlers)
    plain = mlp()
    inner = make(plain.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.7)
    model, optimizer, schedule = accelerator.prepare(plain, inner, schedule)
    kind, limit, norm_type = clip or ("none", 0.0, 0.0)
    names = ("losses", "scales", "rates", "skipped", "norms")
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(WINDOWS * accumulation):
        x, y = batch(number)
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            seen["losses"].append(loss.item())
            accelerator.backward(loss * INF if number // accumulation in overflows else loss)
            ends, norm = accelerator.sync_gradients, 0.0
            if kind == "value" and (clip_always or ends):
                accelerator.clip_grad_value_(list(model.parameters()), limit)
            elif kind == "norm" and (clip_always or ends):
                norm = accelerator.clip_grad_norm_(list(model.parameters()), limit, norm_type)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if ends:
            seen["norms"].append(float(norm))
            seen["scales"].append(accelerator.scaler.get_scale())
            seen["rates"].append(inner.param_groups[0]["lr"])
            seen["skipped"].append(optimizer.step_was_skipped)
    return {**seen, "weights": weights(plain), "state": inner.state_dict()["state"]}


CLIPS: dict[str, Clip] = {
    "no clip": None,
    "clip": ("norm", 0.5, 2.0),
    "clip inactive": ("norm", 1e4, 2.0),
    "norm 1": ("norm", 0.5, 1.0),
    "norm inf": ("norm", 0.05, INF),
    "value": ("value", 0.01, 0.0),
}
STOCK_RIGHT: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize(
    ("accumulation", "scale"), [(1, OTHER_SCALE), (3, POWER_OF_TWO)], ids=["1000", "2**12 by 3"]
)
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS.keys())
@pytest.mark.parametrize("make", STOCK_RIGHT.values(), ids=STOCK_RIGHT.keys())
def test_equals_the_stock_loop(make: Any, clip: Clip, accumulation: int, scale: Any) -> None:
    """Ours clips on every micro-batch, which stock must not: the numbers are the same."""
    theirs = train(stock, make, clip, accumulation=accumulation, scale=scale)
    mine = train(ours, make, clip, accumulation=accumulation, scale=scale, clip_always=True)
    assert_equals(mine, theirs)
    assert [number for number, skip in enumerate(mine["skipped"]) if skip] == list(OVERFLOWS)
    assert len(set(mine["scales"])) >= 3


def test_scaling_disabled_is_plain_autocast() -> None:
    """``enabled=False``: no scale, every step is taken, clip clips."""
    accelerator = ours(ScalerConfig(enabled=False), gradient_accumulation_steps=2)
    plain, reference = mlp(), mlp()
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.5))
    torchs = SGD(reference.parameters(), lr=0.5)
    for number in range(4):
        x, y = batch(number)
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            mine = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = reference(x)
        ((out.float() - y).square().mean() / 2).backward()
        if number % 2:
            assert mine == nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torchs.step()
            torchs.zero_grad()
    assert torch.equal(weights(plain), weights(reference))
    assert accelerator.scaler.get_scale() == 1.0


class OwnFused(torch.optim.Optimizer):
    """SGD that unscales and skips by itself, by what torch sets on it for the time of its step."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.received: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found: Tensor = self.found_inf
        self.received.append((found.item(), found.dtype, found.shape, found.device))
        scale: Tensor | None = self.grad_scale
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not found.item():
                p.add_(p.grad * factor, alpha=-0.1)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_it_receives_what_torch_sets(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    def run(accelerator: Any) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(1)
        net = mlp()
        model, prepared = accelerator.prepare(net, OwnFused(net.parameters()))
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            prepared.step()
            prepared.zero_grad()
        attached = hasattr(prepared, "synchronize")
        if attached:
            prepared.synchronize()
        received = prepared.optimizer.received
        return received, [p.detach() for p in net.parameters()]

    stock, expected = run(stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16")))
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode=mode)
    )
    ours, got = run(accelerator)
    assert ours == stock
    assert all(map(torch.equal, got, expected))
    assert ("OwnFused is stepped inside" in caplog.text) == (mode == "overlap")
