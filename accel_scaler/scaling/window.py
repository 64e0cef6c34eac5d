"""Accumulation windows: one object for each, with everything known of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim import Optimizer

from ..errors import OrderError
from .checks import SentCheck
from .grad_norms import GradNorms
from .gradients import Gathered, nonzero, parameters_of
from .losses import Losses
from .origin import Origin
from .update_rule import ScaleState

HOST = torch.device("cpu")


def stepped(optimizer: Any) -> Any:
    """The torch optimizer inside this package's wrappers; a window's record belongs to it."""
    while (inner := getattr(optimizer, "stepped_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class Snapshot:
    """The gradients that some parameters had, and their versions, to see later changes. An edit
    through ``.grad.data`` makes no new version, so it is not seen."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor | None, int]] = {}
        self.renew(parameters)

    def renew(self, parameters: Iterable[Tensor]) -> None:
        """Take the present gradients of these parameters; the entries of others stay."""
        self._entries |= {
            id(p): (p, g := p.grad, 0 if g is None else g._version) for p in parameters
        }

    @property
    def is_zero(self) -> bool:
        """Every gradient is gone or zero. Synchronises with the device."""
        return not any(nonzero(grad) for _, grad, _ in self._entries.values() if grad is not None)

    @property
    def is_changed(self) -> bool:
        """Whether any parameter has another gradient now, or the same one after a write. A dropped
        gradient is no change."""
        return any(
            (now := p.grad) is not None and (now is not grad or now._version != version)
            for p, grad, version in self._entries.values()
        )


