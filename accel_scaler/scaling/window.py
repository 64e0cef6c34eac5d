"""Accumulation windows: one object holds all that is known of one."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from ..errors import OrderError
from .grad_norms import GradNorms
from .gradients import has_nonfinite_gradient, nonzero, parameters_of
from .losses import Losses
from .origin import Origin
from .update_rule import ScaleState

HOST = torch.device("cpu")

UNSCALED = "sat out the window before with gradients in it, which are unscaled"
"""A reason of ``OptimizerRecord.carried_over``; an error puts the optimizer's name before it."""


def stepped(optimizer: Any) -> Any:
    """The torch optimizer inside this package's wrappers of it: the key of its record."""
    while (inner := getattr(optimizer, "stepped_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class Snapshot:
    """Which gradients these parameters had, and their versions, to see what has changed since. An
    edit through ``.grad.data`` has no new version, so it is not seen."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor | None, int]] = {}
        self.renew(parameters)

    def renew(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of these as they are now; what is known of others stays."""
        self._entries |= {
            id(p): (p, g := p.grad, 0 if g is None else g._version) for p in parameters
        }

    @property
    def is_zero(self) -> bool:
        """Every gradient is gone or zero. Synchronises with the device."""
        return not any(nonzero(grad) for _, grad, _ in self._entries.values() if grad is not None)

    def is_changed(self, some: Iterable[Tensor] | None = None) -> bool:
        """Whether any gradient of ``some`` (None: all) is another tensor, or was written to, since.
        One that was dropped is not changed."""
        known = self._entries
        keys = known if some is None else [key for p in some if (key := id(p)) in known]
        return any(
            (now := p.grad) is not None and (now is not grad or now._version != version)
            for p, grad, version in map(known.__getitem__, keys)
        )


@dataclass(slots=True)
class DeferredUnscale:
    """What finite gradients are still to be multiplied by in the update. All tensors are float32,
    shape ()."""

    multiply: Tensor | None = None
    """The reciprocal of the scale, times the coefficient of a clip of all. None: nothing is due."""
    clips: dict[int, Tensor] = field(default_factory=dict)
    """Further coefficients, by the ``id`` of the clipped parameter."""

    def __bool__(self) -> bool:
        return self.multiply is not None

    def clip(self, parameters: Iterable[Tensor], coefficient: Tensor) -> None:
        """Multiply the gradients of ``parameters`` by ``coefficient``, too."""
        # What was clipped together before still has one coefficient.
        products: dict[Tensor | None, Tensor] = {None: coefficient}
        for p in parameters:
            before = self.clips.get(id(p))
            if before is not None and before not in products:
                products[before] = before * coefficient
            self.clips[id(p)] = products[before]

    def factors(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The product of all factors for the gradient of each of ``parameters``."""
        common = self.multiply
        if common is None:
            common = torch.ones((), dtype=torch.float32, device=HOST)
        if not self.clips or not parameters:
            return [common] * len(parameters)
        one = torch.ones_like(common)
        clips = [self.clips.get(id(p), one) for p in parameters]
        return list((torch.stack(clips) * common).unbind())

    def apply(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Multiply in place; ``gradients`` are pairs of a parameter and its gradient."""
        if not gradients or not self:
            return
        grads = [grad for _, grad in gradients]
        if self.multiply is not None and not self.clips:
            torch._foreach_mul_(grads, self.multiply)
        else:
            torch._foreach_mul_(grads, self.factors([p for p, _ in gradients]))


class OptimizerRecord(dict[str, Any]):
    """All that is known of one optimizer in one window, whichever call put it there. Its two items
    are torch's: ``stage``, and ``found_inf_per_device`` of the last check."""

    def __init__(self) -> None:
        super().__init__(_refresh_per_optimizer_state())
        self.owner: weakref.ref[Any] | None = None
        """The torch optimizer; None: torch's own code made the record."""
        self.verdict: bool | None = None
        """Whether this optimizer's gradients overflowed, on any rank; None: not agreed yet."""
        self.is_caught = False
        """It was clipped together with another optimizer's gradients, which have overflowed."""
        self.count: int | None = None
        """The number of its parameters when they were unscaled or checked."""
        self.carried_over = ""
        """Why nothing may be added to its gradients from before the window; "": it may."""
        self.is_carried = False
        """It has gradients from before the window, rescaled to the scale of this one."""
        self.deferred = DeferredUnscale()
        """What is left to the update: the gradients are still scaled, or not clipped."""
        self.returned: Snapshot | None = None
        """Gradients as a clip gave them back to the caller, with something still deferred."""
        self.unscaled_before: Snapshot | None = None
        """Gradients that were already unscaled when another loss was scaled."""
        self.looked_at: Snapshot | None = None
        """Without scaling: gradients as they were checked, since a change needs no call of ours."""
        self.edited_norm: float | None = None
        """Its unscaled norm where the scaled gradients were written to after the backward."""
        self.norm: float | None = None
        """The unscaled norm of its gradients on all ranks, before a clip, once it was asked for."""
        self.is_spike = False
        """Whether that norm is above ``skip_norm_above``."""
        self.overflowed: Sequence[Tensor] = ()
        """Some parameters with non-finite gradients."""
        self.names: Sequence[str] = ()
        """Their names, once the optimizer was skipped."""

    stage = property(itemgetter("stage"), lambda record, stage: record.update(stage=stage))
    """How far this optimizer has come in the window: an ``OptState``."""

    def decide(self, verdict: bool) -> None:
        """Set the verdict that every rank has."""
        self.verdict = verdict
        # torch's methods read this: above 0 is an overflow. To read a host number never waits.
        self["found_inf_per_device"] = {
            HOST: torch.full((), float(verdict), dtype=torch.float32, device=HOST)
        }

    def let_go(self) -> None:
        """Drop every parameter and gradient."""
        self.returned = self.unscaled_before = self.looked_at = None
        self.overflowed = ()

    def forbid_mixture(self, name: str, some: Iterable[Tensor] | None = None) -> None:
        """Raise ``OrderError``, with the optimizer's ``name``, where the gradients (of ``some``;
        None: of all parameters) are not all of the window's own scale, or were changed since the
        caller got them back scaled."""
        if self.carried_over:
            raise OrderError(
                f"{name} {self.carried_over}; the present ones were added to them. Step every "
                "optimizer that has gradients, or zero them before the next backward; now zero "
                "them to go on."
            )
        if self.unscaled_before is not None and self.unscaled_before.is_changed(some):
            raise OrderError(
                "a backward added scaled gradients to the unscaled ones of "
                f"{name}: they were unscaled or clipped before the last micro-batch. Accumulate "
                "under `with accelerator.accumulate(model):`, or clip only after the last "
                "backward; then zero the gradients and go on."
            )
        if self.returned is not None and self.returned.is_changed(some):
            raise OrderError(
                f"the gradients of {name} were changed after they were clipped, while they still "
                "are scaled for float32 masters, so the change would be scaled too. Change them "
                "before clip_grad_norm_, with what is added multiplied by "
                "accelerator.scaler.get_scale(); or load the model in float32. Zero the gradients "
                "to go on."
            )

    @property
    def is_skipped(self) -> bool:
        """Its step is left out."""
        return self.found_inf or self.is_spike

    @property
    def is_bad(self) -> bool:
        """It is decided that its gradients cannot be stepped."""
        return self.is_caught or bool(self.verdict)

    @property
    def found_inf(self) -> bool:
        """Its gradients cannot be stepped: the verdict on them, or on what was clipped together
        with them; before the ranks have agreed, this rank's. May synchronise."""
        if self.is_caught or self.verdict is not None:
            return self.is_bad
        return any(bool(flag) for flag in self["found_inf_per_device"].values())


class Window:
    """One accumulation window: its scale, and each optimizer's progress in it. It opens with the
    first ``scale()`` after a step. Each entry point reads and writes this object, and the next
    window is a new one. Where nothing is scaled its scale is 1."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.opened_by: int | None = None
        """``threading.get_ident()`` of the thread that opened it; None: it is not open yet."""
        self.scale: Tensor | None = None
        """The window's own scale once it may outlive the scaler's current one."""
        self.states: defaultdict[int, OptimizerRecord] = defaultdict(OptimizerRecord)
        """Under the ``id`` of each optimizer, and of each wrapper of it that was used."""
        self.unscaled: set[int] = set()
        """``id`` of parameters whose gradients were unscaled in place."""
        self.owners: tuple[object, dict[int, list[int]]] | None = None
        """See :meth:`.OverflowCheck.owners`."""
        self.losses = Losses()
        self.bad_losses: int | None = None
        """How many losses of all ranks were inf or NaN, once they have told each other."""
        self.versions: dict[int, int | None] = {}
        """``first_version`` of each optimizer after the last backward, by its ``id``."""
        self.grad_norms = GradNorms()
        self.clipped_values = False
        """Elements of some gradients were clipped: how large they were is not known."""
        self.before: ScaleState | None = None
        """The state from which the boundary has updated the scale; None: it has not yet."""
        self.found_inf = False
        self.is_spike = False
        """The norm of an optimizer's gradients was above ``skip_norm_above``."""
        self.origin: Origin | None = None
        """Where its overflow began, if an observer has found out."""
        self.healed: tuple[str, ...] = ()
        """Modules that run in float32 since its overflow."""
        self.first_scale: float | None = None
        """The scale at which its gradients overflowed, before they were made again."""
        self.retries = 0
        """How often its gradients were made again."""
        self.retry_s = 0.0
        """How long the attempts took, in seconds of host time."""
        self.sealed = False
        """It belongs to a job: its verdict is known, no other optimizer may join."""
        self.wrappers: dict[int, Optimizer] = {}
        """In a job: by the ``id`` of a torch optimizer what the job was bound with for it."""

    @property
    def is_skipped(self) -> bool:
        """At least one optimizer was not stepped."""
        return self.found_inf or self.is_spike

    @property
    def closed(self) -> bool:
        """An optimizer has stepped; only further optimizers may still step in it."""
        return self.before is not None

    def record(self, optimizer: Optimizer) -> OptimizerRecord:
        """What is known of ``optimizer`` and its wrappers; made if it is new."""
        inner = stepped(optimizer)
        if self.known(inner) is None and id(inner) in self.states:
            gone = self.states.pop(id(inner))  # another one had this address; its verdict counts
            self.states[id(gone)] = gone
        found = self.states[id(inner)]
        found.owner = weakref.ref(inner)
        self.states[id(optimizer)] = found
        return found

    def known(self, optimizer: Optimizer) -> OptimizerRecord | None:
        """:meth:`record` if there is one."""
        inner = stepped(optimizer)
        found = self.states.get(id(inner))
        is_of_another = found is not None and found.owner is not None and found.owner() is not inner
        return None if is_of_another else found

    def unscaled_among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``parameters`` whose gradients were unscaled in place already."""
        if not self.unscaled:
            return []
        return [p for p in parameters if id(p) in self.unscaled and p.grad is not None]

    def let_go(self) -> None:
        """Drop every parameter and gradient: the window is over."""
        self.grad_norms = GradNorms()
        for record in self.states.values():
            record.let_go()

    def carried_over(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, str]]:
        """When it ends: those of ``optimizers`` that have not stepped in it, and why nothing may be
        added to gradients that they still have; "" where these are scaled by its scale."""
        left = [each for each in optimizers if not self._is_done(each)]
        # What was stepped is unscaled for every other optimizer, too.
        done = [each for each in optimizers if each not in left] if left else []
        others = self.unscaled.union(id(p) for each in done for p in parameters_of(each))
        for optimizer in left:
            record = self.record(optimizer)
            mixed = [p for p in parameters_of(optimizer) if id(p) in others]
            is_scaled = record.stage is not OptState.UNSCALED and Snapshot(mixed).is_zero
            yield optimizer, record.carried_over or ("" if is_scaled else UNSCALED)

    def _is_done(self, optimizer: Optimizer) -> bool:
        record = self.known(optimizer)
        if record is None or record.stage is not OptState.STEPPED:
            return False
        # What is added to gradients that are not finite is skipped again.
        return not record.found_inf or any(map(has_nonfinite_gradient, parameters_of(optimizer)))

    def for_job(self, optimizers: Iterable[Optimizer], scale: float) -> Window:
        """A job's own window: what is known here of ``optimizers``, in host numbers."""
        own = Window(self.index)
        own.opened_by, own.sealed, own.unscaled = self.opened_by, True, set(self.unscaled)
        own.scale = torch.full((), scale, dtype=torch.float32, device=HOST)
        for optimizer in optimizers:
            own.wrappers[id(stepped(optimizer))] = optimizer
            known, record = self.record(optimizer), own.record(optimizer)
            record.stage, record.count = known.stage, known.count
            record.decide(known.found_inf)
        return own

    def forget(self, optimizer: Optimizer) -> None:
        """Forget what is known of ``optimizer``, whose gradients were dropped or changed."""
        gone = self.known(optimizer)
        self.states = defaultdict(
            OptimizerRecord, {key: r for key, r in self.states.items() if r is not gone}
        )
        params = parameters_of(optimizer)
        self.grad_norms.forget(params)
        self.unscaled.difference_update(map(id, params))
