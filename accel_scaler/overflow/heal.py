"""What overflows at any scale runs in float32 from then on: ``heal``.

The window that overflowed is run again, with a module in float32, until it is finite: so what is
changed for good is known to help before it is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import UnsupportedError
from ..scaling import Origin
from .chosen import ChosenModules
from .fp32_modules import Fp32Module
from .names import named

logger = logging.getLogger("accel_scaler")

IN_A_ROW = 3
"""Windows that overflow in the backward of one module at scale 1, before it is put on float32. A
single batch may do so in a model that is in order."""

MOST_AT_ONCE = 8
"""Modules that one window may put on float32."""

MOST_TRIALS = 24
"""Runs of one window in search of them."""

MOST_SHARE = 0.5
"""Of all parameters in float32: beyond it there is little float16 left."""


NOTHING_HELPS = (
    "no module in float32 cures it. If it is in code outside of the model, or in the model's own "
    "forward, compute that in float32"
)


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
        """In a forward or a loss: no scale helps."""
        return self.origin.where in ("forward", "loss")


Trial = Callable[[], Finding | None]
"""Runs the window again, with scale 1, on every rank; None: it is finite."""


class Healer:
    """Finds the modules that have to run in float32.

    Args:
        chosen: keeps them there.
    """

    def __init__(self, chosen: ChosenModules) -> None:
        self.chosen = chosen
        self.statistics = Statistics()
        self._last: Located | None = None
        self._in_a_row = 0
        self.has_given_up = False
        """Of the present run of overflows nothing is to be expected."""
        self._suspected: set[Located] = set()
        """Put on float32 without a trial."""
        self._given_up: set[Located | None] = set()
        """Where nothing has helped, or would have been too much."""

    def window_was_fine(self) -> None:
        """Nothing overflowed, or only at the present scale: overflows are counted anew."""
        self._last, self._in_a_row, self.has_given_up = None, 0, False

    def heal(
        self, models: Sequence[Module], found: Finding, trial: Trial | None
    ) -> tuple[str, ...]:
        """Put the smallest module on float32 that cures this overflow, or several.

        Args:
            models: by their number.
            found: what overflows at scale 1, and so at any.
            trial: tells whether it is cured; None: the window cannot be run again, so the next ones
                tell.

        Returns the names of those that were put on now; none where nothing helps, which is said
        once for each place.
        """
        if found.origin.is_of_data or found.at in self._given_up:
            self.has_given_up = True
            return ()
        if not found.is_in_forward:
            self._in_a_row = self._in_a_row + 1 if found.at == self._last else 1
            self._last = found.at
            if self._in_a_row < IN_A_ROW:
                return ()
        if trial is None:
            cure = tuple(each.name for each in self._suspect(models, found))
        else:
            cure = tuple(each.name for each in self._search(models, found, trial))
        if cure:
            self.chosen.keep(cure, models)
            self.window_was_fine()
        return cure

    def _search(self, models: Sequence[Module], found: Finding, trial: Trial) -> list[Located]:
        chosen: list[Located] = []
        at, trials = found.at, 0
        while at is not None and at.name and trials < MOST_TRIALS and len(chosen) < MOST_AT_ONCE:
            wider = [each for each in chosen if not each.is_in(at)] + [at]
            if self.share(models, wider) > MOST_SHARE:
                why = (
                    f"{', '.join(each.name for each in wider)} and what is in float32 already hold "
                    f"more than {MOST_SHARE:.0%} of the parameters. Train this model in float32 or "
                    "bfloat16"
                )
                return self._give_up(found, why)
            trials += 1
            with _tried(models, wider) as cannot:
                after = None if cannot else trial()
            if cannot is not None:
                at = at.parent if cannot == at else None
                continue
            if after is None:
                return _without_needless(models, wider, trial)
            chosen = wider
            if after.at is None or any(after.at.is_in(each) for each in wider):
                # In float32 it still overflows: its input does, or what it gives to the next.
                at = at.parent
            else:
                at = after.at
        return self._give_up(found, NOTHING_HELPS)

    def _suspect(self, models: Sequence[Module], found: Finding) -> list[Located]:
        """The module itself; where it was put on float32 in vain, the one around it."""
        at = found.at
        while at is not None and at.name:
            tried = [each for each in self._suspected if at.is_in(each)]
            module = _module_of(models, at)
            if tried:
                at = min(tried, key=lambda each: len(each.name)).parent
            elif self.share(models, [at]) > MOST_SHARE:
                break
            elif module is None or not can_be_cast(module, at.name):
                at = at.parent
            else:
                self._suspected.add(at)
                return [at]
        return self._give_up(found, NOTHING_HELPS)

    def share(self, models: Sequence[Module], more: Sequence[Located] = ()) -> float:
        """The part of all parameters that is in float32, from 0 to 1.

        Args:
            more: modules that are not yet.
        """
        modules = [m for each in more if (m := _module_of(models, each)) is not None]
        modules += self.chosen.modules
        every: dict[int, int] = {id(p): p.numel() for m in models for p in Module.parameters(m)}
        held: dict[int, int] = {id(p): p.numel() for m in modules for p in Module.parameters(m)}
        return sum(held.values()) / max(sum(every.values()), 1)

    def _give_up(self, found: Finding, why: str) -> list[Located]:
        self._given_up.add(found.at)
        self.has_given_up = True
        logger.warning("heal: %s. (Of %s. Said once.)", why, found.origin.text)
        return []


class Statistics:
    """Running statistics of batch norms, as they were before the window in hand.

    A forward that overflows leaves inf or NaN in them, and no later window takes it out again.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._kept: list[tuple[weakref.ref[Module], str, Tensor]] = []

    def watch(self, model: Module) -> None:
        """Those of this model too."""
        self._models.add(model)

    @torch.no_grad()
    def keep(self) -> None:
        """As they are now, which may be what was loaded. Does not synchronise."""
        found = list(_running(list(self._models)))
        if len(found) != len(self._kept) or any(
            ref() is not module or name != own or old.shape != value.shape
            for (module, own, value), (ref, name, old) in zip(found, self._kept, strict=True)
        ):
            self._kept = [(weakref.ref(m), name, value.clone()) for m, name, value in found]
        elif found:
            torch._foreach_copy_([old for _, _, old in self._kept], [v for _, _, v in found])

    @torch.no_grad()
    def put_back(self) -> None:
        """Those that are not finite any more. Synchronises."""
        for ref, name, old in self._kept:
            module = ref()
            value = None if module is None else getattr(module, name)
            if value is not None and value.shape == old.shape and not value.isfinite().all():
                value.copy_(old)


