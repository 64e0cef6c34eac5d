"""How much of float16's range scaled gradients take: the largest element.

The backward computes in float16, with the scale in each number. So a gradient is measured as the
backward left it, whether it was unscaled or clipped since or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..scaling import OptimizerRecord, Window, local


@torch.no_grad()
def measure(
    params: Sequence[Tensor], window: Window, record: OptimizerRecord, scale: float | None
) -> float | None:
    """The largest finite element in the dense float16 and float32 gradients of one optimizer; None
    if there is none. Synchronises with the device.

    Micro-batches are added up and ranks averaged by then; of a DTensor the shard of this rank
    counts. After a clip of single elements nothing is known. ``record``: the optimizer's, which
    knows whether gradients are still scaled. ``scale``: the window's; None: nothing is scaled, and
    float32 gradients do not count.
    """
    if window.clipped_values:
        return None
    is_scaled = bool(record.deferred)  # nothing was done to them since the backward
    clips: dict[int, float] = {}
    for clip in () if is_scaled else window.grad_norms.clips:
        for p in clip.parameters if clip.coefficient != 1.0 else ():
            clips[id(p)] = clips.get(id(p), 1.0) * clip.coefficient
    ends: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
    for p in params:
        grad, coefficient = p.grad, clips.get(id(p), 1.0)
        # A coefficient of 0 has left nothing to measure.
        if grad is not None and coefficient != 0 and _is_measurable(grad := local(grad), scale):
            factor = (1.0 if is_scaled or scale is None else scale) / coefficient
            ends.setdefault((grad.device, grad.dtype, factor), []).extend(torch.aminmax(grad))
    largest = (float(torch.stack(each).abs().amax()) * key[2] for key, each in ends.items())
    return max(filter(math.isfinite, largest), default=None)


def _is_measurable(grad: Tensor, scale: float | None) -> bool:
    is_plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided
    # Under autocast a float32 parameter's gradient is the cast of a float16 one.
    counted = (torch.float16,) if scale is None else (torch.float16, torch.float32)
    return is_plain and grad.dtype in counted and grad.device.type != "meta" and grad.numel() > 0
