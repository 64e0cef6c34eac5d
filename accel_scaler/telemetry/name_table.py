"""Numbers for parameters, so that a record need not repeat their names."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..scaling import ParameterNames
from .record import Names


class NameTable:
    """Gives each new parameter the next number; starts over when one is gone.

    Holds parameters weakly.
    """

    def __init__(self, parameter_names: ParameterNames) -> None:
        self._parameter_names = parameter_names
        self._clear()

    def _clear(self) -> None:
        self.names = Names()
        self._numbers: dict[int, int] = {}
        self._refs: list[Any] = []
        self._is_stale = False
        self._version = self._parameter_names.version
        self._last: tuple[list[int], list[int]] = ([], [])
        """Ids of the parameters that were asked for last, and their numbers."""

    def numbers_of(
        self, params: Sequence[Tensor], optimizer: Optimizer, ids: list[int] | None = None
    ) -> list[int]:
        """The number of each parameter.

        Args:
            optimizer: names those that no known model holds.
            ids: ``id`` of each, where they are known: thousands take a while.
        """
        if self._is_stale or self._version != self._parameter_names.version:
            self._clear()
        ids = list(map(id, params)) if ids is None else ids
        if ids != self._last[0]:
            new = {key: p for key, p in zip(ids, params, strict=True) if key not in self._numbers}
            if new:
                self._append(list(new.values()), optimizer)
            self._last = (ids, [self._numbers[key] for key in ids])
        return self._last[1]

    def _append(self, params: list[Tensor], optimizer: Optimizer) -> None:
        place = {key: number for number, key in enumerate(self._parameter_names.by_id())}
        table = weakref.ref(self)

        def parameter_is_gone(_: object) -> None:  # its id may be that of another one now
            if (found := table()) is not None:
                found._is_stale = True

        for p in params:
            self._numbers[id(p)] = len(self._numbers)
            self._refs.append(weakref.ref(p, parameter_is_gone))
        places = [place.get(id(p), len(place) + i) for i, p in enumerate(params)]
        self.names = Names(
            (*self.names.names, *self._parameter_names.of(params, optimizer)),
            (*self.names.places, *places),
        )

    def norms_by_number(
        self,
        found: Iterable[tuple[Sequence[Tensor], list[int] | None, Tensor | None]],
        optimizer: Optimizer,
    ) -> tuple[float, ...] | None:
        """The norm of each parameter in the table, NaN where there is none; None: no norms.

        Args:
            found: parameters, their ids if known, and the norm of each, shape (n,), on the host.
        """
        known = [
            (self.numbers_of(params, optimizer, ids), norms.tolist())
            for params, ids, norms in found
            if norms is not None
        ]
        if not known:
            return None
        values = [math.nan] * len(self._numbers)
        for numbers, norms in known:
            for number, norm in zip(numbers, norms, strict=True):
                values[number] = norm
        return tuple(values)
