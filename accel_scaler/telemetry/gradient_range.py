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
    """The largest element in the dense float16 and float32 gradients of one optimizer; None if it
    is not finite, or there is none. Synchronises with the device.

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
    # Under autocast a float32 parameter's gradient is the cast of a float16 one.
    dtypes = (torch.float16,) if scale is None else (torch.float16, torch.float32)
    found: dict[torch.device, list[Tensor]] = {}
    for p in params:
        grad = torch.empty(0) if p.grad is None else local(p.grad)
        is_plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided
        left = clips.get(id(p), 1.0)  # 0 has left nothing to measure
        if is_plain and grad.dtype in dtypes and grad.numel() and not grad.is_meta and left:
            largest = torch.linalg.vector_norm(grad, math.inf, dtype=torch.float32)
            factor = (1.0 if is_scaled or scale is None else scale) / left
            found.setdefault(grad.device, []).append(largest * factor)
    largest_there = (float(torch.stack(each).amax()) for each in found.values())
    return max(filter(math.isfinite, largest_there), default=None)
