"""A check of gradients whose outcome is on their device, and on its way to the host.

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
from itertools import islice

import torch
from torch import Tensor

from ..devices import can_pin, event_after, present_stream
from .gradients import MAX_NAMED, NormCheck, by_size, nonfinite, norms_of, not_finite


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
    norms = torch.stack(list(norms_of(grads)))
    unscaled = norms if inverse == 1.0 else norms * inverse
    total = torch.linalg.vector_norm(unscaled)
    return SentCheck(total, norms, unscaled if keep_each else None)
