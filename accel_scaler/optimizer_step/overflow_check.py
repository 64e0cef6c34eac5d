"""The verdict on the gradients of one optimizer: inf or NaN anywhere, on any rank?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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
    can_send,
    check_norms,
    find_nonfinite,
    first_version,
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
from .arena import are_same
from .observer import Observer, Rerun
from .stepper import stepper_of

T = TypeVar("T")


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

    def owners(self, parameters: Sequence[Tensor]) -> list[tuple[Optimizer, list[Tensor]]]:
        """Each optimizer that has some of ``parameters``, with these, in order. Raises
        ``UnsupportedError`` where gradients are scaled and one belongs to no optimizer. The table
        is made once a window: a loop that clips tensor by tensor asks thousands of times."""
        window, managed = self.scaler.window, self.scaler.managed
        sizes = [(id(each), *(len(g["params"]) for g in each.param_groups)) for each in managed]
        if len(managed) == 1 and len(parameters) > sum(sizes[0][1:]) // 2:  # no Python loop
            own = parameters_of(managed[0])
            if are_same(own, parameters) or {*map(id, own)}.issuperset(map(id, parameters)):
                return [(managed[0], list(parameters))]
        if window.owners is None or window.owners[0] != sizes:
            window.owners = sizes, {}
            for index, optimizer in enumerate(managed):
                for key in dict.fromkeys(map(id, parameters_of(optimizer))):
                    window.owners[1].setdefault(key, []).append(index)
        places, found, strays = window.owners[1], defaultdict(list), []
        for p in parameters:
            indices = places.get(id(p), ())
            for index in indices:
                found[index].append(p)
            if not indices and p.grad is not None:
                strays.append(p)
        if strays and window.opened_by is not None and self.scaler.is_enabled():
            names = listed(self.scaler.parameter_names.of(strays[:MAX_NAMES]), len(strays))
            raise UnsupportedError(
                f"clip: {names}: no optimizer here has these parameters, so nothing unscales their "
                "gradients. Freeze them (requires_grad_(False)), clip the optimizers' parameters "
                "alone, or prepare their optimizer before the backward."
            )
        return [(managed[index], found[index]) for index in sorted(found)]

    def record(self, optimizer: Optimizer, some: Sequence[Tensor] | None = None) -> OptimizerRecord:
        """The optimizer's record in this window, before gradients of ``some`` of its parameters
        (None: of all) are read or written. Raises ``OrderError`` where no loss was scaled, it has
        stepped, or scaled gradients were added to unscaled ones."""
        window, count = self.scaler.window, sum(len(g["params"]) for g in optimizer.param_groups)
        if not self.scaler.is_enabled():  # a backward of the caller's own, or another step
            known = window.known(optimizer)
            if window.opened_by is None or (known and known.stage is OptState.STEPPED):
                window = self._next_window(window)
            elif known and (known.count not in (None, count) or self._is_changed(known)):
                self.forget(optimizer)
        if window.opened_by is None:
            raise OrderError(
                "there are gradients to unscale, but no loss was scaled since the last step or "
                "load. Call accelerator.backward(loss) instead of loss.backward()."
            )
        if window.known(optimizer) is None:
            # Its last step may still read gradients that no backward has added to since.
            stepper_of(optimizer).wait_for_gradients()
        record = window.record(optimizer)
        if record.stage is OptState.STEPPED:
            raise OrderError(
                f"{type(optimizer).__name__} has already stepped since the last backward. Clip "
                "before optimizer.step(), and call accelerator.backward(loss) before the next step."
            )
        record.forbid_mixture(type(optimizer).__name__, some)
        if record.stage is OptState.UNSCALED and record.count not in (None, count):
            raise OrderError(
                f"{type(optimizer).__name__} had {record.count} parameters when its gradients were "
                f"unscaled or clipped, and has {count} now: the new ones were not checked. Add "
                "parameters before that, or after the step; zero the gradients to go on."
            )
        return record

    def _is_changed(self, record: OptimizerRecord) -> bool:
        """Whether a script has changed the gradients since their check, and may do so."""
        if record.looked_at is None or not record.looked_at.is_changed():
            return False
        record.settle()
        return record.looked_at is not None

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
        if record.unread is None and record.verdict is None:
            self._agree(optimizer, record, record.found_inf)
        if self.wants_norm and not record.found_inf:
            self.norm(optimizer)
        return record

    def _look(self, optimizer: Optimizer, record: OptimizerRecord) -> None:
        stepper = stepper_of(optimizer)
        keeps_scaled = stepper.keeps_scaled
        self._forbid_common(optimizer, keeps_scaled)
        if is_sharded(parameters_of(optimizer)):
            reduce_partial_gradients(parameters_of(optimizer))
        gathered = Gathered(parameters_of(optimizer))
        params, grads = gathered.params, gathered.grads
        norms: NormCheck | SentCheck | None = None
        versions, is_deferred = self.scaler.window.versions, stepper.reads_beside or keeps_scaled
        is_edited = versions.get(id(optimizer), now := first_version(optimizer)) != now
        if not self.checks:
            norms = NormCheck(None, ())
        elif is_deferred or is_edited:
            norms = self.one_pass([optimizer], gathered, [keeps_scaled])
        if norms is None and keeps_scaled:
            raise UnsupportedError(
                f"{type(optimizer).__name__}: gradients of its float32 copies (masters) are "
                "sharded, sparse or on several devices; load the model in float32, or in bfloat16 "
                "with master_weights='none'."
            )
        if norms is None and self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            flags = record["found_inf_per_device"]
            if len(flags) == 1 and self._sends([optimizer], *flags):
                self.note(optimizer, record, params, send_flag(*flags.values()))
            return
        if norms is None and is_uniform(gathered, LOW_PRECISION | {torch.float32}):
            norms = self._take_norms([optimizer], grads)
        elif norms is None:
            norms = NormCheck(None, tuple(islice(find_nonfinite(grads), MAX_NAMED)))
        if is_edited and isinstance(norms, SentCheck):
            norms = norms.read(grads)
        record.gathered = gathered
        self.note(optimizer, record, params, norms)
        if self.scaler.is_enabled():
            record.deferred = DeferredUnscale(multiply=self.inv_scale(grads[0].device))
        if is_edited and isinstance(norms, NormCheck) and norms.total is not None:
            record.edited_norm = norms.host_total
        if is_edited and not is_deferred:
            self.unscale(optimizer, record)

    def _forbid_common(self, optimizer: Optimizer, keeps_scaled: bool) -> None:
        """Raise ``OrderError`` where gradients stay scaled for one optimizer and are unscaled for
        another one: they would be unscaled twice, or not at all."""
        window, own = self.scaler.window, set(map(id, parameters_of(optimizer)))
        common = len(window.unscaled_among(parameters_of(optimizer))) if keeps_scaled else 0
        for other in self.scaler.managed:
            record = window.known(other)
            if other is not optimizer and record is not None and record.deferred:
                common += sum(id(p) in own for p in parameters_of(other) if p.grad is not None)
        if common:
            raise OrderError(
                f"{type(optimizer).__name__} shares {common} parameters with another optimizer, "
                "and the gradients of one of them stay scaled, for float32 copies (masters). Put "
                "the shared parameters in one optimizer, or load the model in float32; zero the "
                "gradients to go on."
            )

    def inv_scale(self, device: torch.device) -> Tensor:
        inverse = reciprocal(self.scaler.window_scale)
        return torch.full((), inverse, dtype=torch.float32, device=device)

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
        device = grads[0].device
        if self._sends(owners, device):
            return send_norms(grads, reciprocal(self.scaler.window_scale), self.wants_each_norm)
        return check_norms(grads, self.inv_scale(device), self.wants_each_norm)

    def note(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        params: Sequence[Tensor],
        norms: NormCheck | SentCheck,
    ) -> None:
        """Write what one pass has found to the record, where ``GradScaler`` reads it too. An
        outcome that is still on the device is written once it is read."""
        if isinstance(norms, SentCheck):
            self.leave(optimizer, record, norms)
            record.unread = partial(self._read, optimizer, record, params, gradients_of(params))
            return
        found, device = bool(norms.overflowed), params[0].device if params else self.device
        record.stage, record.count = OptState.UNSCALED, len(parameters_of(optimizer))
        if norms.total is not None:
            self.scaler.window.grad_norms.add(GradNorm(params, norms.host_total, norms.each))
        if record.sent is None or found == record.sent.is_finite:
            flag = torch.full((), float(found), dtype=torch.float32, device=device)
            record["found_inf_per_device"] = {device: flag}
        record.overflowed = [params[i] for i in norms.overflowed]
        self._agree(optimizer, record, found)
        if not self._may_change(record):
            record.looked_at = None
        elif record.looked_at is None:
            record.looked_at = Snapshot(parameters_of(optimizer))

    def leave(self, optimizer: Optimizer, record: OptimizerRecord, sent: SentCheck) -> None:
        """The outcome of a check stays on the device for now; ``unread`` is the caller's to set."""
        record.stage, record.count = OptState.UNSCALED, len(parameters_of(optimizer))
        record["found_inf_per_device"] = {sent.found_inf.device: sent.found_inf}
        record.sent, record.looked_at = sent, Snapshot(parameters_of(optimizer))

    def _may_change(self, record: OptimizerRecord) -> bool:
        """Whether a script's edits after the check have the gradients checked again."""
        is_new = record.verdict or not self.scaler.window.losses
        return is_new and not self.scaler.is_enabled()

    def _read(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        """Write the outcome of a check that was left on the device."""
        sent, looked_at = record.sent, record.looked_at
        assert sent is not None
        assert looked_at is not None
        norms = sent.read(grads, looked_at.is_changed())
        record.unread = None  # only now: Ctrl-C may come while this waits
        self.note(optimizer, record, params, norms)

    def _agree(self, optimizer: Optimizer, record: OptimizerRecord, found: bool) -> None:
        if not self.checks:
            record.verdict = False
            return
        lost = isinf(reciprocal(self.scaler.window_scale))  # no gradient survived such a scale
        ranks, here = self.scaler.ranks, found or lost
        record.verdict = ranks.agree_on_overflow(here, optimizer, self.device)

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
        for kept in (record.unscaled_before, record.looked_at):
            if kept is not None:
                kept.renew(params)
        self.scaler.window.unscaled.update(map(id, params))

    def give_back(
        self, optimizer: Optimizer, record: OptimizerRecord, written: Sequence[Tensor] = ()
    ) -> None:
        """Remember the gradients as the caller gets them back: if they are scaled, later edits are
        refused. ``written``: parameters whose gradients the present call has written to."""
        if record.returned is not None:
            record.returned.renew(written)
        elif record.deferred:
            record.returned = Snapshot(parameters_of(optimizer))
        for kept in (record.unscaled_before, record.looked_at):
            if kept is not None:
                kept.renew(written)
