"""Finds edits of parameters that no version counts, by comparing samples.

A master is stepped in place of its parameter and then published over it, so an edit of the
parameter has to reach the master first. ``p.clamp_()`` counts a version, ``p.data.clamp_()`` does
not. An unedited parameter is, bit for bit, its rounded master.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..scaling import SentCheck, send_flag
from .arena import flat, is_dense
from .masters import ParameterPair

STRIDE = 256
"""Of so many elements of a large tensor one is compared."""

MAX_WHOLE = 4096
"""Elements up to which all of a tensor is compared."""


class SpotCheck:
    """Samples of parameters and of their masters, for all ``pairs`` that have a master: views, made
    once, joined to be compared. An edit of ``STRIDE`` elements in a row is always found.

    Masters in host memory may still be on their way there. Those samples are compared with what the
    parameters were when they were noted.
    """

    def __init__(self, pairs: Sequence[ParameterPair], may_miss: bool = False) -> None:
        pairs = [pair for pair in pairs if pair.is_master and pair.target.numel()]
        self.may_miss = may_miss or any(not is_dense(pair.target) for pair in pairs)
        """Samples do not tell of all edits that are to be expected: some memory has gaps, or an
        edit was found, since a clamp in each window often writes to few elements."""
        alike: dict[object, list[ParameterPair]] = {}
        for pair in filter(lambda pair: is_dense(pair.target), pairs):
            kind = pair.target.dtype, pair.target.device, pair.is_offloaded
            alike.setdefault(kind, []).append(pair)
        self._alike = list(alike.values())
        self._masters = [[_sample(pair.stepped.detach()) for pair in mine] for mine in self._alike]
        self._targets = [[_sample(pair.target) for pair in mine] for mine in self._alike]
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """All parameters are their rounded masters."""
        self._noted = [
            _joined(targets) if mine[0].is_offloaded else None
            for mine, targets in zip(self._alike, self._targets, strict=True)
        ]

    @torch.no_grad()
    def find(self) -> bool:
        """Whether the sample of some parameter is not its master's, rounded. Waits for the
        device."""
        self.may_miss = self.may_miss or not all(torch.equal(*both) for both in self._compared())
        return self.may_miss

    @torch.no_grad()
    def send(self, sent: SentCheck) -> SentCheck:
        """``sent``, or a check that fails, too, where :meth:`find` would find an edit. Does not
        synchronise."""
        unlike = [torch.ne(*both).any().float() for both in self._compared()]
        return send_flag(torch.stack([sent.found_inf, *unlike]).amax()) if unlike else sent

    def _compared(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples of masters, rounded, and of their parameters."""
        for noted, masters, targets in zip(self._noted, self._masters, self._targets, strict=True):
            if noted is None:
                noted = torch.cat(masters).to(targets[0].dtype).view(torch.int16)
            yield noted, _joined(targets)


def _sample(t: Tensor) -> Tensor:
    """Elements of a dense tensor, in its memory's order, shape (n,)."""
    return flat(t)[:: STRIDE if t.numel() > MAX_WHOLE else 1]


def _joined(samples: Sequence[Tensor]) -> Tensor:
    """Of 16 bits, as integers: NaN is equal to itself, and autocast does not look at them."""
    return torch.cat([sample.view(torch.int16) for sample in samples])
