"""Scaled gradients added to unscaled ones: noticed before they do harm."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from .config import OrderError
from .gradients import nonzero, parameters_of

__all__ = ["MixGuard"]


class MixGuard:
    """Remembers the gradients that were unscaled when another backward began."""

    def __init__(self) -> None:
        self._unscaled: list[tuple[int, Tensor, Tensor, int]] = []

    def remember(self, optimizer: Optimizer) -> bool:
        """Note this optimizer's unscaled gradients; False: all of them are zero by now."""
        entries = [
            (id(optimizer), p, grad, grad._version)
            for p in parameters_of(optimizer)
            if (grad := p.grad) is not None
        ]
        self._unscaled += entries
        return any(nonzero(grad) for _, _, grad, _ in entries)

    def forget(self, optimizer: Optimizer) -> None:
        """Its gradients start over."""
        self._unscaled = [entry for entry in self._unscaled if entry[0] != id(optimizer)]

    def clear(self) -> None:
        """Another window begins."""
        self._unscaled.clear()

    def forbid(self, optimizer: Optimizer) -> None:
        """Raise ``OrderError`` if a backward has changed what was unscaled."""
        for owner, p, grad, version in self._unscaled:
            if owner == id(optimizer) and (p.grad is not grad or grad._version != version):
                raise OrderError(
                    f"a backward added scaled gradients to the unscaled ones of "
                    f"{type(optimizer).__name__}: they were unscaled or clipped before the last "
                    "micro-batch. Accumulate under `with accelerator.accumulate(model):`, or clip "
                    "only after the last backward; then zero the gradients and go on."
                )
