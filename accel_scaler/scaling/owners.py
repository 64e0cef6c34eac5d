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

    Keeps neither optimizers nor parameters alive. Asked thousands of times a window where a loop
    clips tensor by tensor, so no answer walks through the parameters that it does not ask for.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._refs = list(map(weakref.ref, optimizers))
        self._groups = [len(optimizer.param_groups) for optimizer in optimizers]
        self._counts: list[int] = []
        self._sharded: dict[int, bool] = {}
        self._of: dict[int, tuple[int, ...]] = {}
        """Under the ``id`` of a parameter the places of its optimizers."""
        for place, optimizer in enumerate(optimizers):
            params = parameters_of(optimizer)
            self._counts.append(len(params))
            mine: dict[int, tuple[int, ...]] = dict.fromkeys(map(id, params), (place,))
            for key in mine.keys() & self._of.keys():
                mine[key] = (*self._of[key], place)
            self._of.update(mine)

    def answers(self, optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """Whether this is how the ``optimizers`` have ``parameters`` now: none of them is another
        one, or has got a group since; or parameters, where some of these are not known."""
        if len(optimizers) != len(self._refs) or any(
            ref() is not optimizer or len(optimizer.param_groups) != groups
            for ref, optimizer, groups in zip(self._refs, optimizers, self._groups, strict=True)
        ):
            return False
        if all(map(self._of.__contains__, map(id, parameters))):
            return True
        return self._counts == [
            sum(len(group["params"]) for group in optimizer.param_groups)
            for optimizer in optimizers
        ]

    def split(
        self, parameters: Sequence[Tensor]
    ) -> tuple[list[tuple[Optimizer, list[Tensor]]], list[Tensor]]:
        """Each optimizer that has some of ``parameters``, with these, in the order they came; and
        those that none has."""
        known: list[tuple[int, ...]] = [self._of.get(key, ()) for key in map(id, parameters)]
        kinds = set(known)
        owned = []
        for place in sorted({place for places in kinds for place in places}):
            optimizer, mine = self._refs[place](), list(parameters)
            if len(kinds) > 1:
                mine = [p for p, places in zip(parameters, known, strict=True) if place in places]
            if optimizer is not None:
                owned.append((optimizer, mine))
        if () not in kinds:
            return owned, []
        return owned, [p for p, places in zip(parameters, known, strict=True) if not places]

    def count(self, optimizer: Optimizer) -> int | None:
        """How many parameters it has; None: not known."""
        place = self._place(optimizer)
        return None if place is None else self._counts[place]

    def is_sharded(self, optimizer: Optimizer) -> bool | None:
        """Whether ranks may hold different gradients of its parameters; None: not known."""
        place = self._place(optimizer)
        if place is None:
            return None
        if place not in self._sharded:
            self._sharded[place] = is_sharded(parameters_of(optimizer))
        return self._sharded[place]

    def _place(self, optimizer: Optimizer) -> int | None:
        return next((i for i, ref in enumerate(self._refs) if ref() is optimizer), None)
