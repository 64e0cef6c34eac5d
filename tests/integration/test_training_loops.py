"""Whole training loops: ours against the stock loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from boundary_support import ours
from support import mlp, reset, stock, weights
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_scaler import ScalerConfig

INF = float("inf")
WINDOWS = 8
OVERFLOWS = (0, 3, 4)
"""Windows whose gradients overflow."""
POWER_OF_TWO = {"init_scale": 4096.0, "growth_interval": 2}
OTHER_SCALE = {"init_scale": 1000.0, "growth_factor": 1.5, "growth_interval": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Trace:
    """What a run did."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Tensor | None = None
    state: list[Tensor] = field(default_factory=list)

    def finish(self, model: nn.Module, optimizer: Optimizer) -> Trace:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = weights(model)
        self.state = [
            value
            for p in params
            for _, value in sorted(optimizer.state[p].items(), key=lambda item: item[0])
        ]
        return self

    def assert_equals(self, other: Trace) -> None:
        assert self.losses == other.losses
        assert self.scales == other.scales
        assert self.rates == other.rates
        assert self.skipped == other.skipped
        # After an overflow torch returns inf or nan, ours always inf.
        finite = [n for n in other.norms if torch.isfinite(torch.tensor(n))]
        assert [n for n in self.norms if n != INF] == finite
        assert self.weights is not None
        assert other.weights is not None
        assert torch.equal(self.weights, other.weights)
        assert len(self.state) == len(other.state)
        assert all(map(torch.equal, self.state, other.state))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


Clip = tuple[str, float, float] | None


def clip_gradients(accelerator: Any, params: list[Tensor], clip: Clip, trace: Trace) -> None:
    if clip is None:
        return
    kind, limit, norm_type = clip
    if kind == "value":
        accelerator.clip_grad_value_(params, limit)
        return
    norm = accelerator.clip_grad_norm_(params, limit, norm_type)
    if accelerator.sync_gradients:
        trace.norms.append(float(norm))


def train(
    build: Callable[..., Any],
    make: Callable[..., Optimizer],
    clip: Clip,
    *,
    accumulation: int = 1,
    scale: dict[str, Any] = POWER_OF_TWO,
    overflows: tuple[int, ...] = OVERFLOWS,
    clip_always: bool = False,
) -> Trace:
    """An Accelerate loop with an LR schedule; ``clip_always``: on every micro-batch."""
    reset()
    handlers = [GradScalerKwargs(**scale)]
    accelerator = build(gradient_accumulation_steps=accumulation, kwargs_handlers=handlers)
    plain = mlp()
    plain_optimizer = make(plain.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.7)
    model, optimizer, schedule = accelerator.prepare(plain, plain_optimizer, schedule)
    trace = Trace()
    for number in range(WINDOWS * accumulation):
        x, y = batch(number)
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            trace.losses.append(loss.item())
            window = number // accumulation
            accelerator.backward(loss * INF if window in overflows else loss)
            if clip_always or accelerator.sync_gradients:
                clip_gradients(accelerator, list(model.parameters()), clip, trace)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            trace.scales.append(accelerator.scaler.get_scale())
            trace.rates.append(plain_optimizer.param_groups[0]["lr"])
            trace.skipped.append(optimizer.step_was_skipped)
    return trace.finish(plain, plain_optimizer)


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
    mine.assert_equals(theirs)
    assert [number for number, skip in enumerate(mine.skipped) if skip] == list(OVERFLOWS)
    assert len(set(mine.scales)) >= 3


def train_in_torch(
    make: Callable[..., Optimizer], clip: Clip, scale: dict[str, Any], overflows: tuple[int, ...]
) -> Trace:
    """The loop of torch's documentation: unscale_, clip, and no step after an overflow."""
    scaler = torch.amp.GradScaler("cpu", **scale)
    model = mlp()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    trace = Trace()
    for number in range(WINDOWS):
        x, y = batch(number)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        trace.losses.append(loss.item())
        scaler.scale(loss * INF if number in overflows else loss).backward()
        scaler.unscale_(optimizer)
        found = any(float(f) for f in scaler._found_inf_per_device(optimizer).values())
        if clip is not None:
            kind, limit, norm_type = clip
            if kind == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), limit)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)
                trace.norms.append(float(norm))
        if not found:
            optimizer.step()
            schedule.step()
        scaler.update()
        optimizer.zero_grad()
        trace.skipped.append(found)
        trace.scales.append(scaler.get_scale())
        trace.rates.append(optimizer.param_groups[0]["lr"])
    return trace.finish(model, optimizer)


FUSED: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.1, fused=True),
    "adam": lambda params: Adam(params, lr=0.1, amsgrad=True, fused=True),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS.keys())
@pytest.mark.parametrize(
    ("make", "scale"),
    [(FUSED["adamw"], OTHER_SCALE), (FUSED["adam"], POWER_OF_TWO), (FUSED["sgd"], OTHER_SCALE)],
)
def test_fused_equals_torchs_documented_loop(make: Any, clip: Clip, scale: Any) -> None:
    """Stock Accelerate is wrong here (fault F1), so torch's own loop is the reference."""
    mine = train(ours, make, clip, scale=scale)
    mine.assert_equals(train_in_torch(make, clip, scale, OVERFLOWS))


def folding(**kwargs: Any) -> Any:
    return ours(ScalerConfig(fold_unscale=True), **kwargs)


@pytest.mark.parametrize("clip", [None, CLIPS["clip inactive"], CLIPS["norm 1"], CLIPS["value"]])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED.keys())
def test_folding_is_exact_unless_it_clips(make: Any, clip: Clip) -> None:
    """Only the clip of a 2-norm is folded; a coefficient of 1 leaves a power of two."""
    train(folding, make, clip).assert_equals(train(ours, make, clip))


@pytest.mark.parametrize("fold", [False, True], ids=["plain", "folded"])
def test_one_rounding_at_most(fold: bool) -> None:
    """A single clipped step of SGD, element by element."""
    accelerator = ours(ScalerConfig(fold_unscale=fold))
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=1.0, fused=True))
    x, y = batch(0)
    accelerator.backward((model(x) - y).square().mean() / 64)
    exact = [p.grad.double() / 2**16 for p in plain.parameters()]
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    coefficient = torch.clamp(1e-3 / (norm + 1e-6), max=1.0)
    assert float(coefficient) < 1
    before = [p.detach().clone() for p in plain.parameters()]
    optimizer.step()
    for p, start, grad in zip(plain.parameters(), before, exact, strict=True):
        update = start.double() - p.detach().double()
        ulp = torch.finfo(torch.float32).eps
        bound = grad.abs() * float(coefficient) * 2 * ulp + start.abs() * ulp
        assert bool(((update - grad * float(coefficient)).abs() <= bound + 1e-12).all())


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
