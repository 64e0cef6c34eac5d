"""The modules of a run that are in float32 by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from glob import escape

from torch import nn
from torch.nn import Module

from ..errors import UnsupportedError, listed
from .fp32_modules import Fp32Module, is_compiled
from .names import match, named, refuse_unmatched

logger = logging.getLogger("accel_scaler")

PATIENCE = 10
"""Backwards; some modules are used now and then."""


class ChosenModules:
    """Those that globs choose in the models of one run. The models are held weakly.

    Args:
        patterns: as :func:`match` takes them; none: nothing is ever changed.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self.kept: list[str] = []
        """Names given to :meth:`keep`, in order."""
        self._unmatched = list(self.patterns)
        self._on: list[Fp32Module] = []
        self._backwards = 0

    @property
    def names(self) -> list[str]:
        """Of the modules that are in float32, in the order in which that happened."""
        return [each.name for each in self._on if each.module is not None]

    def keep(self, names: Iterable[str], models: Iterable[Module]) -> None:
        """Put these on float32 from now on, as if globs had named them: in every model that knows
        the name, those too that come later.

        Raises:
            UnsupportedError: one cannot run in float32; nothing is changed.
        """
        names, before = list(names), self.patterns
        self.patterns = tuple(dict.fromkeys((*before, *map(escape, names))))
        try:
            for model in models:
                self.refuse_uncastable(model)
        except UnsupportedError:
            self.patterns = before
            raise
        for model in models:
            self.put_on(model)
        self.kept += [name for name in names if name not in self.kept]

    @property
    def modules(self) -> list[Module]:
        """Those that are in float32."""
        return [module for each in self._on if (module := each.module) is not None]

    @property
    def count(self) -> int:
        """How many were put on so far, for :meth:`take_off`."""
        return len(self._on)

    def refuse_uncastable(self, model: Module) -> None:
        """Raise where :meth:`put_on` would; nothing is changed.

        Raises:
            UnsupportedError: a chosen module cannot run in float32, or ``nn.DataParallel`` copies
                the model anew for each forward.
        """
        self._found_in(model)

    def put_on(self, model: Module) -> None:
        """Put the model's chosen modules on float32, wrapped as it may be; all or none.

        Those that are on stay so; modules that were added since are put on too.

        Raises:
            UnsupportedError: as :meth:`refuse_uncastable`.
        """
        found = self._found_in(model)
        for each in found:
            each.put_on()
        self._on += found
        self._unmatched = [glob for glob in self._unmatched if not match(model, [glob])]

    def take_off(self, first: int = 0) -> None:
        """Take off those that were put on, from the ``first`` on, the last one first."""
        for each in reversed(self._on[first:]):
            each.take_off()
        del self._on[first:]

    def refuse_unmatched(self, models: Iterable[Module]) -> None:
        """Raise ``ConfigError`` where a glob has matched nothing in any model so far.

        Costs nothing once each has.

        Args:
            models: all there are.
        """
        if self._unmatched:
            refuse_unmatched(list(models), self._unmatched)
            self._unmatched = []

    def before_backward(self, models: Iterable[Module]) -> None:
        """Say once, in the log, which of them have never run by the tenth backward.

        Args:
            models: all there are.
        """
        self._backwards += 1
        if self._backwards != PATIENCE or any(map(is_compiled, models)):
            return
        unused = [each.name for each in self._on if each.module is not None and not each.has_run]
        around = tuple(f"{name}." for name in self.names)
        outer = [name for name in unused if not name.startswith(around)]
        if outer:
            logger.warning(
                "fp32_modules: the forward of %s has not run in %d backwards, so nothing of it is "
                "in float32. A module around it may use its weights by itself, as "
                "nn.MultiheadAttention does; name that one.",
                listed(outer[:5], len(outer)),
                PATIENCE,
            )

    def _found_in(self, model: Module) -> list[Fp32Module]:
        if not self.patterns:
            return []
        modules, known = named(model), [each.module for each in self._on]
        names = [n for n in match(model, self.patterns) if not _is_in(modules[n], known)]
        if names and any(isinstance(each, nn.DataParallel) for each in model.modules()):
            raise UnsupportedError(
                "fp32_modules: the model is within nn.DataParallel, which copies it anew for each "
                "forward. Use DistributedDataParallel (accelerate launch --multi_gpu)."
            )
        return [Fp32Module(modules[name], name) for name in names]


def _is_in(module: Module, known: list[Module | None]) -> bool:
    return any(module is each for each in known)
