"""Each fault of the stock stack beside the right number.

``stock()`` is Accelerate's own fp16 machinery with torch's scaler, switched on on a CPU. F8 to F10
are torch's and stand in test_grad_scaler.py; F1, F6, F7 and what a user reads of them in
test_my_run_says.py; F12 in tests/unit/async_optimizer/test_worker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attached import cpu
from boundary_support import models, ours
from support import LR, Linear, stock
from torch.optim import SGD

from accel_scaler import OverflowStreakError, ScalerConfig, attach, detach

OVERFLOW = float("inf")


@pytest.mark.parametrize(
    ("build", "second"), [(stock, 2.0**-16), (ours, 1.0)], ids=["stock", "ours"]
)
def test_f2_two_optimizers_and_a_clip(build: Any, second: float) -> None:
    """Stock unscales the second optimizer's gradients twice."""
    accelerator = build()
    both, optimizers = models(accelerator, 2)
    accelerator.backward(both[0](1.0) + both[1](1.0))
    norm = accelerator.clip_grad_norm_([m.w for m in both], 1e6)
    for optimizer in optimizers:
        optimizer.step()
    assert norm == pytest.approx(8**0.5)
    assert both[0].moved == 1.0
    # 1/65536 of 1/8 is lost next to a weight of 1, so look at the gradient.
    assert both[1].w.grad is not None
    assert both[1].w.grad.tolist() == [second] * 4


@pytest.mark.parametrize(("build", "second"), [(stock, 2.0), (ours, 1.0)], ids=["stock", "ours"])
def test_f3_overflow_in_the_first_only(build: Any, second: float) -> None:
    """Stock unscales the second optimizer by the scale that the first one's overflow halved."""
    accelerator = build()
    both, optimizers = models(accelerator, 2)
    accelerator.backward(both[0](OVERFLOW) + both[1](1.0))
    for optimizer in optimizers:
        optimizer.step()
    assert [m.moved for m in both] == [0.0, second]
    assert [o.step_was_skipped for o in optimizers] == [True, False]
    assert accelerator.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("clips", [False, True], ids=["steps", "clips"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "masters"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_f3_ours(mode: Any, dtype: torch.dtype, clips: bool) -> None:
    """Whoever unscales the second one: its step, its clip, the optimizer thread, or masters."""
    accelerator = ours(ScalerConfig(init_scale=2.0**10, step_mode=mode))
    plain = [Linear().to(dtype) for _ in range(2)]
    optimizers = [accelerator.prepare(SGD(m.parameters(), lr=LR)) for m in plain]
    both = [accelerator.prepare(m) for m in plain]
    accelerator.backward(both[0](OVERFLOW) + both[1](1.0))
    norms = []
    for model, optimizer in zip(both, optimizers, strict=True):
        if clips:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e6)))
        optimizer.step()
    detach(accelerator)
    assert [m.moved for m in both] == [0.0, 1.0]
    assert norms == ([OVERFLOW, 2.0] if clips else [])


@pytest.mark.parametrize(
    ("build", "scale", "tracker"), [(stock, 2.0**14, 2), (ours, 2.0**15, 1)], ids=["stock", "ours"]
)
def test_f4_two_updates_a_window(build: Any, scale: float, tracker: int) -> None:
    """Stock counts a window, and backs off, once for each optimizer."""
    accelerator = build()
    both, optimizers = models(accelerator, 2)
    for gradient in (OVERFLOW, 1.0):
        accelerator.backward(both[0](gradient) + both[1](gradient))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.scaler.get_scale() == scale
    assert accelerator.scaler._get_growth_tracker() == tracker


def accumulate_two(accelerator: Any, clip_on: Callable[[bool], bool]) -> Linear:
    """A window of two micro-batches, each with a gradient of 1; clip where ``clip_on`` says."""
    model = Linear()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(1.0))
            if clip_on(accelerator.sync_gradients):
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_f5_clip_on_every_micro_batch() -> None:
    """Stock raises on the second one; ours clips once, at the end."""
    with pytest.raises(RuntimeError, match="already been called"):
        accumulate_two(stock(gradient_accumulation_steps=2), lambda last: True)
    assert accumulate_two(ours(gradient_accumulation_steps=2), lambda last: True).moved == 1.0


@pytest.mark.parametrize(
    ("build", "moved"), [(stock, 0.5 + 2.0**15), (ours, 1.0)], ids=["stock", "ours"]
)
def test_f5_clip_before_the_last_micro_batch(build: Any, moved: float) -> None:
    """Stock adds scaled gradients to unscaled ones, and steps on the sum."""
    accelerator = build(gradient_accumulation_steps=2)
    assert accumulate_two(accelerator, lambda last: not last).moved == moved


def overflow(accelerator: Any, times: int) -> Linear:
    model = Linear()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    for _ in range(times):
        accelerator.backward(model(OVERFLOW))
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_f11_a_run_of_skips_ends_with_the_name_of_the_module() -> None:
    """Stock goes on to a scale of 0; ours keeps a minimum, and raises after as many as told."""
    accelerator = stock()
    overflow(accelerator, 170)
    assert accelerator.scaler.get_scale() == 0.0
    accelerator = attach(cpu(), min_scale=128.0, max_consecutive_skips=20)
    overflow(accelerator, 20)
    assert accelerator.scaler.get_scale() == 128.0
    with pytest.raises(OverflowStreakError, match=r"21 steps in a row.*: forward of Linear, "):
        overflow(accelerator, 1)


class Deferring(torch.amp.GradScaler):
    """Checks, and leaves the update for later: a scaler for an asynchronous optimizer."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=1024.0)
        self.later: list[Callable[[], Any]] = []

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if not sum(float(found) for found in state["found_inf_per_device"].values()):
            self.later.append(lambda: type(optimizer).step(optimizer))

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        for job in self.later:
            job()
        self.later.clear()


def rates_and_skips(accelerator: Any) -> tuple[list[float], list[bool], list[float], Linear]:
    """Four steps of which the second overflows, rates, skips, scales; the schedule halves the rate
    at each."""
    model = Linear()
    optimizer = SGD(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates, skipped, scales = [], [], []
    for gradient in (1.0, OVERFLOW, 1.0, 1.0):
        accelerator.backward(model(gradient))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        rates.append(optimizer.param_groups[0]["lr"])
        scales.append(accelerator.scaler.get_scale())
    return rates, skipped, scales, model


def test_f13_a_deferring_scaler_in_the_stock_wrapper() -> None:
    """It sees no step inside ``scaler.step``, calls all of them skipped, and the rate stays."""
    accelerator = stock()
    accelerator.scaler = Deferring()
    rates, skipped, _, model = rates_and_skips(accelerator)
    assert skipped == [True] * 4
    assert rates == [LR] * 4
    assert model.moved == 3.0  # though three steps were made


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_f13_ours(mode: str) -> None:
    """A scale that lags one step would make it two skips, and two back-offs."""
    accelerator = attach(cpu(), step_mode=mode, init_scale=1024.0)
    rates, skipped, scales, model = rates_and_skips(accelerator)
    detach(accelerator)
    assert skipped == [False, True, False, False]
    assert rates == [LR / 2, LR / 2, LR / 4, LR / 8]
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert model.moved == 1.0 + 0.5 + 0.25
