"""Clipping of gradients that may still be scaled: unscale, check, clip, in this order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    GradNorm,
    OptimizerRecord,
    agree_on_overflow,
    clip_coefficient,
    gradients_of,
    is_uniform,
    local,
    nonfinite,
    parameters_of,
    raise_mixed,
    whole,
)
from .overflow_check import OverflowCheck
from .stepper import Stepper, stepper_of

logger = logging.getLogger("accel_scaler")


class Clipping:
    """Clips gradients of the optimizers that ``check`` knows, and of parameters that none owns."""

    def __init__(self, check: OverflowCheck) -> None:
        self._check, self.scaler, self.device = check, check.scaler, check.device
        self._told = False

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of what has accumulated, unscaled. Changes nothing."""
        if not self._told:
            self._told = True
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of an accumulation window clips "
                "nothing and returns the norm so far; the last micro-batch clips. (Said once.)"
            )
        total = whole(_total_norm(parameters, norm_type))
        return total if norm_type == 0 else total / self.scaler.window_scale  # 0: a count

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale what owns ``parameters``, clip their total norm to ``max_norm``.

        ``.grad`` is then what ``torch.nn.utils.clip_grad_norm_`` leaves after ``unscale_``, bit
        for bit; with ``fold_unscale`` and a fused optimizer, and where it is float16, or bfloat16
        with a master, it stays scaled, for the update. After an overflow gradients stay as they
        were found.

        Returns the total norm before clipping, unscaled, float32, shape (); inf after an
        overflow. Synchronises with the device once for each optimizer, or once for all where
        unscale and clip are one product.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        sharded = self.scaler.sharded
        parameters = [p for p in parameters if p.grad is not None or sharded]
        if not parameters:
            return torch.tensor(0.0, dtype=torch.float32, device=self.device)
        if not self.scaler.is_enabled():
            return self._clip_unscaled(parameters, max_norm, norm_type)
        check = self._check
        owners = check.owners(parameters)
        records = [check.record(owner) for owner in owners]
        steppers = [stepper_of(owner) for owner in owners]
        if norm_type == 2.0 and self._are_whole(owners, parameters):
            norm = self._clip_in_one_pass(owners, records, steppers, parameters, max_norm)
            if norm is not None:
                return norm
        unowned_bad = self._unscale_unowned(owners, parameters)
        if any(map(check.is_sharded, owners)):
            unowned_bad = agree_on_overflow(unowned_bad, self.device, True)
        for owner, record, stepper in zip(owners, records, steppers, strict=True):
            check.check(owner)
            # At once: the next owner may have some of the same gradients.
            stays = stepper.keeps_scaled or check.divides(stepper, returned=True)
            if record.deferred and not (record.found_inf or stays):
                check.unscale(owner, record)
        if any(record.found_inf for record in records) or unowned_bad:
            for record in records:
                record.verdict = True
            total = torch.full((), float("inf"), dtype=torch.float32, device=self.device)
        elif any(record.deferred for record in records):
            total = self._clip_scaled(owners, records, parameters, max_norm, norm_type)
        else:
            total = self._clip_unscaled(parameters, max_norm, norm_type)
        check.give_back(owners, records, parameters)
        return total

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Unscale what owns ``parameters``, clip each element to ``[-clip_value, clip_value]``."""
        self.scaler.window.clipped_values = True
        if not self.scaler.is_enabled():
            if parameters:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        check = self._check
        owners = check.owners(parameters)
        self._unscale_unowned(owners, parameters)
        asked = {id(p): p for p in parameters if p.grad is not None}
        records = []
        for owner in owners:
            record, stepper = check.check(owner), stepper_of(owner)
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
                check.unscale(owner, record)
        if asked:
            torch.nn.utils.clip_grad_value_(asked.values(), clip_value)
        check.give_back(owners, records, parameters)

    def note_norm(
        self, parameters: Sequence[Tensor], norm: Any, max_norm: float, norm_type: float
    ) -> None:
        """Somebody else has clipped. Communicates, where the norm is a DTensor and is wanted."""
        if self._check.observer.wants_norms:
            self._note(GradNorm(parameters, whole(norm), None, float(max_norm), None, norm_type))

    def _note(self, norm: GradNorm) -> None:
        self.scaler.window.grad_norms.add(norm)

    def _clip_unscaled(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_``; where they are wanted, it leaves each one's norm."""
        grads, each = gradients_of(parameters), None
        if self._check.observer.wants_each_norm and norm_type == 2.0 and is_uniform(grads):
            each = torch.stack(list(torch._foreach_norm(grads)))
            total: Tensor = torch.linalg.vector_norm(each)
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        else:
            total = _clip_any(parameters, max_norm, norm_type)
        self._note(GradNorm(parameters, total, each, max_norm, norm_type=norm_type))
        return total

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
                norms.append(_total_norm(chosen, norm_type, record.deferred.factor))
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
        self._note(GradNorm(parameters, total, None, max_norm, norm_type=norm_type))
        return total

    def _are_whole(self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """They are just those of whole optimizers, none of them looked at yet, none shared."""
        window = self.scaler.window
        if self.scaler.sharded or window.opened_by is None:
            return False
        if any(window.record(owner).stage is not OptState.READY for owner in owners):
            return False
        mine = [id(p) for owner in owners for p in parameters_of(owner) if p.grad is not None]
        asked = list(map(id, parameters))
        same = mine == asked or (len(mine) == len(asked) and set(mine) == set(asked))
        return same and len(set(asked)) == len(asked)

    def _clip_in_one_pass(
        self,
        owners: Sequence[Optimizer],
        records: Sequence[OptimizerRecord],
        steppers: Sequence[Stepper],
        parameters: Sequence[Tensor],
        max_norm: float,
    ) -> Tensor | None:
        """One read for norm and check, one product for unscale and clip. None: not possible."""
        check, scale, window = self._check, self.scaler.window_scale, self.scaler.window
        norms = check.one_pass(owners, steppers, parameters)
        if norms is None or (norms.total is None and not norms.overflowed):
            return None
        for owner, record in zip(owners, records, strict=True):
            check.note(owner, record, parameters, norms)
        if norms.total is None:
            return torch.full(
                (), float("inf"), dtype=torch.float32, device=gradients_of(parameters)[0].device
            )
        ids = list(map(id, parameters))
        self._note(GradNorm(parameters, norms.host_total, norms.each, max_norm, ids))
        coefficient = clip_coefficient(norms.total, max_norm)
        product = coefficient / scale
        for owner, record, stepper in zip(owners, records, steppers, strict=True):
            if stepper.keeps_scaled:
                record.deferred = DeferredUnscale(multiply=product)
            elif check.divides(stepper, returned=True):
                record.deferred = DeferredUnscale(divide=scale / coefficient)
            else:
                stepper.multiply(product)
                window.unscaled.update(map(id, parameters_of(owner)))
        check.give_back(owners, records, parameters)
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
                p.grad.div_(self.scaler.window_scale)
                window.unowned[id(p)] = p, None
        return any(nonfinite(grad) for grad in gradients_of(unowned))


def _total_norm(
    parameters: Sequence[Tensor], norm_type: float, factor: Tensor | float = 1.0
) -> Tensor:
    """The norm of all gradient elements, times ``factor``, together, float32, shape ()."""
    grads = gradients_of(parameters)
    if isinstance(factor, Tensor) and 2.0 < norm_type < inf:
        # A power of what is still scaled may be past float32.
        wide = (grad.float() if grad.dtype in LOW_PRECISION else grad for grad in grads)
        norms = [torch.linalg.vector_norm(grad * factor, norm_type) for grad in wide]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total
    if all(grad.dtype not in LOW_PRECISION for grad in grads):
        total = torch.nn.utils.get_total_norm(grads, norm_type) * factor
        return total
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) * factor
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
