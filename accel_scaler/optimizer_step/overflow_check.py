"""The verdict on the gradients of one optimizer: inf or NaN anywhere, on any rank?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite, isinf
from typing import TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import OrderError, UnsupportedError, listed
from ..scaling import (
    LOW_PRECISION,
    MAX_NAMED,
    MAX_NAMES,
    DeferredUnscale,
    Gathered,
    GradNorm,
    GradScaler,
    NormCheck,
    OptimizerRecord,
    SentCheck,
    Snapshot,
    Window,
    add_norms,
    are_same,
    can_send,
    check_norms,
    find_nonfinite,
    gradients_of,
    has_ranks,
    is_power_of_two,
    is_sharded,
    is_uniform,
    parameters_of,
    reciprocal,
    reduce_partial_gradients,
    send_flag,
    send_norms,
    total_norm,
)
from .observer import Observer, Rerun
from .stepper import stepper_of

T = TypeVar("T")

Parts = Sequence[tuple[Optimizer, Sequence[Tensor], OptimizerRecord]]
"""Optimizers, the parameters among theirs that are meant, and their records."""


@dataclass(eq=False)
class OverflowCheck:
    """Checks an optimizer's gradients once a window, and unscales them then or leaves that to the
    step. Its findings stand in the optimizer's record in the window."""

    scaler: GradScaler
    device: torch.device
    """Where ranks communicate."""
    observers: Sequence[Observer]
    checks: bool
    """False: gradients are not checked."""
    wants_norm: bool
    """Each check also takes the optimizer's total norm, before a clip changes gradients."""

    rerun: Rerun | None = None
    """Makes overflowed gradients anew; None: they are skipped."""

    def until_finite(self, take: Callable[[], T]) -> T:
        """Call ``take``, a clip or a check, and again each time that overflowed gradients were made
        anew. Returns its last result."""
        if self.rerun is None:
            return take()
        self.rerun.before_check()
        result = take()
        while self.rerun.make_again():
            result = take()
        return result

    @property
    def wants_each_norm(self) -> bool:
        """Whether an observer reads the norm of each gradient."""
        return any(observer.wants_each_norm for observer in self.observers)

    def parts(self, parameters: Sequence[Tensor]) -> Parts:
        """Each optimizer that has some of ``parameters``, with these, in order, and its record.
        Raises as :meth:`record`, and ``UnsupportedError`` where gradients are scaled and one
        belongs to no optimizer."""
        found, owned, window = [], set[int](), self.scaler.window
        for optimizer in (managed := self.scaler.managed):
            params = parameters_of(optimizer)
            if len(managed) == 1 and are_same(params, parameters):  # at a fifth of the cost
                return [(optimizer, params, self.record(optimizer))]
            own = set(map(id, params))
            has_all = own.issuperset(map(id, parameters))  # nearly always, so no Python loop
            mine = list(parameters) if has_all else [p for p in parameters if id(p) in own]
            found += [(optimizer, mine)] if mine else []
            owned |= own
        if self.scaler.is_enabled() and window.opened_by is not None:
            strays = () if owned.issuperset(map(id, parameters)) else parameters
            if strays := [p for p in strays if p.grad is not None and id(p) not in owned]:
                names = listed(self.scaler.parameter_names.of(strays[:MAX_NAMES]), len(strays))
                raise UnsupportedError(
                    f"clip: {names}: no optimizer here has these parameters, so nothing unscales "
                    "their gradients. Freeze them (requires_grad_(False)), clip the optimizers' "
                    "parameters alone, or prepare their optimizer before the backward."
                )
        return [(optimizer, mine, self.record(optimizer)) for optimizer, mine in found]

    def record(self, optimizer: Optimizer) -> OptimizerRecord:
        """The optimizer's record in this window, before gradients are read or written. Raises
        ``OrderError`` where no loss was scaled, it has stepped, or scaled gradients were added to
        unscaled ones."""
        window = self.scaler.window
        if not self.scaler.is_enabled():  # a backward of the caller's own, or another step
            known = window.known(optimizer)
            if window.opened_by is None or (known and known.stage is OptState.STEPPED):
                window = self._next_window(window)
            elif known and known.looked_at is not None and known.looked_at.is_changed:
                known.settle()
                if known.looked_at is not None:  # a script may change what was checked
                    self.forget(optimizer)
        if window.opened_by is None:
            raise OrderError(
                "there are gradients to unscale, but no loss was scaled since the last step or "
                "load. Call accelerator.backward(loss) instead of loss.backward()."
            )
        if window.known(optimizer) is None:
            # A step may still read gradients that no backward has added to since.
            for each in (optimizer, *self._sharing(optimizer)):
                stepper_of(each).wait_for_gradients()
        record = window.record(optimizer)
        if record.stage is OptState.STEPPED:
            raise OrderError(
                f"{type(optimizer).__name__} has already stepped since the last backward. Clip "
                "before optimizer.step(), and call accelerator.backward(loss) before the next step."
            )
        record.forbid_mixture(type(optimizer).__name__)
        return record

    def _next_window(self, last: Window) -> Window:
        """Open a window; it takes over the records of optimizers not stepped in ``last``."""
        left = {key: r for key, r in last.states.items() if r.stage is not OptState.STEPPED}
        window = self.scaler.open_window()
        window.states.update(left)
        return window

    def check(self, optimizer: Optimizer, record: OptimizerRecord | None = None) -> OptimizerRecord:
        """Check, unless that was done in this window; unscale, or leave that to the step.
        ``record``: its record, where it was looked up just before. The outcome may be left on the
        device until it is read; else this synchronises with it, and with other ranks where they
        hold different gradients."""
        record = self.record(optimizer) if record is None else record
        if record.stage is OptState.READY:
            self._look(optimizer, record)
        if record.unread is None and record.agreed is None:
            record.agreed = self._agreed(optimizer, record.found_inf)
        if self.wants_norm and not record.found_inf:
            self.norm(optimizer)
        return record

    def _look(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        stepper, is_scaled = stepper_of(optimizer), self.scaler.is_enabled()
        keeps_scaled = stepper.keeps_scaled
        self._forbid_common(optimizer, keeps_scaled)
        if is_sharded(parameters_of(optimizer)):
            reduce_partial_gradients(parameters_of(optimizer))
        gathered = record.gathered = Gathered(parameters_of(optimizer))
        parts, grads = [(optimizer, gathered.params, record)], gathered.grads
        norms: NormCheck | SentCheck | None = None
        if not self.checks:
            norms = NormCheck(None, ())
        elif stepper.reads_beside or keeps_scaled:
            norms = self.one_pass([optimizer], gathered, [keeps_scaled])
            if norms is None and keeps_scaled:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}: gradients of its float32 copies (masters) are "
                    "sharded, sparse or on several devices; load the model in float32, or in "
                    "bfloat16 with master_weights='none'."
                )
        if norms is None and is_scaled:
            self.scaler.unscale_(optimizer)
            flags = record["found_inf_per_device"]
            if len(flags) == 1 and self._sends([optimizer], *flags):
                self.leave(parts, gathered, send_flag(*flags.values()))
            return
        if norms is None and is_uniform(gathered, LOW_PRECISION | {torch.float32}):
            norms = self._take_norms([optimizer], grads)
        elif norms is None:
            norms = NormCheck(None, tuple(islice(find_nonfinite(grads), MAX_NAMED)))
        if isinstance(norms, SentCheck):
            self.leave(parts, gathered, norms)
        else:
            self.note(parts, gathered.params, norms)
        if is_scaled:
            record.deferred = DeferredUnscale(multiply=self.inv_scale(grads[0].device))

    def _forbid_common(self, optimizer: Optimizer, keeps_scaled: bool) -> None:
        """Raise ``OrderError`` where gradients stay scaled for one optimizer and are unscaled for
        another one: they would be unscaled twice, or not at all."""
        window, params = self.scaler.window, parameters_of(optimizer)
        common = window.unscaled_among(params) if keeps_scaled else []
        for other in self._sharing(optimizer):
            record = window.known(other)
            if record is not None and record.deferred and not record.found_inf:
                theirs = set(map(id, parameters_of(other)))
                common += [p for p in params if p.grad is not None and id(p) in theirs]
        if common:
            raise OrderError(
                f"{type(optimizer).__name__} shares {len(common)} parameters with another "
                "optimizer, and the gradients of one of them stay scaled, for float32 copies "
                "(masters). Put these in one optimizer, or load the model in float32; zero the "
                "gradients to go on."
            )

    def inv_scale(self, device: torch.device) -> Tensor:
        inverse = reciprocal(self.scaler.window_scale)
        return torch.full((), inverse, dtype=torch.float32, device=device)

    def _sharing(self, optimizer: Optimizer) -> list[Optimizer]:
        """Other optimizers that have some of its parameters."""
        others = [each for each in self.scaler.managed if each is not optimizer]
        mine = set(map(id, parameters_of(optimizer))) if others else set[int]()
        return [o for o in others if not mine.isdisjoint(map(id, parameters_of(o)))]

    def one_pass(
        self, owners: Sequence[Optimizer], gathered: Gathered, stay_scaled: Sequence[bool]
    ) -> NormCheck | SentCheck | None:
        """Norm and check from one read of gradients that are all scaled still; ``stay_scaled``: for
        each owner, whether its stepper keeps them so. None: the norm would not be, bit for bit,
        that of unscaled gradients, or no kernel takes all of them together. Synchronises, unless
        the outcome is left on the device."""
        scale = self.scaler.window_scale
        dtypes = frozenset({torch.float32}) | (LOW_PRECISION if any(stay_scaled) else frozenset())
        if not (is_power_of_two(scale) or all(stay_scaled)) or not is_uniform(gathered, dtypes):
            return None
        mine = (p for owner in owners for p in parameters_of(owner))
        if self.scaler.window.unscaled_among(mine):  # for another optimizer
            return None
        return self._take_norms(owners, gathered.grads)

    def _sends(self, owners: Iterable[Optimizer], device: torch.device) -> bool:
        """Whether the outcome of a check may stay on ``device`` for now: no rank waits for it."""
        has_parts = self.scaler.ranks.has_parts
        return can_send(device) and not (has_ranks() and any(map(has_parts, owners)))

    def _take_norms(
        self, owners: Iterable[Optimizer], grads: Sequence[Tensor]
    ) -> NormCheck | SentCheck:
        take = send_norms if self._sends(owners, grads[0].device) else check_norms
        return take(grads, reciprocal(self.scaler.window_scale), self.wants_each_norm)

    def note(
        self,
        parts: Parts,
        params: Sequence[Tensor],
        norms: NormCheck,
        max_norm: float | None = None,
    ) -> None:
        """Write what one pass over ``params``, all of ``parts``, has found to the records, where
        ``GradScaler`` reads it too. ``max_norm``: of the clip that the pass was made for."""
        window = self.scaler.window
        for optimizer, mine, record in parts:
            bad = [params[i] for i in norms.overflowed]
            if bad and len(parts) > 1:  # which of them has overflowed itself?
                bad = [mine[i] for i in islice(find_nonfinite(gradients_of(mine)), MAX_NAMED)]
            record.stage = OptState.UNSCALED
            record.names = self.scaler.parameter_names.of(bad, optimizer)
            verdict = self._agreed(optimizer, bool(bad))
            if record["found_inf_per_device"]:  # as the device has found it
                record.agreed = verdict
            else:
                record.decide(verdict)
            # Where nothing scales them a script may cure them, or run a backward that is not seen.
            if self.scaler.is_enabled() or (window.losses and not record.agreed):
                record.looked_at = None
            elif record.looked_at is None:
                record.looked_at = Snapshot(parameters_of(optimizer))
        for _, _, record in parts if norms.overflowed else ():
            record.is_caught = not record.verdict
        if norms.total is not None:
            norm = GradNorm(params, norms.host_total, norms.each, max_norm)
            window.grad_norms.add(norm)

    def leave(
        self,
        parts: Parts,
        gathered: Gathered,
        sent: SentCheck,
        max_norm: float | None = None,
        undo: Callable[[NormCheck], bool] = lambda norms: False,
    ) -> None:
        """The outcome of a check stays on the device until somebody asks for it. ``undo`` is told
        of an outcome without a norm, and returns whether it has dealt with it."""
        for optimizer, _, record in parts:
            record.stage = OptState.UNSCALED
            record["found_inf_per_device"] = {sent.found_inf.device: sent.found_inf}
            record.looked_at = Snapshot(parameters_of(optimizer))

        def when_read(sent: SentCheck) -> None:
            seen = [record.looked_at for _, _, record in parts if record.looked_at is not None]
            norms = sent.read(gathered.grads, any(each.is_changed for each in seen))
            for _, _, record in parts:  # only now: Ctrl-C may come while this waits
                record.unread = None
            if norms.total is not None or not undo(norms):
                self.note(parts, gathered.params, norms, max_norm)

        sent.when_read = when_read  # it holds no reference to it: that were a cycle
        for _, _, record in parts:
            record.unread = sent

    def _agreed(self, optimizer: Optimizer, found: bool) -> bool:
        """The verdict of all ranks, where this one has ``found`` an overflow."""
        if not self.checks:
            return False
        lost = isinf(reciprocal(self.scaler.window_scale))  # no gradient survived such a scale
        return self.scaler.ranks.agree_on_overflow(found or lost, optimizer, self.device)

    def norm(self, optimizer: Optimizer) -> float:
        """The unscaled 2-norm of its gradients in this window, before they were clipped: that of a
        clip or a check that took all of them, else taken here. Synchronises with the device, and
        with other ranks where they hold different gradients."""
        record = self.scaler.record_of(optimizer)
        record.settle()
        if record.norm is None:
            params = [p for p in parameters_of(optimizer) if p.grad is not None]
            taken = self.scaler.window.grad_norms.of(params) if params else 0.0
            norm = float(total_norm(params, 2.0)) if taken is None else taken
            if self.scaler.ranks.sharded and not is_sharded(params):
                norm = add_norms(norm, self.device)
            record.norm = norm
            if taken is None and isfinite(norm):
                self.scaler.window.grad_norms.add(GradNorm(params, norm))
        return record.norm

    def forget(self, optimizer: Optimizer) -> None:
        """A backward is about to add to its gradients, which nothing scales: have them checked
        again. Where a clip has left work to the step, that step refuses, unless they are gone."""
        record = self.scaler.window.known(optimizer)
        if record is None:
            return
        if record.returned is None or Snapshot(parameters_of(optimizer)).is_zero:
            self.scaler.window.forget(optimizer)

    def unscale(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        """Multiply in place by what is deferred, for a caller who reads unscaled gradients. Raises
        ``UnsupportedError`` where they are float16, or bfloat16 and go to masters."""
        stepper = stepper_of(optimizer)
        if stepper.keeps_scaled:
            raise UnsupportedError(
                "unscale_gradients: some gradients are float16 or bfloat16 and go to float32 "
                "copies (masters), so they are unscaled within the step; here small ones would be "
                "lost. Use clip_grad_norm_ or clip_grad_value_, and no hook before the step "
                "(register_step_pre_hook); or load the model in float32, or in bfloat16 with "
                "master_weights='none'."
            )
        record.returned = None
        params = parameters_of(optimizer)
        record.deferred.apply([(p, p.grad) for p in params if p.grad is not None])
        record.deferred = DeferredUnscale()
        record.give_back(params)
        self.scaler.window.unscaled.update(map(id, params))
