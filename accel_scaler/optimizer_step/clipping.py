"""Clipping of gradients that may still be scaled: unscale, check, clip, in this order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..scaling import (
    DeferredUnscale,
    Gathered,
    GradNorm,
    NormCheck,
    SentCheck,
    are_same,
    by_mesh,
    clip_coefficient,
    gradients_of,
    is_uniform,
    local,
    norm_of,
    parameters_of,
    total_norm,
)
from .overflow_check import OverflowCheck, Parts
from .stepper import stepper_of

logger = logging.getLogger("accel_scaler")


class Clipping:
    """Clips gradients of the optimizers that ``check`` knows."""

    def __init__(self, check: OverflowCheck) -> None:
        self._check, self.scaler, self.device = check, check.scaler, check.device
        self._has_warned = False

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of the gradients so far, unscaled. Changes nothing."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of a step clips nothing and returns "
                "the norm so far; the last micro-batch clips. (Logged once.)"
            )
        total = total_norm(parameters, norm_type)
        return total if norm_type == 0 else total / self.scaler.window_scale  # 0: a count

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale the gradients of these parameters' optimizers, clip the norm to ``max_norm``.

        ``.grad`` is then what ``torch.nn.utils.clip_grad_norm_`` leaves after ``unscale_``, bit
        for bit. Where it is float16, or bfloat16 with a master, it stays scaled and unclipped until
        the update: read-only. After an overflow nothing is clipped, and gradients may be unscaled
        or not.

        Returns the total norm before clipping, unscaled, shape (); float32 for float32 gradients or
        those of masters, else in torch's dtype; inf after an overflow. Synchronises with the
        device once for each optimizer, or once for all where unscale and clip are one product.
        """
        parameters, limits = list(parameters), (float(max_norm), float(norm_type))
        return self._check.until_finite(lambda: self._clip_norm(parameters, *limits))

    def _clip_norm(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        in_one_pass: bool = True,
    ) -> Tensor:
        sharded = self.scaler.ranks.sharded
        gathered = Gathered(parameters)
        parameters = parameters if sharded else gathered.params
        if not parameters:
            return torch.tensor(0.0, dtype=torch.float32, device=self.device)
        check, is_scaled = self._check, self.scaler.is_enabled()
        parts = check.parts(parameters)
        is_whole = in_one_pass and norm_type == 2.0 and self._are_whole(parts, parameters)
        for owner, _, record in parts if check.wants_norm and not is_whole else ():
            check.check(owner, record)  # this clip does not take the norm of all
        if is_whole and check.checks:
            norm = self._clip_in_one_pass(parts, gathered, max_norm)
            if norm is not None:
                return norm
        is_later = any(record.deferred or stepper_of(o).keeps_scaled for o, _, record in parts)
        # Ranks that agree on a verdict do so here, whatever norm each of them will find.
        is_common = any(self.scaler.ranks.has_parts(owner) for owner, _, _ in parts)
        checks_first = check.checks and (is_scaled or is_common or is_later)
        for owner, mine, record in parts if checks_first else ():
            check.check(owner, record)
            if stepper_of(owner).keeps_scaled and not record.deferred:  # nothing scaled them
                record.deferred = DeferredUnscale(multiply=check.inv_scale(mine[0].device))
            # At once: the next owner may have some of the same gradients.
            if record.deferred and not (record.found_inf or stepper_of(owner).keeps_scaled):
                check.unscale(owner, record)
        if check.checks and self._is_skipped(parts):
            return self._skip_all(parts)
        if any(record.deferred for _, _, record in parts):
            total = self._clip_scaled(parts, parameters, max_norm, norm_type)
        else:
            unchecked = parts if check.checks and not checks_first else ()
            total = self._clip_unscaled(parameters, max_norm, norm_type, unchecked)
        for _, mine, record in parts:
            record.give_back(() if record.deferred else mine)
        return total

    def _is_skipped(self, parts: Parts) -> bool:
        """Whether one of them has overflowed. With DTensors among them all of their ranks clip
        these together, so an overflow of other gradients, on one rank, is all ranks' as well."""
        found, ranks = any(record.found_inf for _, _, record in parts), self.scaler.ranks
        common = [owner for owner, _, _ in parts if ranks.has_parts(owner)]
        if not common or len(common) == len(parts):
            return found
        return ranks.agree_on_overflow(found, common[0], self.device)

    def _skip_all(self, parts: Parts) -> Tensor:
        """One of them has overflowed, so the norm of all is no number."""
        for _, _, record in parts:
            record.is_caught = not record.verdict
        return torch.full((), inf, dtype=torch.float32, device=self.device)

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Unscale as :meth:`clip_norm`, clip each element to ``[-clip_value, clip_value]``."""
        self._check.until_finite(lambda: self._clip_value(parameters, clip_value))

    def _clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        check = self._check
        parameters = [p for p in parameters if p.grad is not None]
        parts = check.parts(parameters)
        owned = {id(p) for _, mine, _ in parts for p in mine}
        unscaled = [p for p in parameters if id(p) not in owned]  # where nothing is scaled
        for owner, mine, record in parts:
            check.check(owner, record)
            if record.found_inf:  # as they were found; the others are clipped and step
                continue
            if record.deferred and stepper_of(owner).keeps_scaled:
                factors = torch.stack(record.deferred.factors(mine)).tolist()
                for grad, factor in zip(gradients_of(mine), factors, strict=True):
                    limit = clip_value / factor if factor else inf
                    limit = min(limit, torch.finfo(grad.dtype).max)
                    grad.clamp_(-limit, limit)
                continue
            if record.deferred:
                check.unscale(owner, record)
            unscaled += mine
        for some in by_mesh(unscaled):
            torch.nn.utils.clip_grad_value_(some, clip_value)
        for _, mine, record in parts:
            if not record.found_inf:
                record.give_back(mine)

    def note_norm(
        self,
        parameters: Sequence[Tensor],
        norm: Tensor,
        max_norm: float,
        norm_type: float,
        each: Tensor | None = None,
    ) -> None:
        """Record the norm of a clip."""
        new = GradNorm(parameters, norm, each, float(max_norm), norm_type)
        self.scaler.window.grad_norms.add(new)

    def _clip_unscaled(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, unchecked: Parts
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_``, and the norm of each where an observer wants it. A
        finite norm is the check of ``unchecked``, too."""
        grads, each = gradients_of(parameters), None
        if self._check.wants_each_norm and norm_type == 2.0 and is_uniform(grads):
            each = torch.stack(list(torch._foreach_norm(grads)))
            total: Tensor = torch.linalg.vector_norm(each)
        else:
            total = total_norm(parameters, norm_type, is_torchs=True)
        is_finite = not unchecked or bool(torch.isfinite(total))
        for owner, _, record in () if is_finite else unchecked:
            self._check.check(owner, record)
        if self._is_skipped(unchecked):
            return self._skip_all(unchecked)
        coefficient, held = clip_coefficient(total, max_norm), list(map(local, grads))
        # torch divides a norm past float32 by a limit of inf; where nothing is checked, so it be.
        is_clipped = max_norm != inf or not self._check.checks
        for device in {each.device for each in held} if is_clipped else ():
            mine = [each for each in held if each.device == device]
            torch._foreach_mul_(mine, coefficient.to(device))
        for owner, own, record in unchecked:
            if not is_finite or norm_type <= 0:  # the product may have made NaN of them
                self._check.forget(owner)
                continue
            count = len(gradients_of(parameters_of(owner)))
            if record.stage is OptState.READY and count == len(own):  # it has no others
                self._check.note([(owner, own, record)], own, NormCheck(None, ()))
        self.note_norm(parameters, total, max_norm, norm_type, each)
        return total

    def _clip_scaled(
        self, parts: Parts, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip gradients that stay scaled, in float32 within their step. Does not synchronise."""
        held = [([p for p in mine if p.grad is not None], r.deferred) for _, mine, r in parts]
        found: dict[int, Tensor] = {}
        for mine, deferred in held:
            found |= zip(map(id, mine), _norms(mine, norm_type, deferred), strict=True)
        # In the order given, as torch adds them up.
        norms = [found[id(p)] for p in parameters if id(p) in found]
        total = norm_of(torch.stack(norms), norm_type)
        coefficient = clip_coefficient(total, max_norm)
        for mine, deferred in held if max_norm != inf else ():
            if deferred:
                deferred.clip(mine, coefficient)
            elif mine:
                torch._foreach_mul_(gradients_of(mine), coefficient)
        self.note_norm(parameters, total, max_norm, norm_type)
        return total

    def _are_whole(self, parts: Parts, parameters: Sequence[Tensor]) -> bool:
        """True if ``parameters`` are exactly those of their optimizers, unchecked and unshared."""
        if self.scaler.ranks.sharded or self.scaler.window.opened_by is None:
            return False
        if any(record.stage is not OptState.READY for _, _, record in parts):
            return False
        mine = [p for each, _, _ in parts for p in parameters_of(each)]
        given = set(map(id, parameters))
        if are_same(mine, parameters):
            return len(given) == len(mine)
        mine = [p for p in mine if p.grad is not None]
        return len(given) == len(parameters) == len(mine) and given.issuperset(map(id, mine))

    def _clip_in_one_pass(self, parts: Parts, gathered: Gathered, max_norm: float) -> Tensor | None:
        """One read for norm and check, one product to unscale and clip. None: not possible here. On
        a device that can do so, the outcome is left there: see Note [Launch before you read]."""
        check, scale, window = self._check, self.scaler.window_scale, self.scaler.window
        # Asked once: over thousands of tensors an answer takes a while.
        stay_scaled = [stepper_of(owner).keeps_scaled for owner, _, _ in parts]
        norms = check.one_pass([owner for owner, _, _ in parts], gathered, stay_scaled)
        if norms is None or (norms.total is None and not norms.overflowed):
            return None
        for _, _, record in parts:
            record.gathered = gathered

        def undo(norms: NormCheck) -> bool:
            """They were multiplied by 1, since their norm is no number."""
            for owner, _, record in parts:
                record.deferred, record.returned = DeferredUnscale(), None
                window.unscaled.difference_update(map(id, parameters_of(owner)))
            if norms.overflowed:
                return False
            for _, _, record in parts:  # all are finite, but their norm is past float32
                record.stage, record.looked_at = OptState.READY, None
                record["found_inf_per_device"] = {}
            self._clip_norm(gathered.params, max_norm, 2.0, in_one_pass=False)
            return True

        if isinstance(norms, SentCheck):
            check.leave(parts, gathered, norms, max_norm, undo)
            product = torch.nan_to_num(clip_coefficient(norms.total, max_norm) / scale, nan=1.0)
            total = torch.nan_to_num(norms.total, nan=inf)
        else:
            check.note(parts, gathered.params, norms, max_norm)
            if norms.total is None:
                return self._skip_all(parts)
            total = norms.total
            product = clip_coefficient(total, max_norm) / scale
        for (owner, _, record), keeps_scaled in zip(parts, stay_scaled, strict=True):
            params = parameters_of(owner)
            if keeps_scaled:
                record.deferred = DeferredUnscale(multiply=product)
            else:
                grads = gathered.grads if len(parts) == 1 else gradients_of(params)
                torch._foreach_mul_(grads, product)
                window.unscaled.update(map(id, params))
            record.give_back(() if record.deferred else params)
        return total


def _norms(
    parameters: Sequence[Tensor], norm_type: float, deferred: DeferredUnscale
) -> list[Tensor]:
    """The norm of each gradient, multiplied by ``deferred``, float32, shape ()."""
    grads = gradients_of(parameters)
    if not deferred or norm_type == 0 or not grads:  # 0: a count
        return [norm_of(grad, norm_type) for grad in grads]
    factors = deferred.factors(parameters)
    if 2.0 < norm_type < inf:  # a power of a scaled element may be past float32
        pairs = zip(grads, factors, strict=True)
        return [norm_of(grad.float() * factor, norm_type) for grad, factor in pairs]
    scaled = torch.stack([norm_of(grad, norm_type) for grad in grads])
    return list((scaled * torch.stack(factors)).unbind())
