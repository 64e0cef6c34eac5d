"""How much of float16's range scaled gradients take: the largest element.

The backward computes in float16 what it has multiplied by the scale; so each gradient is measured
as the backward left it, whatever was done to it since: unscaled, clipped, both, or neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..scaling import OptimizerRecord, Window, local

Measured = list[tuple[Tensor, float]]
"""Largest elements, float32, shape (), which a device may still compute; each with the factor that
turns it into an element of the gradient that the backward left."""


@torch.no_grad()
def measure(
    params: Sequence[Tensor], window: Window, record: OptimizerRecord, scale: float | None
) -> Measured:
    """Measure the finite, dense float16 and float32 gradients of one optimizer.

    Gradients are measured after micro-batches were added up and ranks averaged; of a DTensor only
    this rank's elements. Nothing is, where single elements were clipped: how large they were is not
    known. ``record``: of the optimizer, with what is still due. ``scale``: the window's; None:
    nothing is scaled, and float32 gradients are left out. Does not synchronise with the device.
    """
    is_scaled = bool(record.deferred)  # nothing was done to them since the backward
    clips: dict[int, float] = {}
    for clip in () if is_scaled else window.grad_norms.clips:
        for p in clip.parameters if clip.coefficient != 1.0 else ():
            clips[id(p)] = clips.get(id(p), 1.0) * clip.coefficient
    ends: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
    for p in () if window.clipped_values else params:
        grad, coefficient = p.grad, clips.get(id(p), 1.0)
        # A coefficient of 0 has left nothing to measure.
        if grad is not None and coefficient != 0 and _is_measurable(grad := local(grad), scale):
            factor = (1.0 if is_scaled or scale is None else scale) / coefficient
            ends.setdefault((grad.device, grad.dtype, factor), []).extend(torch.aminmax(grad))
    return [(torch.stack(each).abs().amax().float(), key[2]) for key, each in ends.items()]


def read_measured(found: Measured) -> float | None:
    """The largest of all. Synchronises with a device that has not computed it yet."""
    numbers: list[float] = [largest.tolist() for largest, _ in found]  # type: ignore[misc]
    values = (number * factor for number, (_, factor) in zip(numbers, found, strict=True))
    return max(filter(math.isfinite, values), default=None)


def _is_measurable(grad: Tensor, scale: float | None) -> bool:
    is_plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided
    # Under autocast a float32 parameter's gradient is the cast of a float16 one.
    counted = (torch.float16,) if scale is None else (torch.float16, torch.float32)
    return is_plain and grad.dtype in counted and grad.device.type != "meta" and grad.numel() > 0
