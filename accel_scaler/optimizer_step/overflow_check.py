"""The verdict on the gradients of one optimizer: inf or NaN anywhere, on any rank?"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import isinf

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import OrderError, UnsupportedError
from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    GradNorm,
    GradScaler,
    NormCheck,
    OptimizerRecord,
    Owners,
    Snapshot,
    agree_on_overflow,
    check_norms,
    gradients_of,
    is_power_of_two,
    is_sharded,
    is_uniform,
    parameters_of,
    reciprocal,
    reduce_partial_gradients,
)
from .observer import Observer
from .stepper import Stepper, stepper_of


class OverflowCheck:
    """Checks gradients once a window, and unscales them then or leaves that to the step.

    What it finds is written to the optimizer's record in the window, and read there.

    Args:
        scaler: whose windows these are.
        device: where ranks communicate.
        observers: may want each norm.
    """

    def __init__(
        self, scaler: GradScaler, device: torch.device, observers: Sequence[Observer]
    ) -> None:
        self.scaler, self.device, self.observers = scaler, device, observers

    @property
    def wants_each_norm(self) -> bool:
        """Some observer reads the norm of each gradient."""
        return any(observer.wants_each_norm for observer in self.observers)

    def split(
        self, parameters: Sequence[Tensor]
    ) -> tuple[list[tuple[Optimizer, list[Tensor]]], list[Tensor]]:
        """Each optimizer that has some of ``parameters``, with these, in the order they came; and
        those that none here has."""
        window, managed = self.scaler.window, self.scaler.managed
        if window.owners is None or not window.owners.is_of(managed):
            window.owners = Owners(managed)
        return window.owners.split(parameters)

    def is_sharded(self, optimizer: Optimizer) -> bool:
        """Ranks may hold different gradients of it."""
        owners = self.scaler.window.owners
        known = None if owners is None else owners.is_sharded(optimizer)
        sharded = is_sharded(parameters_of(optimizer)) if known is None else known
        return self.scaler.sharded or sharded

    def record(self, optimizer: Optimizer, some: Sequence[Tensor] | None = None) -> OptimizerRecord:
        """What is known of the optimizer in this window.

        Args:
            some: of its parameters those whose gradients the caller is about to read or write, as
                :meth:`split` gave them; None: all.

        Raises:
            OrderError: no loss was scaled; it has stepped; scaled gradients were added to
                unscaled ones.
        """
        window = self.scaler.window
        if window.opened_by is None:
            raise OrderError(
                "there are gradients to unscale, but no loss was scaled since the last step. "
                "Call accelerator.backward(loss) instead of loss.backward()."
            )
        record = window.record(optimizer)
        if record.stage is OptState.STEPPED:
            raise OrderError(
                f"{type(optimizer).__name__} has already stepped in this window. Clip before "
                "optimizer.step(), and call accelerator.backward(loss) before the next step."
            )
        record.forbid_mixture(type(optimizer).__name__, some)
        owners = window.owners
        count = None if some is None or owners is None else owners.count(optimizer)
        if count is None:
            count = len(parameters_of(optimizer))
        if record.stage is OptState.UNSCALED and record.count not in (None, count):
            raise OrderError(
                f"{type(optimizer).__name__} had {record.count} parameters when its gradients were "
                f"unscaled or clipped, and has {count} now: the new ones' are scaled, and were not "
                "checked. Add parameters before that, or after the step; zero the gradients to go "
                "on."
            )
        self.forbid_edits(optimizer, record, some)
        return record

    def forbid_edits(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        some: Sequence[Tensor] | None = None,
    ) -> None:
        """Raise ``OrderError`` where gradients that the caller got back scaled were changed.

        ``some``: of these parameters; None: of all.
        """
        record.stop_holding()
        if record.returned is not None and record.returned.is_changed(some):
            raise OrderError(
                f"the gradients of {type(optimizer).__name__} were changed after they were "
                "clipped, while they still are scaled: they go to float32 masters, or fold_unscale "
                "leaves unscaling to the kernel, so the change would be scaled too. Drop gradients "
                "(p.grad = None), or change them before clip_grad_norm_, where what is added has "
                "to be multiplied by accelerator.scaler.get_scale(); or load the model in float32, "
                "without fold_unscale. Zero the gradients to go on."
            )

    def check(self, optimizer: Optimizer) -> OptimizerRecord:
        """Check, unless somebody did in this window; unscale, or leave that to the step.

        Synchronises with the device, and with other ranks where they hold other gradients.
        """
        record = self.record(optimizer)
        self.decide(optimizer, record)
        return record

    def decide(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        """:meth:`check`, where the record was looked up just before."""
        if record.stage is OptState.READY:
            self._look(optimizer, record)
        if record.verdict is None:
            self._agree(optimizer, record, record.found_inf)

    def _look(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        stepper = stepper_of(optimizer)
        self._forbid_scaled_elsewhere(optimizer)
        if is_sharded(parameters_of(optimizer)):
            reduce_partial_gradients(parameters_of(optimizer))
        if stepper.defers_unscale and self._look_at_scaled(optimizer, record, stepper):
            return
        if stepper.keeps_scaled and self.unscaled_elsewhere([optimizer]):
            raise OrderError(
                f"{type(optimizer).__name__}: some of its gradients are unscaled already (clipped "
                "before it had their parameters, or for another optimizer), and those of float32 "
                "masters stay scaled until the step. Make the optimizer before the backward; zero "
                "the gradients to go on."
            )
        if stepper.keeps_scaled:
            raise UnsupportedError(
                f"{type(optimizer).__name__}: gradients of its float32 masters are sharded, sparse "
                "or on several devices; load the model in float32, or in bfloat16 with "
                "master_weights='none'."
            )
        self.scaler.unscale_(optimizer)

    def _forbid_scaled_elsewhere(self, optimizer: Optimizer) -> None:
        """Raise ``OrderError`` where another optimizer's step is to unscale some of its gradients,
        which are float32, since its others have masters: they would be unscaled twice."""
        window, own = self.scaler.window, set(map(id, parameters_of(optimizer)))
        for other in self.scaler.managed:
            record = window.known(other)
            if other is optimizer or record is None or not record.deferred:
                continue
            common = sum(id(p) in own for p in parameters_of(other) if p.grad is not None)
            if common:
                raise OrderError(
                    f"{type(optimizer).__name__} shares {common} parameters with a "
                    f"{type(other).__name__} that has float32 masters for others, so its gradients "
                    "stay scaled after a clip, and these would be unscaled twice. Put the shared "
                    "parameters in one optimizer, or load the model in float32; zero the gradients "
                    "to go on."
                )

    def _look_at_scaled(
        self, optimizer: Optimizer, record: OptimizerRecord, stepper: Stepper
    ) -> bool:
        """Check without unscaling, which is deferred; False: not possible with these gradients."""
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        norms = self.one_pass([optimizer], [stepper], params)
        if norms is None:
            return False
        self.note(optimizer, record, params, norms)
        if norms.total is not None:
            self.scaler.window.grad_norms.add(GradNorm(params, norms.host_total, norms.each))
        inv_scale = torch.full(
            (),
            reciprocal(self.scaler.window_scale),
            dtype=torch.float32,
            device=gradients_of(params)[0].device,
        )
        if self.divides(stepper):
            record.deferred = DeferredUnscale(divide=1.0 / inv_scale)
        else:
            record.deferred = DeferredUnscale(multiply=inv_scale)
        return True

    def one_pass(
        self,
        owners: Sequence[Optimizer],
        steppers: Sequence[Stepper],
        params: Sequence[Tensor],
    ) -> NormCheck | None:
        """Norm and check from one read of gradients that are all scaled still.

        None: the norm would not be, bit for bit, that of the unscaled ones, or a kernel does not
        take all of them together. Synchronises.
        """
        scale, grads = self.scaler.window_scale, gradients_of(params)
        stay_scaled = [stepper.keeps_scaled for stepper in steppers]
        dtypes = frozenset({torch.float32}) | (LOW_PRECISION if any(stay_scaled) else frozenset())
        if not (is_power_of_two(scale) or all(stay_scaled)) or not is_uniform(grads, dtypes):
            return None
        if self.unscaled_elsewhere(owners):
            return None
        inv_scale = torch.full((), reciprocal(scale), dtype=torch.float32, device=grads[0].device)
        return check_norms(grads, inv_scale, keep_each=self.wants_each_norm)

    def unscaled_elsewhere(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Parameters of optimizers that nobody has looked at, whose gradients were unscaled for
        another optimizer, or for none."""
        mine = (p for optimizer in optimizers for p in parameters_of(optimizer))
        return self.scaler.window.unscaled_among(mine)

    def note(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        params: Sequence[Tensor],
        norms: NormCheck,
    ) -> None:
        """Put what one pass has found where ``GradScaler`` looks for it too."""
        found, device = bool(norms.overflowed), params[0].device
        record.stage, record.count = OptState.UNSCALED, len(parameters_of(optimizer))
        record["found_inf_per_device"] = {
            device: torch.full((), float(found), dtype=torch.float32, device=device)
        }
        record.overflowed = [params[i] for i in norms.overflowed]
        self._agree(optimizer, record, found)

    def _agree(self, optimizer: Optimizer, record: OptimizerRecord, found: bool) -> None:
        lost = isinf(reciprocal(self.scaler.window_scale))  # no gradient survived such a scale
        record.verdict = agree_on_overflow(found or lost, self.device, self.is_sharded(optimizer))

    def divides(self, stepper: Stepper, returned: bool = False) -> bool:
        """Unscaling is left to its kernel: no other optimizer here has some of the gradients.

        Args:
            returned: the caller gets them back before the step. Then on a CPU alone: elsewhere
                nobody has measured what is saved.
        """
        mine, managed = stepper.optimizer, self.scaler.managed
        if not stepper.divides:
            return False
        if returned and (
            stepper.hold_scaled is None or parameters_of(mine)[0].device.type != "cpu"
        ):
            return False
        if len(managed) <= 1:
            return True
        own = set(map(id, parameters_of(mine)))
        others = (p for other in managed if other is not mine for p in parameters_of(other))
        return own.isdisjoint(map(id, others))

    def unscale(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        """Do in place what is deferred, because somebody wants to see unscaled gradients.

        Raises:
            UnsupportedError: they are float16, or bfloat16 and go to masters.
        """
        stepper = stepper_of(optimizer)
        if stepper.keeps_scaled:
            raise UnsupportedError(
                "unscale_gradients: some gradients are float16 or bfloat16 and go to float32 "
                "masters, so they are unscaled in float32 within the step; here small ones would "
                "be lost. Use clip_grad_norm_ or clip_grad_value_, which know this, or load the "
                "model in float32, or in bfloat16 with master_weights='none'. A hook before the "
                "step (register_step_pre_hook) sees gradients too."
            )
        record.forget_returned()
        params = parameters_of(optimizer)
        record.deferred.apply([(p, p.grad) for p in params if p.grad is not None])
        self._note_unscaled(params, record)

    def _note_unscaled(self, params: Sequence[Tensor], record: OptimizerRecord) -> None:
        record.deferred = DeferredUnscale()
        if record.unscaled_before is not None:
            record.unscaled_before.renew(params)
        self.scaler.window.unscaled.update(map(id, params))

    def give_back(
        self, optimizer: Optimizer, record: OptimizerRecord, written: Sequence[Tensor] = ()
    ) -> None:
        """The caller is about to have the gradients back: what changes them now is not ours.

        Args:
            written: of its parameters those whose gradients this call has written to.
        """
        if record.returned is not None:
            record.returned.renew(written)
        elif record.deferred and stepper_of(optimizer).keeps_scaled:
            record.returned = Snapshot(parameters_of(optimizer), with_contents=True)
        elif record.deferred:
            self._hold(optimizer, record)
        if record.unscaled_before is not None:
            record.unscaled_before.renew(written)

    def _hold(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        """Whoever looks at gradients that are left to the kernel has them unscaled first, as by
        :meth:`unscale`; at once, where not every look can be seen."""
        hold, params = stepper_of(optimizer).hold_scaled, parameters_of(optimizer)
        # Gradients keep what this makes, and it none of what keeps them.
        me, owner, its = weakref.ref(self), weakref.ref(optimizer), weakref.ref(record)
        due = record.deferred

        def unscale(memory: Sequence[Tensor]) -> None:
            due.apply([(each, each) for each in memory])
            check, stepped, found = me(), owner(), its()
            if check is not None and stepped is not None and found is not None:
                found.returned = None
                check._note_unscaled(parameters_of(stepped), found)

        record.returned = Snapshot(params)
        record.end_hold = None if hold is None else hold(gradients_of(params), unscale)
        if record.end_hold is None:
            self.unscale(optimizer, record)
