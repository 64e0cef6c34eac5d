"""Finds edits of parameters that no version counts, by comparing samples.

A master is stepped in place of its parameter and then published over it, so an edit of the
parameter has to reach the master first. ``p.clamp_()`` counts a version, ``p.data.clamp_()`` does
not. An unedited parameter is, bit for bit, its rounded master.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    An edit of ``STRIDE`` elements in a row is always found. An edited tensor is compared whole from
    then on: a clamp in each window often writes to few elements.
    ``edited`` has the ``id`` of each; :meth:`find` adds to it.
    """

    def __init__(self, pairs: Sequence[ParameterPair], edited: set[int]) -> None:
        self._pairs = [pair for pair in pairs if pair.is_master and pair.target.numel()]
        self._edited = edited
        alike: dict[object, list[ParameterPair]] = {}
        for pair in self._pairs:
            target = pair.target
            if pair.stepped.stride() == target.stride() and is_dense(target):
                is_large = target.numel() > MAX_WHOLE
                kind = is_large, target.dtype, target.device, pair.is_offloaded
                alike.setdefault(kind, []).append(pair)
            else:
                edited.add(id(pair.param))
        self._samples = [_Samples(mine) for mine in alike.values()]

    @torch.no_grad()
    def find(self) -> list[ParameterPair]:
        """Pairs whose parameter is not its rounded master; of those in host memory the samples
        alone are compared. Waits for the device."""
        found = {id(pair) for samples in self._samples for pair in samples.find()}
        edited = [
            pair
            for pair in (self._pairs if found or self._edited else ())
            if id(pair) in found
            or (id(pair.param) in self._edited and not pair.is_offloaded and pair.is_edited)
        ]
        self._edited.update(id(pair.param) for pair in edited)
        return edited

    @torch.no_grad()
    def note(self, pairs: Iterable[ParameterPair] | None = None) -> None:
        """The parameters of ``pairs`` are their rounded masters; None: of all, as a step has just
        ended."""
        chosen = None if pairs is None else set(map(id, pairs))
        for samples in self._samples:
            samples.note(chosen)


class _Samples:
    """Views of samples of pairs alike in dtype and device: made once, joined to be compared.

    Masters in host memory may still be on their way there. Those samples are compared with what the
    parameters were after the step.
    """

    def __init__(self, pairs: Sequence[ParameterPair]) -> None:
        self._pairs, self._dtype = pairs, pairs[0].target.dtype
        self._after_step: Tensor | None = None
        self._masters = [_sample(pair.stepped.detach()) for pair in pairs]
        # As integers: NaN is equal to itself, and autocast does not look at them.
        self._targets = [_sample(pair.target).view(torch.int16) for pair in pairs]
        self.note()

    def note(self, chosen: set[int] | None = None) -> None:
        if not self._pairs[0].is_offloaded:
            return
        if chosen is None or self._after_step is None:
            self._after_step = torch.cat(self._targets)
            return
        parts = torch.split(self._after_step, list(map(len, self._targets)))
        for pair, part, target in zip(self._pairs, parts, self._targets, strict=True):
            if id(pair) in chosen:
                part.copy_(target)

    def both(self) -> tuple[Tensor, Tensor]:
        """The masters' samples, rounded, and the parameters', as integers."""
        rounded = self._after_step
        if rounded is None:
            rounded = torch.cat(self._masters).to(self._dtype).view(torch.int16)
        return rounded, torch.cat(self._targets)

    def find(self) -> list[ParameterPair]:
        """Pairs of which the parameter's sample is not the master's, rounded."""
        rounded, now = self.both()
        if torch.equal(rounded, now):
            return []
        parts = torch.split(rounded != now, [len(target) for target in self._targets])
        return [pair for pair, part in zip(self._pairs, parts, strict=True) if bool(part.any())]


def _sample(t: Tensor) -> Tensor:
    """Elements of a dense tensor, in its memory's order: shape (n, RUN) of a large one, or (n,)."""
    if t.numel() <= MAX_WHOLE:
        return flat(t)
    return t.as_strided(((t.numel() - RUN) // STRIDE + 1, RUN), (STRIDE, 1))
