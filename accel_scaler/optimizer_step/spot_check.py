"""Finds edits of parameters that no version counts, by comparing samples.

A master is stepped in place of its parameter and then published over it, so an edit of the
parameter has to reach the master first. ``p.clamp_()`` counts a version, ``p.data.clamp_()`` does
not. An unedited parameter is, bit for bit, its rounded master.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..scaling import SentCheck, send_flag
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
        joinable: dict[object, list[ParameterPair]] = {}
        for pair in self._pairs:
            master, target = pair.stepped, pair.target
            if master.stride() == target.stride() and is_dense(target):
                is_large = target.numel() > MAX_WHOLE
                kind = is_large, target.dtype, target.device, master.device, pair.is_offloaded
                joinable.setdefault(kind, []).append(pair)
            else:
                edited.add(id(pair.param))
        self._samples = [_Samples(mine) for mine in joinable.values()]

    @torch.no_grad()
    def find(self) -> list[ParameterPair]:
        """Pairs whose parameter is not its rounded master. Waits for the device."""
        found = {id(pair) for samples in self._samples for pair in samples.find()}
        edited = []
        for pair in self._pairs if found or self._edited else ():
            if id(pair.param) in self._edited and pair.is_offloaded:
                pair.is_edited_since = True
            if id(pair) in found or (
                id(pair.param) in self._edited and not pair.is_offloaded and pair.is_edited
            ):
                edited.append(pair)
        self._edited.update(id(pair.param) for pair in edited)
        return edited

    @property
    def can_send(self) -> bool:
        """Whether samples on the parameters' own device tell of all edits."""
        return not self._edited and not any(samples.is_offloaded for samples in self._samples)

    @torch.no_grad()
    def send(self, sent: SentCheck) -> SentCheck:
        """``sent``, or a check that also fails where a parameter is not its rounded master. Does
        not synchronise."""
        if not self._samples:
            return sent
        unlike = [samples.are_unlike().float() for samples in self._samples]
        return send_flag(torch.stack([sent.found_inf, *unlike]).amax())

    @torch.no_grad()
    def note(self) -> None:
        """All parameters are their rounded masters: a step has just ended."""
        for samples in self._samples:
            samples.note()


class _Samples:
    """Views of samples of pairs alike in dtype and devices: made once, joined to be compared.

    Masters in host memory may still be on their way there. Those samples are compared with what the
    parameters were after the step.
    """

    def __init__(self, pairs: Sequence[ParameterPair]) -> None:
        self._pairs, self._dtype = pairs, pairs[0].target.dtype
        # As integers: NaN is equal to itself, and autocast does not look at them.
        self._bits = torch.int16 if self._dtype.itemsize == 2 else torch.int32
        self._after_step: Tensor | None = None
        self._masters = [_sample(pair.stepped.detach()) for pair in pairs]
        self._targets = [_sample(pair.target).view(self._bits) for pair in pairs]
        self._sizes = list(map(Tensor.numel, self._targets))
        rest = -sum(self._sizes) % 4
        for views in (self._masters, self._targets) if rest else ():
            views.append(views[0].new_zeros(rest))
        self.is_offloaded = pairs[0].is_offloaded
        self.note()

    def note(self) -> None:
        if self.is_offloaded:
            self._after_step = torch.cat(self._targets).flatten()

    def _both(self) -> tuple[Tensor, Tensor]:
        """The masters' samples, rounded, and the parameters', as integers."""
        rounded = self._after_step
        if rounded is None:
            masters = torch.cat(self._masters)
            rounded = masters.to(self._dtype).view(self._bits).flatten()
        return rounded, torch.cat(self._targets).to(rounded.device).flatten()

    def are_unlike(self) -> Tensor:
        """Whether some sample of a parameter is not its master's, shape (). Does not
        synchronise."""
        rounded, now = self._both()
        return (rounded != now).any()

    def find(self) -> list[ParameterPair]:
        """Pairs of which the parameter's sample is not the master's, rounded."""
        rounded, now = self._both()
        # Eight bytes at once: torch compares two at once four times as slowly.
        if torch.equal(rounded.view(torch.int64), now.view(torch.int64)):
            return []
        unlike = (rounded != now)[: sum(self._sizes)]
        parts = zip(self._pairs, torch.split(unlike, self._sizes), strict=True)
        return [pair for pair, part in parts if bool(part.any())]


def _sample(t: Tensor) -> Tensor:
    """Elements of a dense tensor, in its memory's order: shape (n, RUN) of a large one, or (n,)."""
    if t.numel() <= MAX_WHOLE:
        return flat(t)
    return t.as_strided(((t.numel() - RUN) // STRIDE + 1, RUN), (STRIDE, 1))
