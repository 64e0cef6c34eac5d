"""Checks of gradients by their norms: read at once, or left on their device for now.

Note [Launch before you read]
-----------------------------
A host that waits for a norm leaves the device idle while it then prepares and launches the update.
torch's fused kernels take ``found_inf`` as a tensor and move nothing where it is 1. So on a device
norm, product and update are enqueued in a row, and the host reads the outcome while the update
runs. Whoever asks for it earlier waits then. On a CPU there is nothing to gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..devices import can_pin, event_after, present_stream
from .gradients import (
    LARGE,
    MAX_NAMED,
    SMALL,
    by_size,
    nonfinite,
    norm_of,
    norms_of,
    not_finite,
    on_host,
    run_on_one_thread,
)


@dataclass(frozen=True, slots=True)
class NormCheck:
    """The outcome of :func:`check_norms`."""

    total: Tensor | None
    """Unscaled total norm, float32, shape (); None where no norm could be taken."""
    overflowed: tuple[int, ...]
    """Indices of the first few gradients with non-finite elements; empty: all are finite."""
    host_total: float = math.nan
    """``total`` as a Python float."""
    each: Tensor | None = None
    """Unscaled norm of each gradient, float32, shape (n,), on the host; only with ``keep_each``."""


@torch.no_grad()
def check_norms(grads: Sequence[Tensor], inverse: float, keep_each: bool = False) -> NormCheck:
    """Norm of the *unscaled* gradients and the non-finite check, from one read of scaled ones.

    With a power-of-two scale the total equals, bit for bit, what
    ``torch.nn.utils.clip_grad_norm_`` returns for gradients that were unscaled first. On a CPU
    small gradients are read first and large ones one by one: an overflow in the backward reaches
    the biases of every earlier layer, so that a skipped window costs little.

    Args:
        grads: uniform gradients (see :func:`is_uniform`), scaled.
        inverse: the reciprocal of their scale.
        keep_each: return the norm of each gradient, too.

    Returns no ``total`` when an overflow was found, or when a norm leaves float32's range though
    all elements are finite (then ``overflowed`` is empty). Synchronises once, then more often.
    """
    stacked, suspects = _norms_until_nonfinite(grads)
    if stacked is not None:
        unscaled = stacked * inverse
        total = torch.linalg.vector_norm(unscaled)
        each = on_host(unscaled, total) if keep_each else total.reshape(1)
        value = float(each[-1])
        if math.isfinite(value):
            return NormCheck(total, (), value, each[:-1] if keep_each else None)
        suspects = not_finite(stacked)
    overflowed = islice((i for i in suspects if nonfinite(grads[i])), MAX_NAMED)
    return NormCheck(None, tuple(overflowed))


def _norms_until_nonfinite(grads: Sequence[Tensor]) -> tuple[Tensor | None, list[int]]:
    """The norm of each, shape (n,); or None and the indices of the first that are not finite."""
    cpu = grads[0].device.type == "cpu"
    sizes = list(map(Tensor.numel, grads)) if cpu else [0]
    largest = max(sizes)
    if largest < LARGE:
        with run_on_one_thread(cpu and largest <= SMALL):
            return torch.stack(norms_of(grads)), []
    small = [i for i, size in enumerate(sizes) if size < LARGE]
    found = norms_of([grads[i] for i in small]) if small else ()
    stacked = torch.stack(found) if small else None
    if stacked is not None and not math.isfinite(float(stacked.sum())):
        return None, [small[i] for i in not_finite(stacked)]
    norms = dict(zip(small, found, strict=True))
    for i, grad in enumerate(grads):
        if i not in norms:
            norms[i] = norm_of(grad, 2.0)
            if not math.isfinite(float(norms[i])):
                return None, [i]
    return torch.stack([norms[i] for i in range(len(grads))]), []


class SentCheck:
    """The outcome of a check, as numbers on the device, all float32; :meth:`read` gives it to the
    host. Nothing here synchronises but :meth:`read`.

    Args:
        total: the unscaled norm of all gradients together, shape (); not finite after an overflow.
            Without ``norms`` any number stands for a finite one.
        norms: the norm of each, still scaled, shape (n,).
        each: the same, unscaled, where the host wants them, too.
    """

    def __init__(self, total: Tensor, norms: Tensor | None = None, each: Tensor | None = None):
        lost = total - total  # 0, or NaN
        self.found_inf = torch.nan_to_num(lost, nan=1.0)
        """1 where some gradient is not finite, or their norm is past float32; else 0. Shape ()."""
        self.moves = 1.0 - self.found_inf
        """1 where the update moves the parameters, else 0. Shape ()."""
        self.total = total + lost
        """The norm; NaN where :attr:`found_inf` is 1. Shape ()."""
        self.when_read: Callable[[SentCheck], None] = lambda sent: None
        """Reads the outcome and writes it to the records that wait for it."""
        self._norms = norms
        sent = total.reshape(1) if each is None else torch.cat((each, total.reshape(1)))
        self._host = torch.empty(sent.shape, dtype=torch.float32, device="cpu", pin_memory=True)
        self._host.copy_(sent, non_blocking=True)
        self._event = event_after(sent.device)

    @property
    def is_finite(self) -> bool:
        """Whether :attr:`found_inf` is 0. Waits for the check, not for what was enqueued after."""
        self._event.synchronize()
        return math.isfinite(float(self._host[-1]))

    def read(self, grads: Sequence[Tensor], are_edited: bool = False) -> NormCheck:
        """The outcome. Waits as :attr:`is_finite`; after an overflow it synchronises.

        Args:
            grads: the checked gradients, perhaps multiplied since.
            are_edited: a script has written to them since, so they no longer show what overflowed.
        """
        if self.is_finite:
            if self._norms is None:
                return NormCheck(None, ())
            numbers = self._host
            each = numbers[:-1] if len(numbers) > 1 else None
            return NormCheck(self.total, (), float(numbers[-1]), each)
        suspects = not_finite(self._norms) if self._norms is not None else by_size(grads)
        bad = (i for i in suspects if are_edited or nonfinite(grads[i]))
        return NormCheck(None, tuple(islice(bad, MAX_NAMED)))


def send_flag(flag: Tensor) -> SentCheck:
    """A check by other means: ``flag``, float32, shape (), is 0 where all is finite, else at least
    1. Does not synchronise."""
    found = flag.clamp(max=1.0)
    return SentCheck(found / (1.0 - found))  # 0 or inf


def can_send(device: torch.device) -> bool:
    """Whether this thread has a stream on ``device``, behind which an outcome can be left."""
    return present_stream(device) is not None and can_pin()


@torch.no_grad()
def send_norms(grads: Sequence[Tensor], inverse: float, keep_each: bool = False) -> SentCheck:
    """:func:`check_norms` of gradients on a device that :func:`can_send`. Does not synchronise.

    Args:
        grads: uniform gradients, scaled.
        inverse: the reciprocal of their scale.
        keep_each: send the norm of each gradient, too.
    """
    norms = torch.stack(norms_of(grads))
    unscaled = norms if inverse == 1.0 else norms * inverse
    total = torch.linalg.vector_norm(unscaled)
    return SentCheck(total, norms, unscaled if keep_each else None)
