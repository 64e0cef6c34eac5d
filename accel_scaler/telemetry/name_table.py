"""The names of the parameters of a record's norms."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ..scaling import GradNorm, ParameterNames


class NameTable:
    """Puts norms in the order of the model; remembers names. Holds parameters weakly."""

    def __init__(self, parameter_names: ParameterNames) -> None:
        self.parameter_names = parameter_names
        self._ids: list[int] = []
        self._version = -1

    def _forget(self, _: object) -> None:
        self._ids = []  # one of them may be that of another parameter now

    def norms(self, found: Iterable[GradNorm], optimizer: Optimizer) -> dict[str, Any]:
        """``names`` and ``norms`` of a record, where there are norms. Parameters of no known model
        are named by the optimizer and come last.

        Args:
            found: of disjoint parameters; those on the host.
        """
        known = [(m, m.each) for m in found if m.each is not None]
        if not known:
            return {}
        ids = known[0][0].ids if len(known) == 1 else None  # thousands take a while
        params = [p for m, _ in known for p in m.parameters]
        ids = list(map(id, params)) if ids is None else ids
        if ids != self._ids or self._version != self.parameter_names.version:
            place = {key: number for number, key in enumerate(self.parameter_names.by_id())}
            names = dict(
                zip(dict.fromkeys(ids), self.parameter_names.of(params, optimizer), strict=True)
            )
            self._order = sorted(range(len(ids)), key=lambda i: place.get(ids[i], len(place)))
            self._names = tuple(names[ids[i]] for i in self._order)
            self._refs = [weakref.ref(p, self._forget) for p in params]
            self._ids, self._version = ids, self.parameter_names.version
        norms = [norm for _, each in known for norm in each.tolist()]
        return {"names": self._names, "norms": tuple([norms[i] for i in self._order])}
