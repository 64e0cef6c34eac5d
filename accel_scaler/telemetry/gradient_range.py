"""How much of float16's range scaled gradients take: the largest, zeros and subnormals.

The backward computes in float16 what it has multiplied by the scale; so this looks at each gradient
as the backward left it, whatever was done to it since: unscaled, clipped, both, or neither.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..scaling import OptimizerRecord, Window, local
from .float16 import SMALLEST_NORMAL

BATCH = 1 << 18
"""Elements that are looked at together, and what is made of them on the way stays in the cache."""

DEVICE_BATCH = 1 << 22
"""The same elsewhere than on a CPU, where each operation costs a launch."""

COUNTED = (torch.float16, torch.float32)
"""Under autocast a float32 parameter's gradient is the cast of a float16 one."""


@dataclass(slots=True)
class Measure:
    """What was found of some gradients; the numbers may still be on their way."""

    window: int
    numbers: tuple[int, ...]
    """Of the parameters, as ``names`` has them."""
    sizes: tuple[int, ...]
    """Elements of each, as far as this rank holds them."""
    values: Tensor
    """Of each, zeros, and what is smaller than float16's normal numbers, zeros included; then the
    bits of the largest of all, a float32, NaN where that is not known. int64, shape (2n + 1)."""

    def read(self) -> tuple[list[tuple[int, int]], float]:
        """Zeros and small ones of each, and the largest. Synchronises if they are not there."""
        *counts, bits = self.values.tolist()
        (largest,) = struct.unpack("=f", struct.pack("=i", bits))
        return list(zip(counts[::2], counts[1::2], strict=True)), largest


@dataclass(slots=True)
class RangeTotals:
    """Of one window."""

    underflow: tuple[tuple[int, float, float], ...] = ()
    """As ``Record.underflow``."""
    largest: float | None = None
    zeros: int = 0
    elements: int = 0

    @property
    def zero_share(self) -> float | None:
        """None: nothing was counted."""
        return self.zeros / self.elements if self.elements else None

    def add(self, measure: Measure) -> None:
        """Read the numbers of a measure. Synchronises if they are not there yet."""
        counts, largest = measure.read()
        shares = [
            (number, zero / size, (small - zero) / size)
            for number, size, (zero, small) in zip(
                measure.numbers, measure.sizes, counts, strict=True
            )
        ]
        self.underflow = tuple(sorted((*self.underflow, *shares)))
        self.zeros += sum(zero for zero, _ in counts)
        self.elements += sum(measure.sizes)
        if math.isfinite(largest):
            self.largest = max(largest, self.largest or 0.0)


@dataclass(slots=True)
class _Group:
    """Gradients on one device, of one dtype, to which the same was done."""

    device: torch.device
    factor: Tensor | float
    """What they are to be multiplied by to be as the backward left them."""
    numbers: list[int] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    sparse: list[Tensor] = field(default_factory=list)
    """Only the largest of these: what they do not hold is no zero of theirs."""


@torch.no_grad()
def measure(
    params: Sequence[Tensor],
    numbers: Sequence[int],
    window: Window,
    record: OptimizerRecord,
    scale: float | None,
) -> list[Measure]:
    """Look at finite gradients of one optimizer: float16 ones and float32 ones.

    Of a DTensor this rank's own elements. What several micro-batches and ranks have added to each
    other, or averaged, is seen as it is now. Does not synchronise.

    Args:
        numbers: of ``params``.
        record: the optimizer's, of this window: what is still due.
        scale: of the window; None: nothing is scaled, so float32 gradients say nothing.
    """
    untouched = bool(record.deferred)  # nothing was done to them since the backward
    clipped = {} if untouched else clips_of(window)
    groups: dict[tuple[torch.device, torch.dtype, float], _Group] = {}
    for p, number in zip(params, numbers, strict=True):
        grad = p.grad
        if grad is None:
            continue
        held = local(grad)
        if held.dtype not in COUNTED or held.device.type == "meta":
            continue
        if scale is None and held.dtype is not torch.float16:
            continue
        is_sparse = held.layout is torch.sparse_coo
        values = held._values() if is_sparse else held
        is_plain = type(values) in (Tensor, torch.nn.Parameter)
        if not is_plain or values.layout is not torch.strided or values.numel() == 0:
            continue
        coefficient = clipped.get(id(p), 1.0)
        if coefficient == 0:  # whatever it was, it is all zeros now
            continue
        key = (values.device, values.dtype, coefficient)
        if key not in groups:
            factor = 1.0 if untouched or scale is None else scale
            factor /= coefficient
            groups[key] = _Group(values.device, factor)
        group = groups[key]
        if is_sparse:
            group.sparse.append(values)
        else:
            group.numbers.append(number)
            group.held.append(values)
    return [_measured(window, group) for group in groups.values()]


def clips_of(window: Window) -> dict[int, float]:
    """Under the ``id`` of each parameter, what the clips of its window multiply by."""
    found: dict[int, float] = {}
    for clip in window.grad_norms.clips:
        for p in clip.parameters if clip.coefficient != 1.0 else ():
            found[id(p)] = found.get(id(p), 1.0) * clip.coefficient
    return found


def _measured(window: Window, group: _Group) -> Measure:
    limit = SMALLEST_NORMAL / group.factor
    counts: list[Tensor] = []
    most = [values.abs().amax() for values in group.sparse]
    # Small ones together, so that their number does not cost; a large one piece by piece.
    most_together = BATCH if group.device.type == "cpu" else DEVICE_BATCH
    order = sorted(range(len(group.held)), key=lambda i: group.held[i].numel() > most_together)
    flat = [group.held[i].reshape(-1) for i in order]
    for batch in _batches(flat, most_together):
        if len(batch) > 1:
            sizes = torch.cat(batch).abs_()
            most.append(sizes.amax())
            # Sums up to each end: to add up every part by itself would be a kernel a gradient.
            sums = torch.stack((sizes == 0, sizes < limit)).cumsum(1)
            ends = list(accumulate(map(Tensor.numel, batch)))
            until = torch.stack([sums[:, end - 1] for end in ends])
            counts.append(until.diff(dim=0, prepend=torch.zeros_like(until[:1])))
            continue
        found = torch.zeros(1, 2, dtype=torch.int64, device=group.device)
        for piece in torch.split(batch[0], most_together):
            sizes = piece.abs()
            most.append(sizes.amax())
            found += torch.stack(((sizes == 0).sum(), (sizes < limit).sum()))
        counts.append(found)
    largest = torch.stack(most).amax().float() * group.factor
    if window.clipped_values:
        largest = torch.full_like(largest, math.nan)
    bits = largest.view(torch.int32).to(torch.int64).reshape(1)
    return Measure(
        window.index,
        tuple(group.numbers[i] for i in order),
        tuple(map(Tensor.numel, flat)),
        torch.cat([*(each.reshape(-1) for each in counts), bits]),
    )


def _batches(flat: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Neighbours of at most so many elements together; a larger one alone."""
    batch: list[Tensor] = []
    room = most
    for each in flat:
        if batch and each.numel() > room:
            yield batch
            batch, room = [], most
        batch.append(each)
        room -= each.numel()
    if batch:
        yield batch
