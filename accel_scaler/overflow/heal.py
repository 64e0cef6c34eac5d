"""``heal``: modules that overflow at any scale run in float32 from then on.

The window that overflowed is run again, with modules in float32, until it is finite. So a change is
known to help before it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Module

from ..errors import UnsupportedError
from ..scaling import Origin
from .fp32_modules import Fp32Module, Fp32Modules
from .module_names import modules_by_name

logger = logging.getLogger("accel_scaler")

MIN_OVERFLOWS = 3
"""Windows in a row in which the backward of one module overflows at scale 1, before it is healed. A
single batch may do that in a sound model."""

MAX_TRIES = 24
"""How often modules are tried in one window, at most."""

MAX_SHARE = 0.5
"""The largest share of the parameters in float32; beyond it there is little float16 left."""


class Healer:
    """Finds the modules that have to run in float32.

    Modules are known by name: one that several of the watched models have is changed in all of
    them.
    """

    def __init__(self, fp32_modules: Fp32Modules) -> None:
        self.fp32_modules = fp32_modules
        self._hopeless: set[str] = set()
        """Modules whose overflows nothing has cured."""
        self._row = "", 0, 0
        """The module in whose backward the last windows have overflowed, the index of the last
        one, and their number."""

    def heal(
        self,
        models: Sequence[Module],
        origin: Origin,
        index: int,
        run_again: Callable[[], Origin | None],
        any_rank: Callable[[bool], bool],
    ) -> tuple[str, ...]:
        """Run modules in float32 that cure the overflow of this origin, at scale 1 and so at any.

        ``index``: of the window, counted in the run. ``run_again``: runs the window again at scale
        1, on every rank, and returns where it overflows. ``any_rank``: whether an answer is True on
        any rank; they decide alike, though one may watch a model of its own. Returns the names of
        the modules in float32 from now on; none where nothing helps, which is logged once for each
        module in which an overflow began.
        """
        if any_rank(origin.is_of_data or origin.module in self._hopeless):
            return ()
        if origin.where not in ("forward", "loss"):
            module, last, count = self._row
            goes_on = (module, last + 1) == (origin.module, index)
            self._row = origin.module, index, count + 1 if goes_on else 1
            if any_rank(self._row[2] < MIN_OVERFLOWS):
                return ()
        names, why = self._search(models, origin.module, run_again, any_rank)
        if names:
            self.fp32_modules.add(names, models)
        else:
            self._hopeless.add(origin.module)
            logger.warning("heal: %s. (For the %s. Logged once.)", why, origin.short)
        return tuple(names)

    def _search(
        self,
        models: Sequence[Module],
        name: str,
        run_again: Callable[[], Origin | None],
        any_rank: Callable[[bool], bool],
    ) -> tuple[list[str], str]:
        """The names of modules that cure the overflow in ``name``, or why there are none."""
        tried: list[str] = []
        for _ in range(MAX_TRIES):
            if not name:
                break
            names = [each for each in tried if not _is_in(each, name)] + [name]
            if any_rank(self.share(models, names) > MAX_SHARE):
                return [], (
                    f"{', '.join(names)} and what is in float32 already hold more than "
                    f"{MAX_SHARE:.0%} of the parameters. Train this model in float32 or bfloat16"
                )
            with _in_float32(models, names) as is_possible:
                after = run_again() if is_possible else None
            if not is_possible:
                name = name.rpartition(".")[0]
                continue
            if after is None:
                return names, ""
            tried = names
            # If it still overflows in float32, its input does, or the next module on its output.
            is_inside = not after.module or any(_is_in(after.module, each) for each in names)
            name = name.rpartition(".")[0] if is_inside else after.module
        return [], (
            "no module in float32 cures it. If it is in code outside of the model, or in the "
            "model's own forward, compute that in float32. If weights are inf or NaN, load them in "
            "bfloat16 or float32"
        )

    def share(self, models: Sequence[Module], names: Sequence[str] = ()) -> float:
        """The share of all parameters that are in float32, from 0 to 1, if the modules of these
        ``names`` were, too."""
        modules = [*self.fp32_modules.modules, *_modules_of(models, names)]
        every = {id(p): p.numel() for model in models for p in Module.parameters(model)}
        held = {id(p): p.numel() for module in modules for p in Module.parameters(module)}
        return sum(held.values()) / max(sum(every.values()), 1)


def _is_in(name: str, other: str) -> bool:
    """Whether ``name`` is the module ``other``, or a module inside it."""
    return f"{name}.".startswith(f"{other}.")


def _modules_of(models: Sequence[Module], names: Sequence[str]) -> list[Module]:
    found = [modules_by_name(model) for model in models]
    return [modules[name] for modules in found for name in names if name in modules]


@contextmanager
def _in_float32(models: Sequence[Module], names: Sequence[str]) -> Iterator[bool]:
    """Run the named modules in float32 in the block. Gives False where one of them cannot."""
    try:
        found = [Fp32Module(module, "") for module in _modules_of(models, names)]
    except UnsupportedError:
        yield False
        return
    for each in found:
        each.enable()
    try:
        yield True
    finally:
        for each in found:
            each.disable()
