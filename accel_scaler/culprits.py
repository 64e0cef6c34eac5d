"""Which tensors overflowed: their names, and the error that ends a run of skips."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .config import OverflowStreakError
from .gradients import MOST_NAMED, has_nonfinite_gradient, parameters_of

__all__ = ["MOST_NAMES", "Culprits", "first_nonfinite"]

MOST_NAMES = 5
"""Parameters that an error names one by one."""


class Culprits:
    """Names parameters and keeps those seen in the present run of overflows.

    Args:
        limit: skipped windows in a row that are allowed; None: any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.seen: dict[str, int] = {}
        """Tensors with non-finite gradients in the present run, and how often."""
        self._modules: list[weakref.ref[Module]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_modules": []}  # a weak reference cannot be pickled

    def know(self, module: Module) -> None:
        """Take parameter names from this module (held weakly)."""
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))

    def note(self, source: Optimizer | Tensor, consecutive_skips: int) -> None:
        """Look for the offenders, if this overflow is the one that ends the run.

        Reads every gradient, so only where an error is about to name them.
        """
        if self.limit is not None and consecutive_skips >= self.limit:
            optimizer = None if isinstance(source, Tensor) else source
            params = [source] if isinstance(source, Tensor) else parameters_of(source)
            self.count(self.names(filter(has_nonfinite_gradient, params), optimizer))

    def count(self, names: Iterable[str]) -> None:
        """Remember offenders that a check came across anyway."""
        for name in names:
            self.seen[name] = self.seen.get(name, 0) + 1

    def names(self, params: Iterable[Tensor], optimizer: Optimizer | None = None) -> list[str]:
        """A name for each parameter: the module's, the optimizer's, or its place and shape."""
        found: dict[int, str] = {}
        wanted = {id(p): p for p in params}
        if not wanted:
            return []
        for module in filter(None, (ref() for ref in self._modules)):
            for name, p in module.named_parameters():
                if id(p) in wanted:
                    found.setdefault(id(p), name)
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

    def raise_if_over(self, consecutive_skips: int, get_scale: Callable[[], float]) -> None:
        """End the run: raise once more than ``limit`` windows in a row were skipped."""
        if consecutive_skips == 0:
            self.seen.clear()
        if self.limit is None or consecutive_skips <= self.limit:
            return
        worst = sorted(self.seen, key=lambda name: -self.seen[name])
        more = f" and {len(worst) - MOST_NAMES} more" if len(worst) > MOST_NAMES else ""
        named = ", ".join(worst[:MOST_NAMES]) + more if worst else "unknown tensors"
        self.seen.clear()
        raise OverflowStreakError(
            f"{consecutive_skips} windows in a row overflowed, max_consecutive_skips="
            f"{self.limit} allows {self.limit}. Non-finite gradients in: {named}. The scale is "
            f"now {get_scale():g}; parameters are as before the run. If the loss itself is NaN or "
            "inf, look there first; if one layer overflows, run that layer in float32; if the "
            "scale was still falling, lower init_scale or raise max_consecutive_skips."
        )


def first_nonfinite(optimizer: Optimizer) -> list[Tensor]:
    """Some parameters with a non-finite gradient, small ones first: few, to keep a skip cheap."""
    by_size = sorted(parameters_of(optimizer), key=lambda p: p.numel())
    return list(islice((p for p in by_size if has_nonfinite_gradient(p)), MOST_NAMED))
