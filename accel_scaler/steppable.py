"""Which optimizers another thread can step, part by part or at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from .config import UnsupportedError
from .gradients import parameters_of

__all__ = [
    "attributes_of_every_optimizer",
    "is_splittable",
    "raw_step",
    "refuse_unshardable",
    "refuse_unsteppable",
]

_BY_PARAMETER = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
"""torch's optimizers whose step treats each parameter alone."""

_OTHERS_BY_PARAMETER = {"transformers.optimization.Adafactor"}

_BY_MATRIX = {"Adafactor", "Muon"}
"""Of these, the ones that a shard is not enough for."""


@cache
def attributes_of_every_optimizer() -> frozenset[str]:
    """What torch itself puts on an instance. Not at import: the first optimizer loads dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "param_groups"}


def raw_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without torch's wrapper that runs hooks, which are the main thread's."""
    step: Any = cls.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    result: Callable[..., Any] = step
    return result


def is_splittable(optimizer: Optimizer) -> bool:
    """Whether stepping some parameters, then the others, is the same as stepping all."""
    step = raw_step(type(optimizer))
    for cls in type(optimizer).__mro__:
        # Adafactor and Muon say that they are of torch.optim itself.
        of_torch = f"{cls.__module__}.".startswith("torch.optim.")
        known = of_torch and cls.__name__ in _BY_PARAMETER
        if known or f"{cls.__module__}.{cls.__qualname__}" in _OTHERS_BY_PARAMETER:
            return raw_step(cls) is step
    return False


def refuse_unsteppable(optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` for optimizers that no other thread can step."""
    name = type(optimizer).__name__
    closure = inspect.signature(raw_step(type(optimizer))).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{name}.step() needs a closure, which runs forward and backward inside the step; "
            "that cannot run beside them. Use step_mode='sync' without offload."
        )
    own = set(map(id, parameters_of(optimizer)))
    for key, value in vars(optimizer).items():
        if key in attributes_of_every_optimizer():
            continue
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, Optimizer) or id(item) in own for item in items):
            raise UnsupportedError(
                f"{name} keeps parameters or another optimizer in its attribute {key!r}, so "
                "another thread cannot step a copy of it. Use step_mode='sync' without offload."
            )


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` where a step on this rank's shards alone is not the same."""
    by_matrix = not _BY_MATRIX.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__)
    if is_splittable(optimizer) and not by_matrix:
        return
    if any(hasattr(p, "to_local") for p in parameters_of(optimizer)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} may need more of a sharded parameter than this rank's "
            "shard, and so communicate in its step; collectives stay on the training thread. Use "
            "step_mode='sync' without offload, without AsyncOptimizer; or an elementwise "
            "optimizer such as AdamW."
        )
