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

logger = logging.getLogger("accel_scaler")

FIRST_INF = 65520.0
"""What rounds to inf; 65504 is float16's largest number."""

WIDER = (torch.bfloat16, torch.float32)
MAX_NAMES = 3
"""That a warning lists."""


@torch.no_grad()
def past_float16(model: Module, in_float32: Iterable[Module] = ()) -> dict[str, float]:
    """Names of parameters with elements of 65520 or more, and the largest of each.

    inf and NaN are not meant: no dtype helps them. Reads every bfloat16 and float32 weight that
    this rank holds, once; synchronises with the device.

    Args:
        model: not wrapped, so that names are its own.
        in_float32: modules whose parameters are never cast to float16.
    """
    exempt = {id(p) for module in in_float32 for p in module.parameters()}
    names: list[str] = []
    held: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, p in model.named_parameters():
        mine = _held(p)
        if mine is not None and id(p) not in exempt:
            names.append(name)
            held.setdefault((mine.device, mine.dtype), []).append((name, mine))
    found: dict[str, float] = {}
    for each in held.values():
        norms = torch._foreach_norm([values for _, values in each], math.inf)
        largest = torch.stack([norm.float() for norm in norms]).tolist()
        for (name, _), value in zip(each, largest, strict=True):
            if FIRST_INF <= value < math.inf:
                found[name] = value
    return {name: found[name] for name in names if name in found}


def _held(p: Any) -> Tensor | None:
    """This rank's elements; None: quantised, not there, or of a kind that foreach does not take."""
    held = p.to_local() if hasattr(p, "to_local") else p
    plain = type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided
    known = plain and held.dtype in WIDER and held.device.type != "meta" and held.numel()
    return held.detach() if known else None


def warn_past_float16(model: Module, in_float32: Iterable[Module] = ()) -> None:
    """Log which weights are past float16, if any. See :func:`past_float16`."""
    found = past_float16(model, in_float32)
    if not found:
        return
    names = [f"{name} ({value:.3g})" for name, value in list(found.items())[:MAX_NAMES]]
    owner = next(iter(found)).rpartition(".")[0] or "*"
    logger.warning(
        "%s: float16 ends at 65504, so in a float16 product this is inf, and every window "
        "overflows at any scale. Keep the module in float32: fp32_modules=(%r,), or heal=True.",
        listed(names, len(found)),
        owner,
    )
