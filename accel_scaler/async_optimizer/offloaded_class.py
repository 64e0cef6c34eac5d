"""Torch optimizer classes whose state rests in host memory, for code that takes a class."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ..config import checked
from ..devices import warn_where_idle
from ..errors import ConfigError, shown
from ..models import untraced
from ..optimizer_step import MasterRule, master_rule, refuse_class
from ..scaling import parameters_of
from .optimizer import AsyncOptimizer

T = TypeVar("T", bound=Optimizer)


class _Offloaded(AsyncOptimizer):
    """An ``AsyncOptimizer`` with ``offload="cpu"`` that takes the arguments of a torch class, and
    whose parameters may be moved to the device after it was made."""

    def _rule(self, device: torch.device) -> MasterRule:
        # Which of them are on a device is asked again when one has moved.
        return replace(master_rule(self._config, device), on_host=True)

    @untraced
    def step(self, closure: Any = None) -> Any:
        """As :meth:`AsyncOptimizer.step`."""
        if self._stepper.steps == 0:
            warn_where_idle("sync", "cpu", parameters_of(self.optimizer)[0].device)
        return super().step(closure)

    __repr__ = Optimizer.__repr__


def offloaded(
    cls: type[T], model: Module | None = None, *, offload_budget: int | str = "auto"
) -> type[T]:
    """A subclass of the torch optimizer ``cls`` whose state rests in host memory; each step streams
    it through the device and runs ``cls.step()`` there, with the same numbers, bit for bit.

    >>> Trainer(..., optimizer_cls_and_kwargs=(offloaded(torch.optim.AdamW), {"lr": 1e-5}))
    >>> optimizer = offloaded(torch.optim.AdamW)(model.parameters(), lr=1e-5)   # a plain loop

    For code that takes a class, or has no accelerator to ``attach`` to. It neither checks nor
    scales, so it is used as ``cls`` is: with torch's scaler and clip, schedulers, closures,
    ``state_dict`` in torch's layout and back. float16 and bfloat16 parameters are stepped through
    float32 masters, as ``master_weights="fp32"`` does. It may be made before the model is moved to
    its device.

    Args:
        cls: an elementwise optimizer of torch.
        model: the model that is trained. If given, state comes up early, in the backward before the
            step, in memory that the run leaves below its own peak; else within the step alone.
        offload_budget: ``"auto"``, or how much of it stays on the device: ``"6GiB"``, or bytes.

    Raises:
        ConfigError: no optimizer class, no module, or a wrong budget.
        UnsupportedError: an optimizer whose step does not treat each element alone; or, when one is
            made, ``capturable`` or ``differentiable``, or parameters that cannot be offloaded.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        given = shown(cls) if isinstance(cls, type) else f"an instance of {type(cls).__name__}"
        raise ConfigError(f"offloaded: got {given}, expected a class such as torch.optim.AdamW.")
    if model is not None and not isinstance(model, Module):
        raise ConfigError(
            f"offloaded: got a {type(model).__name__} as model, expected a torch.nn.Module. "
            f"Parameters are given to the class: offloaded({cls.__name__})(model.parameters())."
        )
    refuse_class(cls)
    budget = checked("offload_budget", offload_budget)

    @wraps(cls.__init__)
    def make(self: _Offloaded, *args: Any, **kwargs: Any) -> None:
        inner = cls(*args, **kwargs)
        AsyncOptimizer.__init__(
            self, inner, model, step_mode="sync", offload="cpu", offload_budget=budget
        )

    members = {"__init__": make, "__module__": __name__, "__doc__": cls.__doc__}
    return cast("type[T]", type(f"Offloaded{cls.__name__}", (_Offloaded, cls), members))
