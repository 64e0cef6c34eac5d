"""The plain loop of :mod:`references` in the place of a stock Trainer's optimizer and scaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from references import NEVER_STALE, Reference
from torch import Tensor
from transformers import TrainerCallback


def momentum(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD shows a wrong scale, its momentum a lost step."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class ReferenceOptimizer(torch.optim.SGD):
    """What a Trainer steps in place of ours: :class:`references.Reference`, at the same rate."""

    def __init__(
        self, params: Iterable[Tensor], prompt: int = NEVER_STALE, compensation: str = "none"
    ) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.reference = Reference(params, momentum, prompt, compensation)
        self.skipped = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.reference.optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.skipped = not self.reference.boundary(max_norm=0.5)


class ReferenceScaler(torch.amp.GradScaler):
    """Scales by the reference's scale, and leaves the rest to it."""

    def __init__(self, reference: Reference) -> None:
        super().__init__("cpu", enabled=False)
        self.reference = reference

    def scale(self, outputs: Any) -> Any:
        return outputs * self.reference.scale


class Verdicts(TrainerCallback):
    """Tells the Trainer, as Accelerate would, whether the reference has skipped."""

    def on_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        optimizer._is_overflow = optimizer.optimizer.skipped
