"""What overflows at any scale runs in float32 from then on: ``heal``.

The window that overflowed is run again, with a module in float32, until it is finite: so what is
changed for good is known to help before it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch.nn import Module

from ..errors import UnsupportedError
from ..overflow_finder import Origin
from ..precision import Fp32Module

logger = logging.getLogger("accel_scaler")

IN_A_ROW = 3
"""Windows that overflow in the backward of one module at scale 1, before it is put on float32. A
single batch may do so in a model that is in order."""

MOST_AT_ONCE = 8
"""Modules that one window may put on float32."""

MOST_TRIALS = 24
"""Runs of one window in search of them."""

MOST_SHARE = 0.5
"""Of a model's parameters in float32: beyond it there is little float16 left."""


@dataclass(frozen=True, slots=True)
class Located:
    """A module of one of the models; the same on every rank."""

    model: int
    name: str

    @property
    def parent(self) -> Located:
        """The module around it; the model itself has the name ""."""
        return Located(self.model, self.name.rpartition(".")[0])

    def is_in(self, other: Located) -> bool:
        """Whether it is the other one, or inside of it."""
        inside = not other.name or f"{self.name}.".startswith(f"{other.name}.")
        return self.model == other.model and inside


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a window overflows, on any rank."""

    origin: Origin
    at: Located | None
    """None: in no module of a model."""

    @property
    def is_in_forward(self) -> bool:
        """No scale helps: it is in a forward or a loss, of finite input."""
        given = self.origin.input
        made = given is None or all(map(isfinite, given))
        return self.origin.where in ("forward", "loss") and made


Trial = Callable[[], Finding | None]
"""Runs the window again, with scale 1, on every rank; None: it is finite."""


class Healer:
    """Keeps modules in float32, of several models."""

    def __init__(self) -> None:
        self.kept: dict[Located, Fp32Module] = {}
        self._last: Located | None = None
        self._in_a_row = 0
        self._given_up: set[Located | None] = set()
        """Where nothing has helped, or would have been too much."""

    def window_was_fine(self) -> None:
        """Nothing overflowed, or only at the present scale: overflows are counted anew."""
        self._last, self._in_a_row = None, 0

    def heal(self, models: Sequence[Module], found: Finding, trial: Trial) -> list[Located]:
        """Put the smallest module on float32 that cures this overflow, or several.

        Args:
            models: by their number.
            found: what overflows at scale 1, and so at any.
            trial: told that it is cured.

        Returns those that were put on now; none where nothing helps, which is said once.
        """
        if not found.is_in_forward:
            self._in_a_row = self._in_a_row + 1 if found.at == self._last else 1
            self._last = found.at
            if self._in_a_row < IN_A_ROW:
                return []
        if found.origin.where == "forward" and not found.is_in_forward:
            return []  # the data were not finite
        if found.at in self._given_up:
            return []
        chosen = self._search(models, found, trial)
        for located in chosen:
            self.keep(models, located)
        if chosen:
            self.window_was_fine()
        return chosen

    def keep(self, models: Sequence[Module], located: Located) -> None:
        """In float32 from now on.

        Raises:
            UnsupportedError: it cannot be cast.
        """
        if located not in self.kept:
            module = Fp32Module(models[located.model].get_submodule(located.name), located.name)
            module.put_on()
            self.kept[located] = module

    def take_off(self) -> None:
        """Every one is as it was."""
        for module in reversed(self.kept.values()):
            module.take_off()
        self.kept.clear()

    def _search(self, models: Sequence[Module], found: Finding, trial: Trial) -> list[Located]:
        chosen: list[Located] = []
        at, trials = found.at, 0
        while at is not None and at.name and trials < MOST_TRIALS and len(chosen) < MOST_AT_ONCE:
            wider = self._with(chosen, at)
            if self._share(models, wider) > MOST_SHARE:
                why = (
                    f"{', '.join(each.name for each in wider)} and what is in float32 already hold "
                    f"more than {MOST_SHARE:.0%} of the parameters. Train this model in float32 or "
                    "bfloat16"
                )
                return self._give_up(found, why)
            trials += 1
            with self._tried(models, wider) as cannot:
                after = None if cannot else trial()
            if cannot:
                at = at.parent if cannot is at else None
                continue
            if after is None:
                return self._without_needless(models, wider, trial)
            chosen = wider
            if after.at is None or any(after.at.is_in(each) for each in wider):
                # In float32 it still overflows: its input does, or what it gives to the next.
                at = at.parent
            else:
                at = after.at
        why = (
            "no module in float32 cures it. If it is in code outside of the model, or in the "
            "model's own forward, compute that in float32"
        )
        return self._give_up(found, why)

    def _without_needless(
        self, models: Sequence[Module], chosen: list[Located], trial: Trial
    ) -> list[Located]:
        """Those that were tried on the way and are not needed are left out again."""
        for each in chosen[:-1]:
            fewer = [other for other in chosen if other != each]
            with self._tried(models, fewer) as cannot:
                if not cannot and trial() is None:
                    chosen = fewer
        return chosen

    @staticmethod
    def _with(chosen: list[Located], at: Located) -> list[Located]:
        """``at`` too, and nothing that is inside of it."""
        return [each for each in chosen if not each.is_in(at)] + [at]

    @contextmanager
    def _tried(self, models: Sequence[Module], chosen: list[Located]) -> Iterator[Located | None]:
        """In float32 within the block; gives the one that cannot be cast."""
        put: list[Fp32Module] = []
        cannot = None
        try:
            for located in chosen:
                try:
                    module = models[located.model].get_submodule(located.name)
                    put.append(Fp32Module(module, located.name))
                    put[-1].put_on()
                except UnsupportedError:
                    cannot = located
                    break
            yield cannot
        finally:
            for each in reversed(put):
                each.take_off()

    def _share(self, models: Sequence[Module], chosen: Sequence[Located]) -> float:
        return share_of(models, [*self.kept, *chosen])

    def _give_up(self, found: Finding, why: str) -> list[Located]:
        self._given_up.add(found.at)
        logger.warning("heal: %s. (Of %s. Said once.)", why, found.origin.text)
        return []


def share_of(models: Sequence[Module], chosen: Sequence[Located]) -> float:
    """The part of all parameters that these hold, from 0 to 1."""
    every: dict[int, int] = {id(p): p.numel() for m in models for p in Module.parameters(m)}
    held: dict[int, int] = {
        id(p): p.numel()
        for each in chosen
        for p in Module.parameters(models[each.model].get_submodule(each.name))
    }
    return sum(held.values()) / max(sum(every.values()), 1)


def locate(models: Sequence[Module], origin: Origin) -> Located | None:
    """Where an origin's module is; None: it is no module of these, or gone."""
    module: Any = None if origin.place is None else origin.place.module()
    if module is None:
        return None
    for number, model in enumerate(models):
        for name, each in model.named_modules():
            if each is module:
                return Located(number, name)
    return None