@dataclass(slots=True)
class DeferredUnscale:
    """Factors by which the update still has to multiply finite gradients. All tensors are float32,
    shape ()."""

    multiply: Tensor | None = None
    """The reciprocal of the scale, times the coefficient of a clip of all. None: nothing is due."""
    clips: dict[int, Tensor] = field(default_factory=dict)
    """Further coefficients, by the ``id`` of the clipped parameter."""

    def __bool__(self) -> bool:
        return self.multiply is not None

    def clip(self, parameters: Iterable[Tensor], coefficient: Tensor) -> None:
        """Let the update multiply the gradients of ``parameters`` by ``coefficient``, too."""
        for p in parameters:
            before = self.clips.get(id(p))
            self.clips[id(p)] = coefficient if before is None else before * coefficient

    def factors(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """For each of ``parameters`` the product of all factors of its gradient."""
        assert self.multiply is not None, "nothing is due"
        if not self.clips or not parameters:
            return [self.multiply] * len(parameters)
        one = torch.ones_like(self.multiply)
        clips = [self.clips.get(id(p), one) for p in parameters]
        return list((torch.stack(clips) * self.multiply).unbind())

    def apply(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Multiply in place; ``gradients`` are pairs of a parameter and its gradient."""
        if not gradients or self.multiply is None:
            return
        grads = [grad for _, grad in gradients]
        factors = self.factors([p for p, _ in gradients]) if self.clips else self.multiply
        torch._foreach_mul_(grads, factors)


class OptimizerRecord(dict[str, Any]):
    """Everything known of one optimizer in one window, whichever call has found it. The two items
    are torch's: ``stage``, and ``found_inf_per_device`` of the last check."""

    def __init__(self) -> None:
        super().__init__(_refresh_per_optimizer_state())
        self.owner: ref[Any] | None = None
        """The torch optimizer; None where torch's own code has made the record."""
        self.agreed: bool | None = None
        """:attr:`verdict`, as far as it was read."""
        self.unread: SentCheck | None = None
        """The last check, while its outcome is left on the device."""
        self.is_caught = False
        """The optimizer was clipped together with gradients of another one, which overflowed."""
        self.carried_over: str | None = None
        """Why a backward may not add to gradients from before the window, after the optimizer's
        name; "": it may, they were rescaled. None: there are none."""
        self.gathered: Gathered | None = None
        """The gradients that the last check has read, perhaps with others."""
        self.deferred = DeferredUnscale()
        """The work left to the update: the gradients are still scaled, or not clipped."""
        self.returned: Snapshot | None = None
        """Gradients as a clip returned them to the caller, while some work was deferred."""
        self.unscaled_before: Snapshot | None = None
        """Gradients that were already unscaled when another loss was scaled."""
        self.looked_at: Snapshot | None = None
        """Gradients at their check, where nothing is scaled: a script may change them unseen."""
        self.norm: float | None = None
        """The unscaled norm over all ranks, before a clip, once it was asked for."""
        self.is_spike = False
        """The norm is above ``skip_norm_above``."""
        self.names: Sequence[str] = ()
        """Names of some parameters with non-finite gradients."""

    stage = property(itemgetter("stage"), lambda record, stage: record.update(stage=stage))
    """An ``OptState``: the gradients are as the backward left them, unscaled, or stepped."""

    @property
    def verdict(self) -> bool | None:
        """Whether the gradients overflowed on any rank; None before the ranks have agreed. Waits
        for the outcome of a check that was left on the device."""
        self.settle()
        return self.agreed

    def settle(self) -> None:
        """Wait for the outcome of a check that was left on the device, if there is one."""
        if self.unread is not None:
            self.unread.when_read(self.unread)

    def decide(self, verdict: bool) -> None:
        """Set the common verdict of all ranks."""
        self.agreed = verdict
        # torch's methods read this, where above 0 is an overflow. It is on the host: no read waits.
        flag = torch.full((), float(verdict), dtype=torch.float32, device=HOST)
        self["found_inf_per_device"] = {HOST: flag}

    def give_back(self, written: Iterable[Tensor] = ()) -> None:
        """The caller gets the gradients, some of them just ``written`` to: changes from now on are
        theirs. If the gradients are scaled, such changes are refused."""
        if self.returned is None and self.deferred:
            owner = None if self.owner is None else self.owner()
            self.returned = Snapshot(() if owner is None else parameters_of(owner))
        for kept in (self.returned, self.unscaled_before, self.looked_at):
            if kept is not None:
                kept.renew(written)

    def let_go(self) -> None:
        """Drop every parameter and gradient."""
        self.returned = self.unscaled_before = self.looked_at = None
        self.unread = self.gathered = None

    def forbid_mixture(self, name: str) -> None:
        """Raise ``OrderError``, with the optimizer's ``name``, where gradients have different
        scales, or a clip returned them scaled and the caller has changed them since."""
        if self.carried_over:
            raise OrderError(
                f"{name} {self.carried_over}; the present ones were added to them. Step every "
                "optimizer that has gradients, or zero them before the next backward; now zero "
                "them to go on."
            )
        if self.unscaled_before is not None and self.unscaled_before.is_changed:
            raise OrderError(
                "a backward added scaled gradients to the unscaled ones of "
                f"{name}: they were unscaled or clipped before the last micro-batch. Accumulate "
                "under `with accelerator.accumulate(model):`, or clip only after the last "
                "backward; then zero the gradients and go on."
            )
        if self.returned is not None and self.returned.is_changed:
            self.settle()
            if self.returned is None:  # after an overflow the clip has returned them as they were
                return
            raise OrderError(
                f"the gradients of {name} were changed after they were clipped, while they still "
                "are scaled for float32 copies (masters), so the change would be scaled too. "
                "Change them before clip_grad_norm_, with what is added multiplied by "
                "accelerator.scaler.get_scale(); or load the model in float32. Zero the gradients "
                "to go on."
            )

    @property
    def is_skipped(self) -> bool:
        """The optimizer does not step."""
        return self.found_inf or self.is_spike

    @property
    def is_bad(self) -> bool:
        """An overflow is certain, of these gradients or of others that were clipped with them."""
        return bool(self.verdict) or self.is_caught

    @property
    def found_inf(self) -> bool:
        """:attr:`is_bad`; before the ranks have agreed, this rank's finding. May synchronise."""
        if self.verdict is not None or self.is_caught:
            return self.is_bad
        return any(bool(flag) for flag in self["found_inf_per_device"].values())


class Window:
    """One accumulation window: its scale, and each optimizer's progress in it. It opens with the
    first ``scale()`` after a step. Every entry point reads and writes this object, and the next
    window is a new object. Where nothing is scaled the scale is 1."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.opened_by: int | None = None
        """``threading.get_ident()`` of the thread that opened the window; None before that."""
        self.scale: Tensor | None = None
        """The window's own scale, once the scaler's may differ."""
        self.states: defaultdict[int, OptimizerRecord] = defaultdict(OptimizerRecord)
        """Records by the ``id`` of each optimizer, and of each wrapper around it that was used."""
        self.unscaled: set[int] = set()
        """The ``id`` of each parameter whose gradient was unscaled in place."""
        self.losses = Losses()
        self.bad_losses: int | None = None
        """Losses of all ranks that were inf or NaN, once the ranks have exchanged their numbers."""
        self.versions: dict[int, int | None] = {}
        """``first_version`` after the last backward, by the ``id`` of each optimizer."""
        self.grad_norms = GradNorms()
        self.before: ScaleState | None = None
        """The scaler's state before the boundary updated it; None until then."""
        self.found_inf = False
        self.is_spike = False
        """The norm of an optimizer's gradients was above ``skip_norm_above``."""
        self.origin: Origin | None = None
        """The place where the overflow began, if an observer has found it."""
        self.healed: tuple[str, ...] = ()
        """Modules that run in float32 since this window's overflow."""
        self.first_scale: float | None = None
        """The scale at which gradients overflowed, before they were made again."""
        self.retries = 0
        """The number of times that gradients were made again."""
        self.retry_s = 0.0
        """Host time of these attempts, in seconds."""
        self.wrappers: dict[int, Optimizer] = {}
        """In a job's window alone: the optimizers given to ``bind``, by the ``id`` of the torch
        optimizer in each. No other optimizer can join."""

    @property
    def is_skipped(self) -> bool:
        """At least one optimizer was not stepped."""
        return self.found_inf or self.is_spike

    @property
    def closed(self) -> bool:
        """An optimizer has stepped; only further optimizers may still step in this window."""
        return self.before is not None

    def record(self, optimizer: Optimizer) -> OptimizerRecord:
        """The record of ``optimizer`` and its wrappers; made if it is new."""
        inner = stepped(optimizer)
        found = self.known(inner) or OptimizerRecord()
        found.owner = ref(inner)
        self.states[id(inner)] = self.states[id(optimizer)] = found
        return found

    def known(self, optimizer: Optimizer) -> OptimizerRecord | None:
        """The record of ``optimizer`` and its wrappers; None if there is none."""
        inner = stepped(optimizer)
        found = self.states.get(id(inner))
        if found is None or (found.owner is not None and found.owner() is not inner):
            return None
        return found

    def unscaled_among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters among these whose gradients were unscaled in place already."""
        if not self.unscaled:
            return []
        return [p for p in parameters if id(p) in self.unscaled and p.grad is not None]

    def let_go(self) -> None:
        """Drop every parameter and gradient: the window is over."""
        self.grad_norms = GradNorms()
        for record in self.states.values():
            record.let_go()

    def for_job(self, optimizers: Iterable[Optimizer], scale: float) -> Window:
        """A window for a job: this one's scale and records of ``optimizers``, as host numbers."""
        own = Window(self.index)
        own.opened_by, own.unscaled = self.opened_by, set(self.unscaled)
        own.scale = torch.full((), scale, dtype=torch.float32, device=HOST)
        for optimizer in optimizers:
            own.wrappers[id(stepped(optimizer))] = optimizer
            known, record = self.record(optimizer), own.record(optimizer)
            record.stage = known.stage
            record.decide(known.found_inf)
        return own

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the record and the norms of ``optimizer``: its gradients were dropped or changed."""
        gone = self.known(optimizer)
        for key in [key for key, record in self.states.items() if record is gone]:
            del self.states[key]
        params = parameters_of(optimizer)
        self.grad_norms.forget(params)
        self.unscaled.difference_update(map(id, params))
