"""A pickled accelerator is what stock's would be: Accelerate's own tests pickle one.

Beside each: stock Accelerate's fp16 machinery, pickled at the same point.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from attached import prepared
from support import stock_fp16_on_cpu, weights

from accel_scaler import GradScaler, ScaledAccelerator, ScalerConfig, attach
from accel_scaler.integrations.optimizer import ScaledOptimizer


class Mine(Accelerator):  # type: ignore[misc]
    """A user's own."""


def fresh(cls: type[Accelerator] = Accelerator) -> Any:
    return cls(cpu=True, mixed_precision="fp16")


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 2) -> torch.Tensor:
    torch.manual_seed(steps)
    for _ in range(steps):
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ScaledOptimizer):
        optimizer.synchronize()
    return weights(model)


def go_on(copied: Any) -> torch.Tensor:
    """Train what an unpickled accelerator has prepared; its optimizer has parameters of its own."""
    (model,), (optimizer,) = copied._models, copied._optimizers
    assert all(
        mine is theirs
        for mine, theirs in zip(
            optimizer.param_groups[0]["params"], model.parameters(), strict=True
        )
    ), "the copy's optimizer steps the copy's model"
    return train(copied, model, optimizer, 3)


@pytest.mark.parametrize("cls", [Accelerator, Mine])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_copy_trains_on_as_a_copy_of_stock_does(mode: Any, cls: type[Accelerator]) -> None:
    stock = stock_fp16_on_cpu(fresh(cls))
    its_model, its_optimizer = prepared(stock)
    train(stock, its_model, its_optimizer)
    # Not what the original goes on with: a pickled model loses its autocast, in stock too.
    expected = go_on(pickle.loads(pickle.dumps(stock)))
    accelerator = attach(fresh(cls), ScalerConfig(step_mode=mode))
    model, optimizer = prepared(accelerator)
    here = train(accelerator, model, optimizer)
    copied = pickle.loads(pickle.dumps(accelerator))
    assert type(copied) is cls, "a copy is not attached"
    assert isinstance(copied.scaler, GradScaler)
    assert copied.scaler is not accelerator.scaler
    assert copied._optimizers[0].scaler is copied.scaler
    assert torch.equal(go_on(copied), expected)
    assert torch.equal(weights(model), here), "the original was left alone"
    expected = train(stock, its_model, its_optimizer, 3)
    assert torch.equal(train(accelerator, model, optimizer, 3), expected)


def test_a_copy_can_be_attached_and_keeps_the_scale() -> None:
    accelerator = attach(fresh(), ScalerConfig(init_scale=1024.0, growth_interval=1))
    train(accelerator, *prepared(accelerator))
    copied = attach(pickle.loads(pickle.dumps(accelerator)), ScalerConfig())
    assert type(copied) is ScaledAccelerator
    assert copied.scaler.get_scale() == accelerator.scaler.get_scale() == 4096.0
    go_on(copied)
    assert copied.scaler_history.boundaries == 3
