"""Reference runs and small models that several tests share."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

LR = 0.125


def reset() -> None:
    """Accelerate's state and the random numbers of a fresh process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(0)


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, tensors and arrays in dicts and lists too; one NaN is another."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "shape"):
        alike = hasattr(other, "shape") and one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other)


def stock_fp16_on_cpu(accelerator: Any) -> Any:
    """Stock Accelerate's fp16 machinery, switched on by hand on a CPU, with torch's own scaler.

    Accelerate leaves it off there (fault F6); this is the reference that ours is compared with.
    """
    handler = accelerator.scaler_handler
    kwargs = {} if handler is None else handler.to_kwargs()
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **kwargs)
    return accelerator


def stock(**kwargs: Any) -> Any:
    """A stock accelerator that scales fp16 on a CPU as it would on a GPU."""
    return stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16", **kwargs))


def mlp(width: int = 16) -> nn.Sequential:
    """A small network, the same on each call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector, detached and copied."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


class Loud(nn.Linear):
    """Its output is beyond float16 under autocast, and small again in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e4 * 1e2) / 3e6


class Linear(nn.Module):
    """``loss = sum(w * gradient)``: the gradient of ``w`` is what the caller says, exactly."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, gradient: float) -> Tensor:
        return (self.w * gradient).sum()

    @property
    def moved(self) -> float:
        """How far SGD has moved each weight, in units of the learning rate."""
        (far,) = {(1.0 - value) / LR for value in self.w.tolist()}
        return far
