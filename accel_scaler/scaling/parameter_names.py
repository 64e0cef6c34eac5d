"""Which tensors overflowed: their names, and the error that ends a run of skips."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..errors import OverflowStreakError, listed
from .gradients import MOST_NAMED, SMALLEST_NORMAL, has_nonfinite_gradient, nonfinite, parameters_of
from .overflow_streak import Evidence, remedies, scale_path

__all__ = ["MOST_NAMES", "Culprits", "first_nonfinite"]

logger = logging.getLogger("accel_scaler")

MOST_NAMES = 5
"""Parameters that an error names one by one."""

MOST_LOSSES = 1024
"""Of one window that are remembered, to see after an overflow whether one was NaN."""

TOLD_AT = 30
"""Skips in a row at which a run without a limit is told of, and again at ten times as many. The
first search for a scale takes 16 from the usual 65536 down to 1."""

HIGHEST = 2.0**126
"""Of a scale from here on float32 has no room for the usual growth, soon or at once."""

MOST_WARNINGS = 20
"""Of such runs, in one process."""


class Culprits:
    """Names parameters and keeps those seen in the present run of overflows.

    Args:
        limit: skipped windows in a row that are allowed; None: any number.
        min_scale: the scale's floor, for the advice at the end of a run.
    """

    def __init__(self, limit: int | None, min_scale: float | None = None) -> None:
        self.limit = limit
        self.seen: dict[str, int] = {}
        """Tensors with non-finite gradients in the present run, and how often."""
        self.evidence = Evidence(min_scale=min_scale)
        self.keeps_losses = limit is not None
        """Somebody reads them at every skip; else one number of each loss is kept, if it is one."""
        self.warns_at: float = TOLD_AT if limit is None else max(1, limit // 3)
        """Skips in a row at which a warning is given."""
        self._warnings = 0
        self._told_dead = self._told_statistics = self._told_highest = False
        self.version = 0
        """Grows when there are more names to be had."""
        self._modules: list[weakref.ref[Module]] = []
        self._losses: list[Tensor] = []
        self._bad_losses: int | None = None
        self._known: dict[int, str] | None = None
        """What :meth:`known` has found in this window: several optimizers may ask."""
        self._has_windows = False

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled.
        return {**self.__dict__, "_modules": [], "_losses": [], "_bad_losses": None, "_known": None}

    def know(self, module: Module) -> None:
        """Take parameter names from this module (held weakly)."""
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))
            self._known = None
            self.version += 1

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Remember the losses of this window. Does not synchronise."""
        for loss in losses:
            if len(self._losses) < MOST_LOSSES and (self.keeps_losses or loss.numel() == 1):
                value = loss.detach()
                self._losses.append(value if value.numel() == 1 else torch.isfinite(value).all())

    def bad_losses(self) -> int:
        """How many losses of this window are inf or NaN. Synchronises."""
        if self._bad_losses is None:
            self._bad_losses = sum(
                not bool(loss if loss.dtype is torch.bool else torch.isfinite(loss).all())
                for loss in self._losses
            )
        return self._bad_losses

    def next_window(self) -> None:
        """Forget the losses, and the names: modules may be changed between windows."""
        self._losses.clear()
        self._bad_losses = None
        self._known, self._has_windows = None, True

    def saw(self, scale: float, overflowed: bool) -> None:
        """A window with this scale is over: evidence, if it belongs to a run of overflows."""
        if overflowed:
            self.evidence.add(scale, self.bad_losses() > 0)
        elif scale >= HIGHEST and not self._told_highest:
            self._told_highest = True
            logger.warning(
                f"the loss scale is {scale:g}, about the largest that float32 holds, and its "
                "window did not overflow: every gradient is zero or nearly so. Training goes on at "
                "that scale. Does the loss depend on the parameters? If so set max_scale "
                "(65536, say). (Said once.)"
            )

    def note(self, source: Optimizer | Tensor, consecutive_skips: int) -> None:
        """Look for the offenders, if this overflow is the one that warns or ends the run.

        Reads every gradient, so only where somebody is about to be told their names.
        """
        self.look(source, consecutive_skips)
        is_last = self.limit is not None and consecutive_skips >= self.limit
        if is_last or consecutive_skips + 1 == self.warns_at:
            optimizer = None if isinstance(source, Tensor) else source
            params = [source] if isinstance(source, Tensor) else parameters_of(source)
            self.count(self.names(filter(has_nonfinite_gradient, params), optimizer))

    def look(self, source: Optimizer | Tensor, consecutive_skips: int) -> None:
        """In the second half of a run: where does it begin, and are the parameters finite?

        A run without a limit: where it is told of. A backward meets the last parameters first
        and carries inf on to those before them.
        """
        tells = self.limit is None and consecutive_skips + 1 == self.warns_at
        if not tells and (self.limit is None or 2 * consecutive_skips < self.limit):
            return
        optimizer = None if isinstance(source, Tensor) else source
        params = [source] if isinstance(source, Tensor) else parameters_of(source)
        place = {key: number for number, key in enumerate(self.known())}
        params = sorted(params, key=lambda p: -place.get(id(p), len(place)))
        began = next(filter(has_nonfinite_gradient, params), None)
        evidence = self.evidence
        if began is not None:
            evidence.looked += 1
            (name,) = self.names([began], optimizer)
            evidence.began[name] = evidence.began.get(name, 0) + 1
        if tells or consecutive_skips >= (self.limit or 0):
            broken = islice((p for p in params if nonfinite(p.detach())), MOST_NAMED)
            evidence.broken = self.names(broken, optimizer)

    def tell_broken_statistics(self) -> None:
        """After a skip whose loss was inf or NaN: a batch norm has kept what it saw. Said once."""
        if self._told_statistics or not self.bad_losses():
            return
        modules = [module for ref in self._modules if (module := ref()) is not None]
        broken = [
            name or type(part).__name__
            for module in modules
            for name, part in module.named_modules()
            if isinstance(getattr(part, "running_var", None), Tensor)
            and (nonfinite(part.running_mean) or nonfinite(part.running_var))
        ]
        if broken:
            self._told_statistics = True
            logger.warning(
                "the skipped step changed no parameter, but its forward left inf or NaN in the "
                f"running statistics of {listed(broken[:MOST_NAMES], len(broken))}, so evaluation "
                "gives NaN from here on. Load the last checkpoint, or call reset_running_stats() "
                "there and go on training. (Said once.)"
            )

    def count(self, names: Iterable[str]) -> None:
        """Remember offenders that a check came across anyway."""
        for name in names:
            self.seen[name] = self.seen.get(name, 0) + 1

    def names(self, params: Iterable[Tensor], optimizer: Optimizer | None = None) -> list[str]:
        """A name for each parameter: the module's, the optimizer's, or its place and shape."""
        wanted = {id(p): p for p in params}
        if not wanted:
            return []
        known = self.known()
        found = {key: known[key] for key in wanted if key in known}
        for number, group in enumerate(optimizer.param_groups if optimizer else []):
            for place, p in enumerate(group["params"]):
                if id(p) in wanted and id(p) not in found:
                    labels = group.get("param_names")
                    found[id(p)] = (
                        labels[place]
                        if labels
                        else f"parameter {place} of group {number}, shape {tuple(p.shape)}"
                    )
        return [
            found.get(key, f"a parameter of shape {tuple(p.shape)}") for key, p in wanted.items()
        ]

    def known(self) -> dict[int, str]:
        """``id(parameter)`` -> name, of all known models in their order.

        A name that two models have gets its model's class before it.
        """
        found = self._find_names() if self._known is None else self._known
        self._known = found if self._has_windows else None
        return found

    def _find_names(self) -> dict[int, str]:
        modules = [module for ref in self._modules if (module := ref()) is not None]
        named = [list(module.named_parameters()) for module in modules]
        often = Counter(name for each in named for name, _ in each) if len(named) > 1 else {}
        kinds = [type(module).__name__ for module in modules]
        found: dict[int, str] = {}
        for number, (kind, each) in enumerate(zip(kinds, named, strict=True)):
            label = f"{kind}[{number}]" if kinds.count(kind) > 1 else kind
            for name, p in each:
                clear = name if len(named) == 1 or often[name] == 1 else f"{label}.{name}"
                found.setdefault(id(p), clear)
        return found

    def raise_if_over(self, consecutive_skips: int, get_scale: Callable[[], float]) -> None:
        """End the run: raise once more than ``limit`` windows in a row were skipped.

        At a third of that, say so, once. Without a limit say it at ``TOLD_AT`` in a row and at
        ten times as many, and once where the scale has become too small to be divided by.
        """
        if consecutive_skips == 0:
            self._forget()
            return
        if self.warns_at <= consecutive_skips and self._warnings < MOST_WARNINGS:
            self._warn(consecutive_skips, get_scale())
        if self.limit is None:
            if consecutive_skips >= TOLD_AT and not self._told_dead:
                self._tell_dead(get_scale())
            return
        if consecutive_skips <= self.limit:
            return
        said = (
            f"{consecutive_skips} windows in a row overflowed, max_consecutive_skips="
            f"{self.limit} allows {self.limit}. {self._told_so_far(get_scale())}"
        )
        self._forget()
        raise OverflowStreakError(said)

    def _warn(self, skips: int, scale: float) -> None:
        if self.limit is not None:
            self._warnings = MOST_WARNINGS
            logger.warning(
                f"{skips} windows in a row overflowed; max_consecutive_skips="
                f"{self.limit} ends the run after {self.limit}. Non-finite gradients in: "
                f"{self._worst()}. Scale: {scale_path(self.evidence.scales, scale)}. "
                "(Said once.)"
            )
            return
        self._warnings += 1
        self.warns_at = 10 * skips
        again = f"Said again after {10 * skips}."
        logger.warning(
            f"{skips} windows in a row overflowed and were skipped; max_consecutive_skips is not "
            f"set, so nothing ends this run. {self._told_so_far(scale)} "
            f"({again if self._warnings < MOST_WARNINGS else 'Not said again.'})"
        )

    def _tell_dead(self, scale: float) -> None:
        """Below float32's normal numbers 1 / scale is out of range, or soon will be."""
        if scale >= SMALLEST_NORMAL:
            return
        self._told_dead = True
        logger.error(
            f"the loss scale fell to {scale:g}, too small to divide gradients by: every further "
            "window is skipped, whatever its gradients. Parameters are as before the run of "
            "skips. End the run, load the last checkpoint, set min_scale (1.0, say). (Said once.)"
        )

    def _told_so_far(self, scale: float) -> str:
        """What was seen in this run of skips, and what to try."""
        evidence = self.evidence
        advice = remedies(evidence, scale, self.limit is not None)
        return (
            f"Non-finite gradients in: {self._worst()}. "
            f"Scale: {scale_path(evidence.scales, scale)}. "
            f"{evidence.first}Parameters are as before the run. Likeliest remedies: "
            + "; ".join(f"({number}) {text}" for number, text in enumerate(advice, 1))
            + "."
        )

    def _worst(self) -> str:
        worst = sorted(self.seen, key=lambda name: -self.seen[name])
        return listed(worst[:MOST_NAMES], len(worst)) or "unknown tensors"

    def _forget(self) -> None:
        if self.limit is None:
            self.warns_at = TOLD_AT
        self.seen.clear()
        self.evidence.clear()


def first_nonfinite(optimizer: Optimizer) -> list[Tensor]:
    """Some parameters with a non-finite gradient, small ones first: few, to keep a skip cheap."""
    by_size = sorted(parameters_of(optimizer), key=lambda p: p.numel())
    return list(islice((p for p in by_size if has_nonfinite_gradient(p)), MOST_NAMED))
