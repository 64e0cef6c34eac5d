"""Attached accelerators, and a few steps of training under them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from support import mlp, weights
from torch.optim import SGD

from accel_scaler.integrations.optimizer import ScaledOptimizer


def cpu(**kwargs: Any) -> Any:
    """Accelerate's fp16 on a CPU, as a user makes it."""
    return Accelerator(cpu=True, mixed_precision="fp16", **kwargs)


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 3, factor: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        accelerator.backward(model(x).square().mean() / 16 * factor)
        optimizer.step()
        optimizer.zero_grad()
    return model


def prepared(accelerator: Any) -> tuple[Any, Any]:
    model = mlp()
    return tuple(accelerator.prepare(model, SGD(model.parameters(), lr=0.1)))  # type: ignore[return-value]


def inner_dtype(model: Any) -> torch.dtype:
    """What the first layer inside puts out."""
    seen: list[torch.dtype] = []
    handle = model[0].register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    model(torch.ones(2, 8))
    handle.remove()
    return seen[0]


def assert_untouched(accelerator: Any) -> None:
    """As ``cpu()`` left it, and still able to train."""
    assert type(accelerator) is Accelerator
    assert (accelerator.scaler, accelerator.native_amp) == (None, False)
    assert "_attachment" not in accelerator.__dict__
    assert all("_original_forward" not in model.__dict__ for model in accelerator._models)
    assert not any(isinstance(o, ScaledOptimizer) for o in accelerator._optimizers)
    model, optimizer = prepared(accelerator)
    before = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer)), before)
