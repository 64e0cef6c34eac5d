"""The end of an accumulation window: unscale, check, clip, update the scale, step. In this order.

Everything here runs on the training thread and decides on the host, so that a skipped step is
known (and the LR schedule can wait) whichever optimizer is used, fused or not. What it learns of
an optimizer it writes to the window, and reads there what others have written.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..devices import refuse_capture
from ..errors import OrderError, OverflowStreakError, UnsupportedError
from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    GradNorm,
    GradScaler,
    NormCheck,
    OptimizerRecord,
    Snapshot,
    StepTiming,
    StillScaled,
    agree_on_overflow,
    check_norms,
    clip_coefficient,
    first_nonfinite,
    gradients_of,
    is_power_of_two,
    is_sharded,
    is_uniform,
    local,
    nonfinite,
    nonzero,
    parameters_of,
    raise_mixed,
    reciprocal,
    reduce_partial_gradients,
    stepped,
    whole,
)
from ..telemetry import History, Recorder
from .interrupts import Undivided
from .stepper import Stepper, stepper_of

__all__ = ["Boundary", "boundary_of"]

logger = logging.getLogger("accel_scaler")

PATIENCE = 10
"""Windows after whose end an optimizer that never had a gradient is told of."""

_boundaries: weakref.WeakKeyDictionary[GradScaler, weakref.ref[Boundary]] = (
    weakref.WeakKeyDictionary()
)


def boundary_of(scaler: GradScaler) -> Boundary | None:
    """The boundary at which this scaler's windows end, if there is one."""
    ref = _boundaries.get(scaler)
    return None if ref is None else ref()


