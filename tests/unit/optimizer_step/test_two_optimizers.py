"""Several optimizers over the same parameters step in turn, as in torch.

A notebook cell that is run again prepares another optimizer over the same model, which goes on from
the newest values with fresh state. The reference is a plain loop with masters written out.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from async_support import lazy
from references import INIT_SCALE, Reference
from support import mlp, reset, weights
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import AsyncOptimizer, GradScaler, OrderError, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
WAYS = [("sync", HALF), ("sync", BRAIN), ("overlap", HALF), ("overlap", FULL)]
ways = pytest.mark.parametrize(("mode", "dtype"), WAYS, ids=str)
RATES = 0.1, 0.05


def sgd(params: Any, lr: float = 0.1) -> SGD:
    return SGD(params, lr=lr, momentum=0.9)


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: Tensor = model(x).float().square().mean()
    return loss


def plain(dtype: torch.dtype, *runs: range) -> Tensor:
    """Each run has an optimizer and masters of its own; returns the model."""
    model = mlp().to(dtype)
    for run in runs:
        reference = Reference(model.parameters(), sgd)
        for step in run:
            (loss_of(model, step) * reference.scale).backward()
            assert reference.boundary()
    return weights(model)


@pytest.mark.parametrize("how", ["prepare", "another accelerator", "by hand"])
@ways
def test_a_cell_that_is_run_again_goes_on_with_a_new_optimizer(
    how: str, mode: Any, dtype: torch.dtype
) -> None:
    """Though the notebook keeps the old one."""
    reset()
    model, kept = mlp().to(dtype), list[Any]()
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)

    def cell(steps: range) -> None:
        if how == "by hand":
            ours: Any = AsyncOptimizer(
                sgd(model.parameters()), model, scaler=scaler, step_mode=mode
            )
            kept.append(ours)
            for step in steps:
                scaler.scale(loss_of(model, step)).backward()
                ours.step()
                ours.zero_grad()
            return
        if how == "another accelerator" or not kept:
            accelerator = attach(
                Accelerator(cpu=True, mixed_precision="fp16"), init_scale=INIT_SCALE, step_mode=mode
            )
            accelerator.native_amp = False
            kept.append(accelerator)
        called, ours = kept[-1].prepare(model, sgd(model.parameters()))
        for step in steps:
            kept[-1].backward(loss_of(called, step))
            ours.step()
            ours.zero_grad()

    cell(range(4))
    cell(range(4, 8))
    for each in reversed(kept):
        each.close() if how == "by hand" else detach(each)
    assert torch.equal(weights(model), plain(dtype, range(4), range(4, 8)))


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_both_step_as_in_torch(mode: Any) -> None:
    expected = mlp()
    theirs = [sgd(expected.parameters(), lr) for lr in RATES]
    model = mlp()
    with lazy(), ExitStack() as stack:
        ours = [
            stack.enter_context(AsyncOptimizer(sgd(model.parameters(), lr), model, step_mode=mode))
            for lr in RATES
        ]
        for net, optimizers in ((expected, theirs), (model, ours)):
            for step in range(5):
                loss_of(net, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                optimizers[0].zero_grad()
    assert torch.equal(weights(model), weights(expected))


@pytest.mark.parametrize(("mode", "dtype"), [("sync", FULL), *WAYS], ids=str)
def test_both_step_in_one_window_unless_gradients_stay_scaled(
    mode: Any, dtype: torch.dtype
) -> None:
    reset()
    w = nn.Parameter(torch.ones(2, dtype=dtype))
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), init_scale=8.0, step_mode=mode
    )
    first, second = accelerator.prepare(SGD([w], lr=0.25), SGD([w], lr=0.5))
    accelerator.backward(w.sum().float())
    first.step()
    if dtype is FULL:
        second.step()
        assert w.tolist() == [0.25, 0.25]
    else:
        with pytest.raises(OrderError, match="shares 1 parameters with another"):
            second.step()
        accelerator.scaler.abandon_window()
    detach(accelerator)


@ways
def test_a_parameter_is_added_to_a_second_one(mode: Any, dtype: torch.dtype) -> None:
    a, b = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    first, second = (AsyncOptimizer(SGD([p], lr=0.5), step_mode=mode) for p in (a, b))
    with lazy(), first, second:
        second.add_param_group({"params": [a]})
        for p in (a, b):
            p.grad = torch.ones(2, dtype=dtype)
        second.step()
        first.step()
    assert a.tolist() == [0.0, 0.0]
    assert b.tolist() == [0.5, 0.5]