def _running(models: Sequence[Module]) -> Iterator[tuple[Module, str, Tensor]]:
    for model in models:
        for module in model.modules():
            for name in ("running_mean", "running_var"):
                value = module._buffers.get(name)
                if value is not None and value.is_floating_point():
                    yield module, name, value


def can_be_cast(module: Module, name: str) -> bool:
    """Whether it can run in float32."""
    try:
        Fp32Module(module, name)
    except UnsupportedError:
        return False
    return True


@contextmanager
def _tried(models: Sequence[Module], chosen: list[Located]) -> Iterator[Located | None]:
    """In float32 within the block; gives the one that cannot be cast."""
    put: list[Fp32Module] = []
    cannot = None
    try:
        for located in chosen:
            module = _module_of(models, located)
            if module is None or not can_be_cast(module, located.name):
                cannot = located
                break
            put.append(Fp32Module(module, located.name))
            put[-1].put_on()
        yield cannot
    finally:
        for each in reversed(put):
            each.take_off()


def _without_needless(
    models: Sequence[Module], chosen: list[Located], trial: Trial
) -> list[Located]:
    """Those that were tried on the way and are not needed are left out again."""
    for each in chosen[:-1]:
        fewer = [other for other in chosen if other != each]
        with _tried(models, fewer) as cannot:
            if cannot is None and trial() is None:
                chosen = fewer
    return chosen


def _module_of(models: Sequence[Module], located: Located) -> Module | None:
    return named(models[located.model]).get(located.name)


def locate(models: Sequence[Module], origin: Origin) -> Located | None:
    """Where an origin's module is; None: it is no module of these, or gone."""
    module: Any = None if origin.place is None else origin.place.module()
    if module is None:
        return None
    for number, model in enumerate(models):
        for name, each in named(model).items():
            if each is module:
                return Located(number, name)
    return None
