"""The prepared optimizer: its step goes through the accelerator's boundary, perhaps to a worker."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from ..async_optimizer import (
    SyncHooks,
    make_stepper,
    refuse_sharing,
    refuse_spread,
    refuse_unsteppable,
)
from ..config import ScalerConfig
from ..errors import UnsupportedError
from ..optimizer_step import Boundary, async_stepper_of, stepper_of
from ..scaling import stepped
from .stock_scaler import has_fp16

__all__ = [
    "ScaledOptimizer",
    "adopt",
    "become",
    "forbid_sharing",
    "forbid_unsuitable",
    "inner_of",
]


class ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """``AcceleratedOptimizer`` whose ``step`` goes through the accelerator's boundary.

    ``step_was_skipped`` is right for every optimizer, fused ones too, at the cost of one
    synchronisation a step.
    """

    _boundary: Boundary | None = None
    _hooks: SyncHooks | None = None
    _models: ModelsOf | None = None

    @property
    def stepped_optimizer(self) -> Optimizer:
        """The torch optimizer in it, under whose name a window knows it."""
        (inner,) = inner_of(self)
        return inner

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        state: dict[str, Any] = super().__getstate__()
        # A copy steps like stock, with its own copy of the scaler: windows are the accelerator's.
        for name in ("_boundary", "_hooks", "_models"):
            state.pop(name, None)
        return state

    def synchronize(self) -> None:
        """Wait for the step in hand, if any, and publish it: for code that reads parameters.

        Saving, loading and evaluating do this by themselves.
        """
        stepper_of(self).synchronize()

    def train(self) -> None:
        """As Accelerate's (schedule-free optimizers), with finished parameters."""
        if hasattr(self.optimizer, "train"):  # the Trainer calls this before every forward
            self.synchronize()
        super().train()

    def eval(self) -> None:
        """As Accelerate's (schedule-free optimizers), with finished parameters."""
        if hasattr(self.optimizer, "eval"):
            self.synchronize()
        super().eval()

    def follow_parameters(self) -> None:
        """Step through masters from now on, where a float16 parameter is trained that was not."""
        accelerator = None if self._models is None else self._models.accelerator
        if accelerator is not None and _needs_async_stepper(
            self.stepped_optimizer, accelerator._scaler_config
        ):
            adopt(accelerator, self)

    def state_dict(self) -> dict[str, Any]:
        """As Accelerate's, after :meth:`synchronize`; on any thread."""
        with stepper_of(self).still():
            state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Accelerate's; the masters in it are taken where parameters need them by now."""
        self.follow_parameters()
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        """At a boundary: check, update the scale, step or skip. Elsewhere: nothing."""
        as_stock = closure is not None and self.scaler is None  # nothing scaled, not recorded
        if self._boundary is None or not self.gradient_state.sync_gradients or as_stock:
            super().step(closure)
            return
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure): a closure would run backward again inside the step, "
                "with another scale. Call step() without one, or train without fp16."
            )
        has_stepped = False
        self.follow_parameters()
        if self._hooks is not None and self._models is not None:
            self._hooks.watch(self._models())
        try:
            has_stepped = self._boundary.step(self)
        finally:
            self._is_overflow = not has_stepped


def adopt(accelerator: Any, optimizer: Any) -> None:
    """Make a prepared optimizer step through the accelerator's boundary."""
    forbid_unsuitable(optimizer, accelerator._scaler_config)
    forbid_sharing([optimizer], accelerator._scaler_config)
    boundary: Boundary = accelerator._boundary
    hooks = _give_stepper(accelerator, optimizer)
    become(optimizer, ScaledOptimizer)
    optimizer.scaler = accelerator.scaler
    optimizer._boundary = boundary
    optimizer._models = ModelsOf(accelerator)
    if hooks is not None:
        optimizer._hooks = hooks
    boundary.adopted.add(optimizer)
    boundary.add(optimizer, accelerator._scaler_config.fold_unscale)


def _give_stepper(accelerator: Any, optimizer: Any) -> SyncHooks | None:
    """An async one where the step is not simply the optimizer's own; None: it is, or has one."""
    config, inner = accelerator._scaler_config, inner_of(optimizer)[0]
    if not _needs_async_stepper(inner, config):
        return getattr(optimizer, "_hooks", None)
    boundary = accelerator._boundary
    parameter_names = boundary.scaler.parameter_names
    stepper = make_stepper(inner, config, accelerator._worker, accelerator.device, parameter_names)
    return SyncHooks(stepper)


def _needs_async_stepper(inner: Optimizer, config: ScalerConfig) -> bool:
    if async_stepper_of(inner) is not None:
        return False
    return config.step_mode != "sync" or config.offload != "none" or has_fp16(inner)


class ModelsOf:
    """The models that an accelerator has prepared, without keeping it alive."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = weakref.ref(accelerator)

    @property
    def accelerator(self) -> Any:
        """None: it is gone."""
        return self._accelerator()

    def __call__(self) -> list[torch.nn.Module]:
        accelerator = self.accelerator
        return [] if accelerator is None else list(accelerator._models)


def become(optimizer: Any, cls: Any) -> None:
    """Change the class; an LR scheduler's wrapper on the instance then calls that one's step."""
    optimizer.__class__ = cls
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):

        @wraps(cls.step)
        def counted(*args: Any, **kwargs: Any) -> None:
            optimizer._opt_called = True
            cls.step(optimizer, *args, **kwargs)

        cast(Any, counted)._wrapped_by_lr_sched = True
        optimizer.step = counted


def forbid_unsuitable(optimizer: Any, config: ScalerConfig) -> None:
    """Raise ``UnsupportedError``, before anything is changed, for what cannot be adopted."""
    if type(optimizer) not in (AcceleratedOptimizer, ScaledOptimizer):
        raise UnsupportedError(
            f"attach: a prepared optimizer is a {type(optimizer).__name__}, expected Accelerate's "
            "own AcceleratedOptimizer; prepare the torch optimizer instead."
        )
    inner = inner_of(optimizer)[0]
    if _needs_async_stepper(inner, config):
        offload = config.offload != "none"
        inline = config.step_mode == "sync" and not offload
        refuse_unsteppable(
            inner,
            masters=offload or config.step_mode == "delayed" or has_fp16(inner),
            inline=inline,
        )
        if not inline:
            refuse_spread(inner)


def forbid_sharing(optimizers: Iterable[Any], config: ScalerConfig) -> None:
    """Raise ``UnsupportedError``, before anything is changed, for two that may not share."""
    inner = [inner_of(optimizer)[0] for optimizer in optimizers]
    refuse_sharing(
        [(each, config.step_mode) for each in inner if _needs_async_stepper(each, config)]
    )


def inner_of(optimizers: Any) -> list[Optimizer]:
    """The torch optimizers inside one, or a list of, prepared ones."""
    found = []
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        found.append(stepped(optimizer))
    return found
