"""A whole training step under one ``torch.compile``: it trains as uncompiled, and nobody hangs.

Its forward is compiled; what ends a window is run as it is, between two graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import reset
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, attach

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]

STEPS = 6
OVERFLOWS = 3
each_mode = pytest.mark.parametrize("mode", ["sync", "overlap"])


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int) -> Tensor:
    x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4) + step
    return x * float("inf") if step == OVERFLOWS else x


def losses(one_step: Callable[[Tensor], Tensor], compiled: bool) -> list[Tensor]:
    call = torch.compile(one_step, backend="eager") if compiled else one_step
    return [call(batch(step)).clone() for step in range(STEPS)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def by_boundary(optimizer: AsyncOptimizer, scaler: GradScaler) -> None:
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_submit(optimizer: AsyncOptimizer, scaler: GradScaler) -> None:
    def fn() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    optimizer.submit(fn)
    scaler.update()
    optimizer.zero_grad()


def by_scaler(optimizer: AsyncOptimizer, scaler: GradScaler) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


ENDS = [by_boundary, by_submit, by_scaler]


def with_async_optimizer(end: Any, compiled: bool, mode: str) -> list[Tensor]:
    model, scaler = net(), GradScaler("cpu", init_scale=64.0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    ours = None if end is by_scaler else scaler
    with AsyncOptimizer(inner, model, scaler=ours, step_mode=mode) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def one_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            end(optimizer, scaler)
            schedule.step()
            return loss.detach()

        found = losses(one_step, compiled)
    return [*found, *model.parameters(), torch.tensor(scaler.get_scale())]


@each_mode
@pytest.mark.parametrize("end", ENDS)
def test_of_an_async_optimizer(end: Any, mode: str) -> None:
    found, expected = (with_async_optimizer(end, compiled, mode) for compiled in (True, False))
    assert_same(found, expected)


def with_accelerator(compiled: bool, mode: str) -> list[Tensor]:
    reset()
    accelerator: Any = attach(
        Accelerator(cpu=True, mixed_precision="fp16"),
        {"step_mode": mode, "init_scale": 64.0},
    )
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def one_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    found = losses(one_step, compiled)
    rates = torch.tensor(schedule.get_last_lr())
    state = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    return [*found, rates, *state.values(), torch.tensor(accelerator.scaler.get_scale())]


@each_mode
def test_of_an_accelerator(mode: str) -> None:
    assert_same(with_accelerator(True, mode), with_accelerator(False, mode))
