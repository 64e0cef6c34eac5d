"""Finds edits of parameters that no version counts, by comparing samples.

A master is stepped in place of its parameter and then published over it, so an edit of the
parameter has to reach the master first. ``p.clamp_()`` counts a version, ``p.data.clamp_()`` does
not. An unedited parameter is, bit for bit, its rounded master.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arena import flat, is_dense
from .masters import ParameterPair

RUN, STRIDE = 16, 2048
"""Of every ``STRIDE`` elements of a large tensor the first ``RUN`` are compared, a cache line."""

MAX_WHOLE = 4096
"""Elements up to which all of a tensor is compared."""


class SpotCheck:
    """Samples of parameters and of their masters, for all ``pairs`` that have a master.

    An edit of ``STRIDE`` elements in a row is always found.
    """

    def __init__(self, pairs: Sequence[ParameterPair]) -> None:
        pairs = [pair for pair in pairs if pair.is_master and pair.target.numel()]
        self.may_miss = any(not is_dense(pair.target) for pair in pairs)
        """Samples do not tell of all edits that are to be expected: some memory has gaps, or an
        edit was found, since a clamp in each window often writes to few elements."""
        alike: dict[object, list[ParameterPair]] = {}
        for pair in filter(lambda pair: is_dense(pair.target), pairs):
            target = pair.target
            is_large = target.numel() > MAX_WHOLE
            kind = is_large, target.dtype, target.device, pair.is_offloaded
            alike.setdefault(kind, []).append(pair)
        self._samples = [_Samples(mine) for mine in alike.values()]

    @torch.no_grad()
    def find(self) -> list[ParameterPair]:
        """Pairs of which the parameter's sample is not its master's, rounded. Waits for the
        device."""
        found = [pair for samples in self._samples for pair in samples.find()]
        self.may_miss = self.may_miss or bool(found)
        return found

    @torch.no_grad()
    def note(self) -> None:
        """All parameters are their rounded masters."""
        for samples in self._samples:
            samples.note()


class _Samples:
    """Views of samples of pairs alike in dtype and device: made once, joined to be compared.

    Masters in host memory may still be on their way there. Those samples are compared with what the
    parameters were when they were noted.
    """

    def __init__(self, pairs: Sequence[ParameterPair]) -> None:
        self._pairs = pairs
        self._masters = [_sample(pair.stepped.detach()) for pair in pairs]
        # As integers: NaN is equal to itself, and autocast does not look at them.
        self._targets = [_sample(pair.target).view(torch.int16) for pair in pairs]
        self.note()

    def note(self) -> None:
        self._noted = torch.cat(self._targets) if self._pairs[0].is_offloaded else None

    def find(self) -> list[ParameterPair]:
        rounded, now = self._noted, torch.cat(self._targets)
        if rounded is None:
            rounded = torch.cat(self._masters).to(self._pairs[0].target.dtype).view(torch.int16)
        if torch.equal(rounded, now):
            return []
        parts = torch.split(rounded != now, [len(target) for target in self._targets])
        return [pair for pair, part in zip(self._pairs, parts, strict=True) if bool(part.any())]


def _sample(t: Tensor) -> Tensor:
    """Elements of a dense tensor, in its memory's order: shape (n, RUN) of a large one, or (n,)."""
    if t.numel() <= MAX_WHOLE:
        return flat(t)
    return t.as_strided(((t.numel() - RUN) // STRIDE + 1, RUN), (STRIDE, 1))