class Boundary:
    """Clips for, and steps, the optimizers of one scaler.

    Args:
        scaler: whose windows these are.
        device: where ranks communicate, and the norm of an overflow is.
        recorder: puts windows on record; None: one in memory.
    """

    def __init__(
        self, scaler: GradScaler, device: torch.device, *, recorder: Recorder | None = None
    ) -> None:
        self.scaler, self.device = scaler, device
        self.recorder = recorder or Recorder(scaler)
        self.adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        """The wrappers that step through this boundary."""
        self._told = False
        self._idle: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """Of optimizers that had no gradient yet: the windows in which they were to step."""
        self._busy: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have had gradients, or of which it was told that they have none."""
        _boundaries[scaler] = weakref.ref(self)

    @property
    def history(self) -> History:
        """What happened, one record a window."""
        return self.recorder.history

    def add(self, optimizer: Optimizer, fold_unscale: bool = False) -> None:
        """Step this optimizer here; ``fold_unscale``: its kernel may unscale and clip."""
        stepper_of(optimizer).fold_unscale = fold_unscale
        self.scaler.manage(stepped(optimizer))

    def before_backward(self) -> None:
        """Call before each backward. Where nothing is scaled, it is what opens a window.

        May wait for a step that reads gradients which the backward adds to.
        """
        if not self.scaler.is_enabled():
            self.scaler.open_window()
            for optimizer in self.scaler.managed:
                stepper_of(optimizer).settle_gradients()

    # Unscale and clip.

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of what has accumulated, unscaled. Changes nothing."""
        if not self._told:
            self._told = True
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of an accumulation window clips "
                "nothing and returns the norm so far; the last micro-batch clips. (Said once.)"
            )
        total = whole(_total_norm(parameters, norm_type))
        return total if norm_type == 0 else total / self._window_scale()  # 0: a count

    def unscale(self, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale and check each optimizer that has gradients; once a window, later calls pass.

        Returns whether any of them overflowed. Synchronises with the device.
        """
        if not self.scaler.is_enabled():
            return False
        found = False
        for optimizer in filter(self._has_gradients, map(stepped, optimizers)):
            record = self._check(optimizer)
            if not record.found_inf:
                self._apply_deferred(optimizer, record)
                self._give_back([optimizer], [record], ())
            found = found or record.found_inf
        return found

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale what owns ``parameters``, clip their total norm to ``max_norm``.

        ``.grad`` is then what ``torch.nn.utils.clip_grad_norm_`` leaves after ``unscale_``, bit
        for bit; with ``fold_unscale`` and a fused optimizer, and where it is float16, it stays
        scaled, for the update. After an overflow gradients stay as they were found.

        Returns the total norm before clipping, unscaled, float32, shape (); inf after an
        overflow. Synchronises with the device once for each optimizer, or once for all where
        unscale and clip are one product.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        sharded = self.scaler.sharded
        parameters = [p for p in parameters if p.grad is not None or sharded]
        if not parameters:
            return torch.tensor(0.0, device=self.device)
        if not self.scaler.is_enabled():
            return self._clip_unscaled(parameters, max_norm, norm_type)
        owners = self.owners(parameters)
        records = [self._record(owner) for owner in owners]
        steppers = [stepper_of(owner) for owner in owners]
        if norm_type == 2.0 and self._fits_one_pass(owners, steppers, parameters):
            norm = self._clip_in_one_pass(owners, records, steppers, parameters, max_norm)
            if norm is not None:
                return norm
        unowned_bad = self._unscale_unowned(owners, parameters)
        if any(map(self._is_sharded, owners)):
            unowned_bad = agree_on_overflow(unowned_bad, self.device, True)
        for owner, record, stepper in zip(owners, records, steppers, strict=True):
            self._check(owner)
            # At once: the next owner may have some of the same gradients.
            stays = stepper.keeps_scaled or self._divides(stepper, returned=True)
            if record.deferred and not (record.found_inf or stays):
                self._apply_deferred(owner, record)
        if any(record.found_inf for record in records) or unowned_bad:
            for record in records:
                record.verdict = True
            total = torch.full((), float("inf"), device=self.device)
        elif any(record.deferred for record in records):
            total = self._clip_scaled(owners, records, parameters, max_norm, norm_type)
        else:
            total = self._clip_unscaled(parameters, max_norm, norm_type)
        self._give_back(owners, records, parameters)
        return total

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Unscale what owns ``parameters``, clip each element to ``[-clip_value, clip_value]``."""
        if not self.scaler.is_enabled():
            if parameters:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        owners = self.owners(parameters)
        self._unscale_unowned(owners, parameters)
        asked = {id(p): p for p in parameters if p.grad is not None}
        records = []
        for owner in owners:
            record, stepper = self._check(owner), stepper_of(owner)
            records.append(record)
            chosen = [p for p in parameters_of(owner) if id(p) in asked]
            if record.found_inf:  # as they were found; the others are clipped and step
                for p in chosen:
                    del asked[id(p)]
            elif stepper.keeps_scaled:
                limit = float(clip_value) / float(record.deferred.factor)
                for p in chosen:
                    grad = asked.pop(id(p)).grad
                    assert grad is not None
                    most = min(limit, torch.finfo(grad.dtype).max)
                    grad.clamp_(-most, most)
            elif record.deferred:
                self._apply_deferred(owner, record)
        if asked:
            torch.nn.utils.clip_grad_value_(asked.values(), clip_value)
        self._give_back(owners, records, parameters)

    def _clip_unscaled(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_``; where they are wanted, it leaves each one's norm."""
        grads, each = gradients_of(parameters), None
        if self.recorder.keeps and norm_type == 2.0 and is_uniform(grads):
            each = torch.stack(list(torch._foreach_norm(grads)))
            total: Tensor = torch.linalg.vector_norm(each)
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        else:
            total = _clip_any(parameters, max_norm, norm_type)
        self._note_clip(GradNorm(parameters, total, each, max_norm, norm_type=norm_type))
        return total

    def note_norm(
        self, parameters: Sequence[Tensor], norm: Any, max_norm: float, norm_type: float
    ) -> None:
        """Somebody else has clipped: for the record, if there is one. Then it may communicate."""
        if self.recorder.is_asked:
            total, kind = whole(norm), float(norm_type)
            self._note_clip(GradNorm(parameters, total, max_norm=float(max_norm), norm_type=kind))

    def _note_clip(self, measure: GradNorm) -> None:
        self.scaler.window.grad_norms.add(measure)

    def _clip_scaled(
        self,
        owners: Sequence[Optimizer],
        records: Sequence[OptimizerRecord],
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
    ) -> Tensor:
        """Clip where some gradients stay scaled: where all of an optimizer's are meant, along
        with its step. Does not synchronise."""
        asked = {id(p) for p in parameters}
        norms: list[Tensor] = []
        mine: list[tuple[OptimizerRecord | None, list[Tensor], bool]] = []
        for owner, record in zip(owners, records, strict=True):
            own = [p for p in parameters_of(owner) if p.grad is not None]
            chosen = [p for p in own if id(p) in asked]
            asked.difference_update(map(id, chosen))
            if chosen:
                norms.append(_total_norm(chosen, norm_type) * record.deferred.factor)
            mine.append((record, chosen, len(chosen) == len(own)))
        unowned = [p for p in parameters if id(p) in asked]
        if unowned:
            norms.append(_total_norm(unowned, norm_type))
            mine.append((None, unowned, False))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        coefficient = clip_coefficient(total, max_norm)
        for maybe, chosen, is_whole in mine:
            if maybe is not None and is_whole and maybe.deferred.multiply is not None:
                maybe.deferred = DeferredUnscale(multiply=maybe.deferred.multiply * coefficient)
            elif chosen:
                torch._foreach_mul_(gradients_of(chosen), coefficient)
        self._note_clip(GradNorm(parameters, total, None, max_norm, norm_type=norm_type))
        return total

    def _fits_one_pass(
        self,
        owners: Sequence[Optimizer],
        steppers: Sequence[Stepper],
        parameters: Sequence[Tensor],
    ) -> bool:
        """They are just those of whole optimizers, none of them looked at yet, none shared."""
        window = self.scaler.window
        if self.scaler.sharded or window.opened_by is None:
            return False
        if any(window.record(owner).stage is not OptState.READY for owner in owners):
            return False
        mine = [id(p) for owner in owners for p in parameters_of(owner) if p.grad is not None]
        asked = list(map(id, parameters))
        low = any(stepper.keeps_scaled for stepper in steppers)
        return (
            (mine == asked or (len(mine) == len(asked) and set(mine) == set(asked)))
            and len(set(asked)) == len(asked)
            and not self._unscaled_elsewhere(owners)
            and (
                is_power_of_two(self._window_scale())
                or all(stepper.keeps_scaled for stepper in steppers)
            )
            and is_uniform(gradients_of(parameters), _dtypes(low))
        )

    def _clip_in_one_pass(
        self,
        owners: Sequence[Optimizer],
        records: Sequence[OptimizerRecord],
        steppers: Sequence[Stepper],
        parameters: Sequence[Tensor],
        max_norm: float,
    ) -> Tensor | None:
        """One read for norm and check, one product for unscale and clip. None: not possible."""
        scale, grads = self._window_scale(), gradients_of(parameters)
        device = grads[0].device
        inv_scale = torch.full((), reciprocal(scale), device=device)
        norms = check_norms(grads, inv_scale, self.recorder.keeps)
        if norms.total is None and not norms.overflowed:
            return None
        for owner, record in zip(owners, records, strict=True):
            self._put_check(owner, record, parameters, norms)
        if norms.total is None:
            return torch.full((), float("inf"), device=device)
        ids = list(map(id, parameters))
        self._note_clip(GradNorm(parameters, norms.host_total, norms.each, max_norm, ids))
        coefficient = clip_coefficient(norms.total, max_norm)
        product, window = coefficient / scale, self.scaler.window
        for owner, record, stepper in zip(owners, records, steppers, strict=True):
            if stepper.keeps_scaled:
                record.deferred = DeferredUnscale(multiply=product)
            elif self._divides(stepper, returned=True):
                record.deferred = DeferredUnscale(divide=scale / coefficient)
            else:
                stepper.multiply(product)
                window.unscaled.update(map(id, parameters_of(owner)))
        self._give_back(owners, records, parameters)
        return norms.total

    def _unscale_unowned(self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """Unscale, once a window, gradients that no optimizer here owns; True: not finite."""
        owned = {id(p) for owner in owners for p in parameters_of(owner)}
        unowned = [p for p in parameters if id(p) not in owned]
        window = self.scaler.window
        for p in unowned if window.opened_by is not None else ():
            known = window.unowned.get(id(p))
            if known is not None and known[1] is not None and known[1].is_changed:
                raise_mixed("a parameter that no optimizer here owns")
            if known is None and p.grad is not None and id(p) not in window.unscaled:
                p.grad.div_(self._window_scale())
                window.unowned[id(p)] = p, None
        return any(nonfinite(grad) for grad in gradients_of(unowned))

    # The verdict.

    def owners(self, parameters: Iterable[Tensor]) -> list[Optimizer]:
        """The optimizers that hold any of ``parameters``, in the order they came."""
        wanted = set(map(id, parameters))
        managed = self.scaler.managed
        return [o for o in managed if not wanted.isdisjoint(map(id, parameters_of(o)))]

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        """What is known of the optimizer in this window.

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
        record.forbid_mixture(type(optimizer).__name__)
        count = len(parameters_of(optimizer))
        if record.stage is OptState.UNSCALED and record.count not in (None, count):
            raise OrderError(
                f"{type(optimizer).__name__} had {record.count} parameters when its gradients were "
                f"unscaled or clipped, and has {count} now: the new ones' are scaled, and were not "
                "checked. Add parameters before that, or after the step; zero the gradients to go "
                "on."
            )
        self._forbid_edits(optimizer, record)
        return record

    def _forbid_edits(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        if record.returned is not None and record.returned.is_changed:
            raise OrderError(
                f"the gradients of {type(optimizer).__name__} were changed after they were "
                "clipped, while they still are scaled: they are float16, or fold_unscale leaves "
                "unscaling to the kernel, so the change would be scaled too. Change them before "
                "clip_grad_norm_, or load the model in float32, without fold_unscale; zero the "
                "gradients to go on."
            )

    @contextmanager
    def deferred_of(self, optimizer: Optimizer) -> Iterator[DeferredUnscale]:
        """What is left to be done to the gradients, for a caller who steps with it in the block.

        Raises:
            OrderError: they were changed since they were clipped.
        """
        optimizer = stepped(optimizer)
        record = self.scaler.record_of(optimizer)
        self._forbid_edits(optimizer, record)
        record.forget_returned()
        try:
            yield record.deferred
        except BaseException:  # it is still to be done
            self._give_back([optimizer], [record], ())
            raise
        record.deferred = DeferredUnscale()

    def _check(self, optimizer: Optimizer) -> OptimizerRecord:
        """Check, unless somebody did in this window; unscale, or leave that as due."""
        record = self._record(optimizer)
        if record.stage is OptState.READY:
            self._look(optimizer, record)
        if record.verdict is None:
            self._settle(optimizer, record, record.found_inf)
        return record

    def _look(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        stepper = stepper_of(optimizer)
        if is_sharded(parameters_of(optimizer)):
            reduce_partial_gradients(parameters_of(optimizer))
        if stepper.defers_unscale and self._check_only(optimizer, record, stepper):
            return
        if stepper.keeps_scaled and self._unscaled_elsewhere([optimizer]):
            raise OrderError(
                f"{type(optimizer).__name__}: some of its gradients are unscaled already (clipped "
                "before it had their parameters, or for another optimizer), and float16 ones stay "
                "scaled until the step. Make the optimizer before the backward; zero the gradients "
                "to go on."
            )
        if stepper.keeps_scaled:
            raise UnsupportedError(
                f"{type(optimizer).__name__}: its float16 gradients are sharded, sparse or on "
                "several devices; load the model in float32."
            )
        self.scaler.unscale_(optimizer)

    def _unscaled_elsewhere(self, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Parameters of optimizers that nobody has looked at, whose gradients were unscaled for
        another optimizer, or for none."""
        mine = (p for optimizer in optimizers for p in parameters_of(optimizer))
        return self.scaler.window.unscaled_among(mine)

    def _check_only(self, optimizer: Optimizer, record: OptimizerRecord, stepper: Stepper) -> bool:
        """Check without unscaling, which stays due; False: not possible with these gradients."""
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        grads, scale, low = gradients_of(params), self._window_scale(), stepper.keeps_scaled
        exact = is_power_of_two(scale) or low
        if (
            not exact
            or not is_uniform(grads, _dtypes(low))
            or self._unscaled_elsewhere([optimizer])
        ):
            return False
        inv_scale = torch.full((), reciprocal(scale), device=grads[0].device)
        norms = check_norms(grads, inv_scale, self.recorder.keeps)
        self._put_check(optimizer, record, params, norms)
        if norms.total is not None:
            self._note_clip(GradNorm(params, norms.host_total, norms.each))
        divides = self._divides(stepper)
        record.deferred = (
            DeferredUnscale(divide=1.0 / inv_scale)
            if divides
            else DeferredUnscale(multiply=inv_scale)
        )
        return True

    def _put_check(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        params: Sequence[Tensor],
        norms: NormCheck,
    ) -> None:
        """Note what was found where ``GradScaler`` looks for it too."""
        found, device = bool(norms.overflowed), params[0].device
        record.stage, record.count = OptState.UNSCALED, len(parameters_of(optimizer))
        record["found_inf_per_device"] = {device: torch.full((), float(found), device=device)}
        record.overflowed = [params[i] for i in norms.overflowed]
        self._settle(optimizer, record, found)

    def _settle(self, optimizer: Optimizer, record: OptimizerRecord, found: bool) -> None:
        lost = isinf(reciprocal(self._window_scale()))  # no gradient survived such a scale
        sharded = self._is_sharded(optimizer)
        record.verdict = agree_on_overflow(found or lost, self.device, sharded)

    def _apply_deferred(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        """Do in place what is due, because somebody wants to see unscaled gradients.

        Raises:
            UnsupportedError: they are float16 or bfloat16.
        """
        stepper = stepper_of(optimizer)
        if stepper.keeps_scaled:
            raise UnsupportedError(
                "unscale_gradients: some gradients are float16 or bfloat16; unscaled, they would "
                "lose what is small, so they are unscaled in float32 within the step. Use "
                "clip_grad_norm_ or clip_grad_value_, which know this, or load the model in "
                "float32. A hook before the step (register_step_pre_hook) sees gradients too."
            )
        record.forget_returned()
        if record.deferred.multiply is not None:
            stepper.multiply(record.deferred.multiply)
        elif record.deferred.divide is not None:
            torch._foreach_div_(gradients_of(parameters_of(optimizer)), record.deferred.divide)
        record.deferred = DeferredUnscale()
        self.scaler.window.unscaled.update(map(id, parameters_of(optimizer)))

    def _give_back(
        self,
        owners: Sequence[Optimizer],
        records: Sequence[OptimizerRecord],
        parameters: Sequence[Tensor],
    ) -> None:
        """The caller is about to have the gradients back: what changes them now is not ours."""
        for owner, record in zip(owners, records, strict=True):
            record.forget_returned()
            if record.deferred:
                record.returned = Snapshot.with_contents(parameters_of(owner))
            if record.unscaled_before is not None:
                record.unscaled_before = Snapshot.of(parameters_of(owner))
        unowned = self.scaler.window.unowned
        for p in parameters if unowned else ():
            if id(p) in unowned and unowned[id(p)][1] is not None:
                unowned[id(p)] = p, Snapshot.of([p])

    def _window_scale(self) -> float:
        before = self.scaler.window.before
        return self.scaler.get_scale() if before is None else before.scale

    def _is_sharded(self, optimizer: Optimizer) -> bool:
        return self.scaler.sharded or is_sharded(parameters_of(optimizer))

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        # A rank whose shard is empty still takes part in what the others decide.
        params = parameters_of(optimizer)
        return self._is_sharded(optimizer) or any(p.grad is not None for p in params)

    # The step.

    def step(self, optimizer: Optimizer) -> bool:
        """Finish the window for ``optimizer``: check, update the scale, then step or skip.

        Returns False if the step was skipped. Synchronises with the device once, unless
        :meth:`clip_norm` or :meth:`unscale` already have.

        Raises:
            OrderError: a second step in one window; gradients that no ``scale()`` produced;
                scaled gradients added to unscaled ones.
            OverflowStreakError: too many skips in a row.
            UnsupportedError: a graph is being captured.
        """
        if self.device.type != "cpu":
            refuse_capture("optimizer.step()")
        start, optimizer = time.perf_counter(), stepped(optimizer)
        scaler = self.scaler
        scaler.manage(optimizer)
        if not scaler.is_enabled():
            self._step_unscaled(optimizer)
            self.recorder.end_step(start)
            return True
        if not self._has_gradients(optimizer):
            self._pass(optimizer)
            return True
        if scaler.window.opened_by is None:
            self._step_without_window(optimizer)
            return True
        self._busy.add(optimizer)
        record, stepper = self._check(optimizer), stepper_of(optimizer)
        if record.found_inf:
            record.overflowed = record.overflowed or first_nonfinite(optimizer)
        elif record.deferred and self._is_seen(stepper):
            self._apply_deferred(optimizer, record)
        elif record.deferred and len(scaler.managed) > 1:
            self._note_unscaled(optimizer, stepper)
        self._close(optimizer, record, stepper)
        self.recorder.end_step(start)
        try:
            scaler.end_streak()
        except OverflowStreakError as error:
            self.recorder.flush(f"{type(error).__name__}: {error}")
            raise
        return not record.found_inf

    def _is_seen(self, stepper: Stepper) -> bool:
        """Gradients are to be unscaled in place before the step, which would not do it."""
        if stepper.has_pre_hooks:
            return True
        return not (stepper.unscales or stepper.keeps_scaled or self._divides(stepper))

    def _divides(self, stepper: Stepper, returned: bool = False) -> bool:
        """Unscaling is left to its kernel: no other optimizer here has some of the gradients.

        Args:
            handed_out: the caller gets them back before the step, scaled. That he has not changed
                them is known for nothing on a CPU alone; elsewhere it costs more than is saved.
        """
        mine, managed = stepper.optimizer, self.scaler.managed
        if not stepper.divides or (returned and parameters_of(mine)[0].device.type != "cpu"):
            return False
        if len(managed) <= 1:
            return True
        own = set(map(id, parameters_of(mine)))
        others = (p for other in managed if other is not mine for p in parameters_of(other))
        return own.isdisjoint(map(id, others))

    def _note_unscaled(self, optimizer: Optimizer, stepper: Stepper) -> None:
        """Its step unscales them where they are: another optimizer that has them is not to."""
        unscaled = [
            p
            for p in parameters_of(optimizer)
            if p.grad is not None and not (stepper.keeps_scaled and p.grad.dtype in LOW_PRECISION)
        ]
        self.scaler.window.unscaled.update(map(id, unscaled))

    def _pass(self, optimizer: Optimizer) -> None:
        """A window without a gradient for it."""
        window = self.scaler.window
        if window.opened_by is not None and optimizer not in self._busy:
            self._count_idle(optimizer, window.index)

    def _count_idle(self, optimizer: Optimizer, index: int) -> None:
        """Once it has had ``PATIENCE`` windows and never a gradient: say so, once.

        Torch's scaler raises in the first. Here an optimizer may wait for its turn (GANs,
        adapters), and one that has had gradients may be without for as long as it likes.
        """
        windows = self._idle.setdefault(optimizer, set())
        windows.add(index)
        if len(windows) < PATIENCE:
            return
        self._busy.add(optimizer)
        del self._idle[optimizer]
        params = parameters_of(optimizer)
        frozen = sum(not p.requires_grad for p in params)
        logger.warning(
            "%s was to step in %d windows and has never had a gradient: nothing of it trains "
            '(torch\'s GradScaler raises "No inf checks were recorded for this optimizer"). Its '
            "first of %d parameters is %s; %d of them are frozen. Make it from the parameters of "
            "the model that computes the loss, after that was wrapped or moved; unfreeze them; or "
            "leave out its step() until they train. One that waits for its turn is in order. "
            "(Said once.)",
            type(optimizer).__name__,
            PATIENCE,
            len(params),
            next(iter(self.scaler.parameter_names.of(params[:1], optimizer)), "not there"),
            frozen,
        )

    def _close(self, optimizer: Optimizer, record: OptimizerRecord, stepper: Stepper) -> None:
        """Update the scale, then the parameters or not, and put it on record."""
        scaler, window = self.scaler, self.scaler.window
        found_inf, timing = record.found_inf, None
        stepper.wait("optimizer.step")
        with Undivided():  # the scale and the parameters move on together
            scaler.close_window(found_inf)
            record.stage = OptState.STEPPED
            self.recorder.before_update(optimizer, window, found_inf)
            if found_inf:
                stepper.skip()
                left = [p for p in parameters_of(optimizer) if id(p) not in window.unscaled]
                record.still_scaled = StillScaled(left, self._window_scale())
            else:
                record.forget_returned()
                timing = self._apply(stepper, record.deferred)
                record.deferred = DeferredUnscale()
        streak = scaler.overflow_streak
        record.names = scaler.parameter_names.of(record.overflowed, optimizer)
        record.let_go()  # a model may be dropped now
        streak.count(record.names)
        if found_inf:
            streak.search(optimizer, scaler.read_state().consecutive_skips - 1)
            streak.tell_broken_statistics()
        names = dict.fromkeys(name for each in window.states.values() for name in each.names)
        scale = self._window_scale()
        self.recorder.add(optimizer, window, scale, window.found_inf, names, timing)

    def _step_unscaled(self, optimizer: Optimizer) -> None:
        """Where nothing is scaled: step, and where somebody reads it, put it on record."""
        scaler = self.scaler
        window = scaler.open_window() if scaler.window.opened_by is None else scaler.window
        if window.record(optimizer).stage is OptState.STEPPED:
            scaler.abandon_window()
            window = scaler.open_window()
        with Undivided():
            window.record(optimizer).stage = OptState.STEPPED
            scaler.close_window(False)
            self.recorder.before_update(optimizer, window, False)
            timing = self._apply(stepper_of(optimizer), DeferredUnscale())
        found = not window.grad_norms.are_finite
        self.recorder.add(optimizer, window, 1.0, found, (), timing)

    def _apply(self, stepper: Stepper, deferred: DeferredUnscale) -> StepTiming | None:
        """Step; returns when that runs, None where nothing was handed over."""
        before = stepper.timing
        stepper.step(deferred)
        return None if stepper.timing is before else stepper.timing

    def _step_without_window(self, optimizer: Optimizer) -> None:
        """Nothing was scaled since the last step: only zero gradients are right as they are.

        ``torch.distributed.checkpoint`` steps on zeros to create state before it loads some.
        """
        if any(map(nonzero, gradients_of(parameters_of(optimizer)))):
            raise OrderError(
                f"{type(optimizer).__name__}.step(): there are gradients, but no loss was scaled "
                "since the last step. Call accelerator.backward(loss) instead of loss.backward()."
            )
        stepper_of(optimizer).step()


def _dtypes(low: bool) -> frozenset[torch.dtype]:
    """Of gradients that one pass takes; ``low``: those that stay scaled too."""
    return frozenset({torch.float32}) | (LOW_PRECISION if low else frozenset())


def _total_norm(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradient elements together, float32, shape ()."""
    grads = gradients_of(parameters)
    if all(grad.dtype not in LOW_PRECISION for grad in grads):
        total: Tensor = torch.nn.utils.get_total_norm(grads, norm_type)
        return total
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _clip_any(parameters: Sequence[Any], max_norm: float, norm_type: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, of plain parameters and DTensors of several meshes."""
    meshes: dict[Any, list[Any]] = {}
    for p in parameters:
        if p.grad is not None:
            meshes.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    if len(meshes) <= 1:
        return whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
    norms = [
        whole(torch.nn.utils.get_total_norm(gradients_of(group), norm_type))
        for group in meshes.values()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    coefficient = clip_coefficient(total, max_norm)
    for group in meshes.values():
        for grad in gradients_of(group):
            held = local(grad)
            held.mul_(coefficient.to(held.device))
    return total
