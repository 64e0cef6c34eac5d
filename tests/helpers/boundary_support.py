"""A prepared model, or several, whose gradients are known: for tests of one boundary at a time."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from support import LR, Linear
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import ScalerConfig, attach

SCALE = 2.0**16


def ours(config: ScalerConfig | None = None, **kwargs: Any) -> Any:
    return attach(
        Accelerator(cpu=True, mixed_precision="fp16", **kwargs),
        config or ScalerConfig(init_scale=SCALE),
    )


def models(accelerator: Any, count: int, **kwargs: Any) -> tuple[list[Linear], list[Any]]:
    """``count`` prepared models, each with a prepared SGD of its own."""
    plain = [Linear() for _ in range(count)]
    optimizers = [accelerator.prepare(SGD(m.parameters(), lr=LR, **kwargs)) for m in plain]
    return [accelerator.prepare(m) for m in plain], optimizers


def one(accelerator: Any, **kwargs: Any) -> tuple[Linear, Any]:
    (model,), (optimizer,) = models(accelerator, 1, **kwargs)
    return model, optimizer


class Two(nn.Module):
    """Two parameters with gradients of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(), Linear()

    def forward(self, first: float, second: float) -> Tensor:
        return self.first(first) + self.second(second)
