"""Weights that float16 does not hold: in a product under float16 autocast they are inf."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from ..errors import listed
from ..models import unwrap

logger = logging.getLogger("accel_scaler")

FIRST_INF = 65520.0
"""What rounds to inf; 65504 is float16's largest number."""

MAX_NAMES = 3
"""That a warning lists."""


@torch.no_grad()
def warn_past_float16(model: Module, in_float32: Iterable[Module] = ()) -> None:
    """Log the names of bfloat16 and float32 parameters with elements of 65520 or more.

    inf and NaN are not meant: no dtype helps them. Reads every weight that this rank holds, once;
    synchronises with the device.

    Args:
        model: whose own names are used.
        in_float32: modules whose parameters are never cast to float16.
    """
    exempt = {id(p) for module in in_float32 for p in module.parameters()}
    every = unwrap(model).named_parameters()
    held = [(name, _held(p)) for name, p in every if id(p) not in exempt]
    norms = [(name, torch.linalg.vector_norm(p, math.inf)) for name, p in held if p is not None]
    largest = [(name, norm.item()) for name, norm in norms]
    names = [f"{name} ({x:.3g})" for name, x in largest if FIRST_INF <= x < math.inf]
    if names:
        logger.warning(
            "%s: float16 ends at 65504, so in a float16 product this is inf, and every window "
            "overflows at any scale. To keep the module in float32: heal, or fp32_modules with %r.",
            listed(names[:MAX_NAMES], len(names)),
            names[0].partition(" ")[0].rpartition(".")[0] or "*",
        )


def _held(p: Any) -> Tensor | None:
    """This rank's elements; None: quantised, not there, or of another dtype."""
    held = p.to_local() if hasattr(p, "to_local") else p
    is_plain = type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided
    is_wide = is_plain and held.dtype in (torch.bfloat16, torch.float32)
    return held.detach() if is_wide and held.device.type != "meta" and held.numel() else None
