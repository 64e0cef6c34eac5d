"""A fused optimizer's own step, with the two attributes that its kernel reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .gradients import parameters_of


def nothing_found(optimizer: Optimizer) -> Tensor | None:
    """``found_inf`` for finite gradients: None for torch's own optimizers, which then save a pass;
    for others the zero that torch gives them, float32, shape ()."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    params = parameters_of(optimizer)
    return torch.zeros((), dtype=torch.float32, device=params[0].device if params else "cpu")


def call_fused(
    optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None, *args: Any, **kwargs: Any
) -> float | None:
    """``optimizer.step(*args, **kwargs)``, gradients divided by ``grad_scale`` and the update left
    out where ``found_inf`` is 1; both float32, shape (), or None."""
    if found_inf is None:
        found_inf = nothing_found(optimizer)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        result: float | None = optimizer.step(*args, **kwargs)
        return result
    finally:
        del optimizer.grad_scale, optimizer.found_inf
