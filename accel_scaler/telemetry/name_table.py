"""Numbers for parameters, so that a record need not repeat their names."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..scaling import ParameterNames
from .record import Names


class NameTable:
    """Gives each parameter it meets the next number; starts over when one is gone.

    Holds parameters weakly.
    """

    def __init__(self, parameter_names: ParameterNames) -> None:
        self._parameter_names = parameter_names
        self._clear()

    def _clear(self) -> None:
        self.known = Names()
        self._numbers: dict[int, int] = {}
        self._refs: list[Any] = []
        self._stale = False
        self._version = self._parameter_names.version
        self._last: tuple[list[int], list[int]] = ([], [])
        self._in_order: list[int] | None = None
        """The list in ``_last``, if it is simply all numbers in order."""

    def numbers_of(
        self,
        params: Sequence[Tensor],
        optimizer: Optimizer | None = None,
        ids: list[int] | None = None,
    ) -> list[int]:
        """The number of each.

        Args:
            optimizer: names those that no known model holds.
            ids: ``id`` of each, from a caller who knows them: thousands take a while.
        """
        if self._stale or self._version != self._parameter_names.version:
            self._clear()
        ids = list(map(id, params)) if ids is None else ids
        if ids == self._last[0]:
            return self._last[1]
        new = [p for p, key in zip(params, ids, strict=True) if key not in self._numbers]
        if new:
            self._add(new, optimizer)
        self._last = (ids, [self._numbers[key] for key in ids])
        in_order = self._last[1] == list(range(len(self._numbers)))
        self._in_order = self._last[1] if in_order else None
        return self._last[1]

    def _add(self, params: Iterable[Tensor], optimizer: Optimizer | None) -> None:
        unique = list({id(p): p for p in params}.values())
        place = {key: number for number, key in enumerate(self._parameter_names.by_id())}
        ref = weakref.ref(self)

        def gone(_: object) -> None:
            table = ref()
            if table is not None:
                table._stale = True

        for p in unique:
            self._numbers[id(p)] = len(self._numbers)
            self._refs.append(weakref.ref(p, gone))
        self.known = Names(
            self.known.names + tuple(self._parameter_names.of(unique, optimizer)),
            self.known.places
            + tuple(place.get(id(p), len(place) + i) for i, p in enumerate(unique)),
            self.known.elements + tuple(p.numel() for p in unique),
        )

    def place_norms(
        self,
        found: Iterable[tuple[Sequence[Tensor], list[int] | None, Tensor | None]],
        optimizer: Optimizer,
    ) -> bytes | None:
        """Norms by number, as float32 bytes; NaN for parameters without one; None: no norms.

        Args:
            found: parameters, their ids if known, and the norm of each, float32, shape (n,), on
                the host.
        """
        known = [(params, ids, each) for params, ids, each in found if each is not None]
        if not known:
            return None
        numbers = [self.numbers_of(params, optimizer, ids) for params, ids, _ in known]
        if len(known) == 1 and numbers[0] is self._in_order:
            return _bytes_of(known[0][2])
        whole = torch.full((len(self._numbers),), float("nan"), dtype=torch.float32, device="cpu")
        for (_, _, each), places in zip(known, numbers, strict=True):
            whole[torch.tensor(places, device="cpu")] = each
        return _bytes_of(whole)


def _bytes_of(values: Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).numpy())
