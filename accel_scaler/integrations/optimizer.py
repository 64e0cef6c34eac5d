"""The prepared optimizer, whose step goes through the boundary of its accelerator."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from ..async_optimizer import AsyncStepper, drop_gradients
from ..errors import UnsupportedError
from ..models import untraced
from ..optimizer_step import (
    DroppedBatches,
    ReplicaStepper,
    async_stepper_of,
    holds_masters,
    is_splittable,
    refuse_unsteppable,
    stepper_of,
)
from ..scaling import parameters_of, stepped

if TYPE_CHECKING:
    from .attachment import Attachment

logger = logging.getLogger("accel_scaler")


class ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """``AcceleratedOptimizer`` whose ``step`` goes through the accelerator's boundary.

    ``step_was_skipped`` is right for every optimizer, also a fused one, at the cost of one
    synchronisation a step.
    """

    _attachment: Attachment
    _stepper: ReplicaStepper | None = None

    def join(self, attachment: Attachment, stepper: ReplicaStepper | None) -> None:
        """Step through the attachment's boundary from now on, with ``stepper`` if need be."""
        # Another accelerator that had prepared this optimizer gives it up.
        self.__dict__.get("_attachment", attachment).optimizers.discard(self)
        self._attachment, self._stepper = attachment, stepper or self._stepper
        self.dropped = DroppedBatches()
        self.scaler = attachment.scaler if attachment.scales else None
        attachment.optimizers.add(self)
        attachment.boundary.add(self)

    def leave(self, attachment: Attachment) -> None:
        """Become Accelerate's again. Raises ``StepError`` if the step in flight failed, after
        everything was removed."""
        stepper = self._stepper
        attachment.optimizers.discard(self)
        attachment.scaler.release(self.stepped_optimizer)
        for name in ("_attachment", "_stepper", "dropped"):
            self.__dict__.pop(name, None)
        try:
            if stepper is not None:
                stepper.close()
        finally:
            # Without a scaler Accelerate never resets the flag of a skip.
            self.scaler, self._is_overflow = attachment.stock_scaler, False
            _change_class(self, AcceleratedOptimizer)

    @property
    def stepped_optimizer(self) -> Optimizer:
        """The torch optimizer inside, under which windows know this one."""
        return inner_of(self)[0]

    @property
    def state(self) -> Any:
        """The torch optimizer's state, after :meth:`synchronize`."""
        self.synchronize()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "a prepared optimizer cannot be copied or pickled; save its state_dict(), or call "
            "detach(accelerator) first."
        )

    @untraced
    def synchronize(self) -> None:
        """Wait for the step in flight. Saving, loading and evaluation wait by themselves; other
        reads that torch does not see need this call before them."""
        stepper_of(self).synchronize()

    def follow_parameters(self, frozen_too: bool = False) -> None:
        """Step through masters from now on if a trained parameter needs one. ``frozen_too``: or a
        frozen one, since masters are about to be loaded."""
        attachment, inner = self._attachment, self.stepped_optimizer
        if _needs_replica(inner, attachment, frozen_too):
            adopt(self, attachment, frozen_too)
            attachment.make_ready([self])

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """As Accelerate's, after :meth:`synchronize`; on any thread."""
        with stepper_of(self).still():
            return super().state_dict()  # type: ignore[no-any-return]

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Accelerate's; masters in it are loaded where parameters need them now."""
        self.follow_parameters(frozen_too=holds_masters(state_dict))
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As Accelerate's: in a window's last micro-batch only."""
        if self.gradient_state.sync_gradients:
            self.dropped.zero_grad(self.stepped_optimizer)
            if not (set_to_none in (None, True) and drop_gradients(self.optimizer)):
                super().zero_grad(set_to_none)

    @untraced
    def step(self, closure: Any = None) -> None:
        """At a boundary check, update the scale, step or skip; elsewhere do nothing."""
        attachment = self._attachment
        if not self.gradient_state.sync_gradients:
            return  # Accelerate's looks for a package on disk first
        if closure is not None and self.scaler is None:  # as stock, and not recorded
            super().step(closure)
            return
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure): a closure would run backward again inside the step, "
                "with another scale. Call step() without one, or train without fp16."
            )
        attachment.boundary.name_mistake(self.dropped.step(self.stepped_optimizer))
        known = attachment.scaler.window.known(self.stepped_optimizer)
        if known is None or known.gathered is None:  # else they were followed before a clip
            self.follow_parameters()
        if (stepper := self._stepper) is not None:
            for model in attachment.models:
                stepper.watch(model)
        self._is_overflow = True  # where it raises
        self._is_overflow = not attachment.boundary.step(self)


def adopt(optimizer: Any, attachment: Attachment, frozen_too: bool = False) -> None:
    """Make a prepared optimizer step through the attachment's boundary. ``frozen_too``: as for
    :meth:`ScaledOptimizer.follow_parameters`."""
    inner, masters, worker = inner_of(optimizer)[0], attachment.masters, attachment.worker
    stepper: ReplicaStepper | None = None
    if _needs_replica(inner, attachment, frozen_too):
        names = attachment.scaler.parameter_names
        if attachment.steps_beside and is_splittable(inner):
            stepper = AsyncStepper(inner, masters, "overlap", worker=worker, parameter_names=names)
        else:
            stepper = ReplicaStepper(inner, masters, parameter_names=names)
    elif attachment.config.step_mode == "overlap" and not is_splittable(inner):
        logger.warning(
            "%s is stepped inside optimizer.step(), not in parallel with forward and backward: it "
            "is not one of torch's optimizers that step each parameter independently",
            type(inner).__name__,
        )
    _change_class(optimizer, ScaledOptimizer)
    optimizer.join(attachment, stepper)


def _needs_replica(inner: Optimizer, attachment: Attachment, frozen_too: bool = False) -> bool:
    if async_stepper_of(inner) is not None:
        return False
    if attachment.masters.on_host or (attachment.steps_beside and is_splittable(inner)):
        return True
    # No Python loop, since each backward asks. float16 counts without masters, to be refused.
    params, dtype_of = parameters_of(inner), attrgetter("dtype")
    low = attachment.masters.dtypes | {torch.float16}
    if low.isdisjoint(map(dtype_of, params)):
        return False
    trained = filter(attrgetter("requires_grad"), params)
    return frozen_too or not low.isdisjoint(map(dtype_of, trained))


def _change_class(optimizer: Any, cls: Any) -> None:
    """Change the class, also in the wrapper of ``step`` that an LR scheduler has put on the
    instance."""
    optimizer.__class__ = cls
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):

        @wraps(cls.step)
        def counted(*args: Any, **kwargs: Any) -> None:
            optimizer._opt_called = True
            cls.step(optimizer, *args, **kwargs)

        cast(Any, counted)._wrapped_by_lr_sched = True
        optimizer.step = counted


def refuse_unsuitable(optimizers: Iterable[Optimizer], attachment: Attachment) -> None:
    """Raise ``UnsupportedError`` for an optimizer, prepared or not, that cannot be adopted. Changes
    nothing."""
    own = (AcceleratedOptimizer, ScaledOptimizer)
    for optimizer in optimizers:
        if isinstance(optimizer, AcceleratedOptimizer) and type(optimizer) not in own:
            raise UnsupportedError(
                f"attach: a prepared optimizer is a {type(optimizer).__name__}, expected "
                "Accelerate's own AcceleratedOptimizer; prepare the torch optimizer instead."
            )
        (inner,) = inner_of(optimizer)
        if _needs_replica(inner, attachment):
            refuse_unsteppable(inner, attachment.masters)


def inner_of(optimizers: Any) -> list[Optimizer]:
    """The torch optimizers inside a prepared optimizer, or inside a list of them."""
    found = []
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        found.append(stepped(optimizer))
    return found
