"""Which optimizers have which parameter: looked up once a window, however often it is asked."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from .collectives import is_sharded
from .gradients import parameters_of


class Owners:
    """The optimizers that have each parameter, as their groups are when this is made.

    Keeps neither optimizers nor parameters alive. A loop that clips tensor by tensor asks thousands
    of times a window, so no answer walks through the parameters that it does not ask for.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._refs = list(map(weakref.ref, optimizers))
        self._sizes = _sizes(optimizers)
        self._sharded: dict[int, bool] = {}
        self._of: dict[int, tuple[int, ...]] = {}
        """Under the ``id`` of a parameter the indices of its optimizers."""
        for index, optimizer in enumerate(optimizers):
            for key in dict.fromkeys(map(id, parameters_of(optimizer))):
                self._of[key] = (*self._of.get(key, ()), index)

    def is_of(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether these are the ``optimizers``, and none has got or lost parameters since."""
        same = [ref() for ref in self._refs] == list(optimizers)
        return same and self._sizes == _sizes(optimizers)

    def split(
        self, parameters: Sequence[Tensor]
    ) -> tuple[list[tuple[Optimizer, list[Tensor]]], list[Tensor]]:
        """Each optimizer that has some of ``parameters``, with these, in the order they came; and
        those that none has."""
        found: dict[int, list[Tensor]] = {}
        unowned: list[Tensor] = []
        for p in parameters:
            indices = self._of.get(id(p), ())
            for index in indices:
                found.setdefault(index, []).append(p)
            if not indices:
                unowned.append(p)
        owners = [(self._refs[index](), found[index]) for index in sorted(found)]
        return [(owner, mine) for owner, mine in owners if owner is not None], unowned

    def is_sharded(self, optimizer: Optimizer) -> bool | None:
        """Whether ranks may hold different gradients of its parameters; None: not known."""
        index = self._index(optimizer)
        if index is None:
            return None
        if index not in self._sharded:
            self._sharded[index] = is_sharded(parameters_of(optimizer))
        return self._sharded[index]

    def count(self, optimizer: Optimizer) -> int | None:
        """How many parameters it has; None: not known."""
        index = self._index(optimizer)
        return None if index is None else sum(self._sizes[index])

    def _index(self, optimizer: Optimizer) -> int | None:
        return next((i for i, ref in enumerate(self._refs) if ref() is optimizer), None)


def _sizes(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
