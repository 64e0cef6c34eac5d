"""How much of float16's range scaled gradients take: the largest, zeros and subnormals.

The backward computes in float16 what it has multiplied by the scale; so each gradient is measured
as the backward left it, whatever was done to it since: unscaled, clipped, both, or neither.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..scaling import OptimizerRecord, Window, local

SMALLEST_NORMAL = 2.0**-14
"""Of float16."""

PIECE = 1 << 18
"""Elements that are counted together, so that what is computed of them stays in the cache."""

DEVICE_PIECE = 1 << 22
"""The same elsewhere than on a CPU, where each operation costs a launch."""

COUNTED = (torch.float16, torch.float32)
"""Under autocast a float32 parameter's gradient is the cast of a float16 one."""


@dataclass(slots=True)
class Measured:
    """What was found of some gradients; the numbers may still be on their way to the host."""

    numbers: list[int]
    """The parameter of each piece of a gradient, as ``NameTable`` numbers them."""
    sizes: list[int]
    """Elements of each piece."""
    knows_largest: bool
    """False: clips left no way to compute the largest element."""
    values: Tensor
    """For each piece the number of elements that are not 0, and of those that are normal float16
    numbers; then the bits of the largest element, a float32. int64, shape (2n + 1)."""


@torch.no_grad()
def measure(
    params: Sequence[Tensor],
    numbers: Sequence[int],
    window: Window,
    record: OptimizerRecord,
    scale: float | None,
) -> list[Measured]:
    """Measure the finite, dense float16 and float32 gradients of one optimizer.

    Gradients are measured after micro-batches were added up and ranks averaged; of a DTensor only
    this rank's elements. Does not synchronise with the device.

    Args:
        numbers: of ``params``.
        record: the optimizer's record in this window, with what is still due.
        scale: the window's scale; None: nothing is scaled, and float32 gradients are left out.
    """
    is_scaled = bool(record.deferred)  # nothing was done to them since the backward
    clips = {} if is_scaled else _clips_of(window)
    groups: dict[tuple[torch.device, torch.dtype, float], tuple[list[int], list[Tensor]]] = {}
    for p, number in zip(params, numbers, strict=True):
        grad = None if p.grad is None else local(p.grad)
        coefficient = clips.get(id(p), 1.0)
        # A coefficient of 0 has left nothing to measure.
        if grad is None or not _is_measurable(grad, scale) or coefficient == 0:
            continue
        factor = (1.0 if is_scaled or scale is None else scale) / coefficient
        numbers_of, pieces = groups.setdefault((grad.device, grad.dtype, factor), ([], []))
        size = PIECE if grad.device.type == "cpu" else DEVICE_PIECE
        new = torch.split(grad.reshape(-1), size)
        numbers_of += [number] * len(new)
        pieces += new
    knows_largest = not window.clipped_values
    return [
        Measured(numbers_of, list(map(len, pieces)), knows_largest, _count(pieces, factor))
        for (_, _, factor), (numbers_of, pieces) in groups.items()
    ]


def read_measured(found: Sequence[Measured]) -> dict[str, Any]:
    """The measurements of a window as fields of its record. Synchronises with the device if the
    numbers have not arrived on the host yet."""
    counts: dict[int, list[int]] = {}
    """By number of the parameter: elements that are not 0, normal ones, and all."""
    largest = -1.0
    for each in found:
        *values, bits = each.values.tolist()
        for number, *new in zip(each.numbers, values[::2], values[1::2], each.sizes, strict=True):
            old = counts.get(number, [0, 0, 0])
            counts[number] = [a + b for a, b in zip(old, new, strict=True)]
        (value,) = struct.unpack("=f", struct.pack("=i", bits))
        if each.knows_largest and math.isfinite(value):
            largest = max(largest, value)
    nonzero, elements = (sum(count[i] for count in counts.values()) for i in (0, 2))
    return {
        "underflow": tuple(
            (number, round((size - nonzero) / size, 6), round((nonzero - normal) / size, 6))
            for number, (nonzero, normal, size) in sorted(counts.items())
        ),
        "largest_gradient": None if largest < 0 else largest,
        "zero_share": round((elements - nonzero) / elements, 6) if elements else None,
    }


def _is_measurable(grad: Tensor, scale: float | None) -> bool:
    is_plain = type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided
    counted = (torch.float16,) if scale is None else COUNTED
    return is_plain and grad.dtype in counted and grad.device.type != "meta" and grad.numel() > 0


def _clips_of(window: Window) -> dict[int, float]:
    """Under the ``id`` of each parameter, what the clips of its window multiplied it by."""
    found: dict[int, float] = {}
    for clip in window.grad_norms.clips:
        for p in clip.parameters if clip.coefficient != 1.0 else ():
            found[id(p)] = found.get(id(p), 1.0) * clip.coefficient
    return found


def _count(grads: list[Tensor], factor: float) -> Tensor:
    """``Measured.values`` of flat pieces of gradients."""
    limit = SMALLEST_NORMAL / factor
    counts, largest = [], []
    for grad in grads:
        sizes = grad.abs()
        largest.append(sizes.amax())
        counts += [torch.count_nonzero(grad), torch.count_nonzero(sizes >= limit)]
    bits = (torch.stack(largest).amax().float() * factor).view(torch.int32)
    return torch.stack([*counts, bits.to(torch.int64)])
