"""Previews: what ``delayed`` gives the model while the exact update is one step late.

Note [Previews]
---------------
Masters only ever see exact updates. Until one of them is published, the model holds its preview,
which is made of masters and state before the gradient is known, plus the share of the fresh
gradient. With ``w`` the parameter, ``g`` its gradient (unscaled, clipped) and ``wd`` a weight decay
that is added to the gradient:

    preview = keep * w - velocity_rate * b - momentum_rate * m / d - gradient_rate * e
    share   = -gradient_rate * clamp(g / rms(d), -reach, reach)
    e       = clamp(wd * w / d, -reach, reach)
    d       = root_scale * sqrt(v) + eps,    rms(d) = sqrt(mean(d**2))

The preview is exact, except that it takes the bias-corrected second moments ``v`` to stay as they
are. The share has one step size for each tensor; ``maximize`` negates it alone. ``reach`` bounds a
gradient divided by the root of its own second moment, of which it is a part: for Adam it is
sqrt((1 - b2^(k+1)) / (1 - b2)). It matters where second moments say little of the gradient: LoRA's
zero matrices, rare tokens.

SGD has no second moments (``d`` is 1): preview plus share is the update itself, up to rounding.
:func:`sgd_terms` and :func:`adam_terms` are the formulas in the documentation of ``torch.optim``,
with ``g`` set apart. A parameter without a gradient is published as it is.

Previews are prepared on the optimizer thread, right after the update before: in host memory, in the
model's dtype, in the buffer that is sent up. A block is prepared while its update has it in cache
if the next settings are known by then (a training forward has begun), else after the update. Where
masters are on a device, previews are made at the boundary, in the model itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from ..errors import UnsupportedError
from ..optimizer_step import Block, Placed, Run, stretches
from ..scaling import LOW_PRECISION, DeferredUnscale
from .replica import Part, Replica, frozen
from .supported_optimizers import is_known

logger = logging.getLogger("accel_scaler")

MAX_LIMIT = torch.finfo(torch.float32).max
"""torch refuses a limit past it; no gradient is larger."""

Group = Mapping[str, Any]
Settings = list[dict[str, Any]]
"""The hyperparameters of each parameter group, copied by :func:`frozen`."""


class Share(NamedTuple):
    """What a gradient adds to a preview: ``rate * clamp(g, -limit, limit)``."""

    rate: float
    limit: float


@dataclass(slots=True)
class Terms:
    """The numbers in the formula, for tensors that share settings and counts of steps."""

    gradient_rate: float
    """Below zero with ``maximize``; ``e`` is multiplied by its magnitude."""
    keep: float = 1.0
    weight_decay: float = 0.0
    velocity_rate: float = 0.0
    momentum_rate: float = 0.0
    is_rooted: bool = False
    """There are second moments; else ``d`` is 1."""
    root_scale: float = 1.0
    eps: float = 0.0
    reach: float = math.inf

    def write(
        self,
        w: Tensor,
        velocity: Tensor | None,
        momentum: Tensor | None,
        seconds: Tensor | None,
        found: Tensor | None,
        roots: Tensor,
    ) -> None:
        """Write the preview of ``w`` to ``found`` (None: nowhere) and, where there are second
        moments, ``d / root_scale`` to ``roots``.

        Args:
            w: float32; the others are of its shape. None: the optimizer has none.
        """
        if seconds is not None:
            torch.sqrt(seconds, out=roots)
            roots.add_(self.eps / self.root_scale)
        if found is None:
            return
        torch.mul(w, self.keep - (0.0 if self.is_rooted else self._decay_rate), out=found)
        if velocity is not None and self.velocity_rate:
            found.add_(velocity, alpha=-self.velocity_rate)
        if momentum is not None and (rate := self.momentum_rate / self.root_scale):
            found.addcdiv_(momentum, roots, value=-rate)
        if self.is_rooted and self._decay_rate:
            limit = self.reach * self.root_scale / self.weight_decay
            decays = torch.div(w, roots).clamp_(-limit, limit)
            found.add_(decays, alpha=-self._decay_rate / self.root_scale)

    def shares(
        self, sizes: Sequence[int], owners: Sequence[int], norms: list[Tensor]
    ) -> list[Share]:
        """What each gradient adds to its preview.

        Args:
            sizes: elements of each parameter.
            owners: the place of each of ``norms`` among ``sizes``.
            norms: 2-norms of what :meth:`write` has written to ``roots``; [] without second
                moments. Synchronises with their device.
        """
        if not self.is_rooted:
            return [Share(-self.gradient_rate, math.inf)] * len(sizes)
        each, lengths = torch.stack(norms).double().cpu(), torch.tensor(sizes).double()
        squares = torch.zeros_like(lengths).index_add_(0, torch.tensor(owners), each * each)
        rms = self.root_scale * (squares / lengths.clamp(min=1.0)).sqrt()
        rates = torch.where(rms > 0.0, -self.gradient_rate / rms, 0.0)
        return list(map(Share, rates.tolist(), (self.reach * rms).tolist()))

    @property
    def _decay_rate(self) -> float:
        return abs(self.gradient_rate) * self.weight_decay


def sgd_terms(group: Group, k: float) -> Terms:
    """b' = mu b + (1 - dampening) g', g' = g + wd w. Update: l b', with Nesterov l (g' + mu b')."""
    rate, mu = float(group["lr"]), float(group["momentum"])
    gradient, velocity = rate, 0.0
    if mu:
        kept = 1.0 - group["dampening"]
        gradient, velocity = rate * kept, rate * mu
        if group["nesterov"]:
            gradient, velocity = rate * (1.0 + mu * kept), rate * mu * mu
    return Terms(
        -gradient if group.get("maximize") else gradient,
        weight_decay=float(group["weight_decay"]),
        velocity_rate=velocity,
    )


def adam_terms(group: Group, k: float) -> Terms:
    """m' = b1 m + (1 - b1) g, l m' / (1 - b1^(k+1)) / (sqrt(v / (1 - b2^k)) + eps).

    ``v`` is the largest one so far with ``amsgrad``. Decoupled decay: w (1 - l wd); else g + wd w.
    """
    rate, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    is_decoupled = bool(group.get("decoupled_weight_decay"))
    step = rate / (1.0 - beta1 ** (k + 1))
    gradient = step * (1.0 - beta1)
    correction = 1.0 - beta2**k if k > 0.0 else 1.0
    return Terms(
        -gradient if group.get("maximize") else gradient,
        keep=1.0 - rate * weight_decay if is_decoupled else 1.0,
        weight_decay=0.0 if is_decoupled else weight_decay,
        momentum_rate=step * beta1,
        is_rooted=True,
        root_scale=1.0 / math.sqrt(correction),
        eps=float(group["eps"]),
        reach=math.sqrt((1.0 - beta2 ** (k + 1)) / (1.0 - beta2)),
    )


def _adamw_terms(group: Group, k: float) -> Terms:
    """Older releases of torch do not say in the group that the decay is decoupled."""
    return adam_terms({"decoupled_weight_decay": True, **group}, k)


class PreviewRule(NamedTuple):
    """How one class of optimizers is previewed."""

    terms: Callable[[Group, float], Terms]
    """From a group's settings, and the number of updates done."""
    columns: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    """Velocity, momentum and second moments among a parameter's state, in the order of its keys."""


RULES = {
    "SGD": PreviewRule(sgd_terms, lambda velocity=None: (velocity, None, None)),
    "Adam": PreviewRule(adam_terms, lambda average, *squares: (None, average, squares[-1])),
    "AdamW": PreviewRule(_adamw_terms, lambda average, *squares: (None, average, squares[-1])),
}
"""By the name of torch's class."""


def rule_of(optimizer: Optimizer) -> PreviewRule | None:
    """The rule by which ``optimizer`` is previewed; None: there is none."""
    return RULES.get(type(optimizer).__name__) if is_known(type(optimizer)) else None


def refuse_compensation(wanted: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` if a preview is wanted and the optimizer has none."""
    if wanted == "preview" and rule_of(optimizer) is None:
        raise UnsupportedError(
            f"delay_compensation='preview': got a {type(optimizer).__name__}, expected torch's "
            f"own {', '.join(RULES)}. Use 'none', which 'auto' takes here, or step_mode='overlap'."
        )


def make_previews(wanted: str, replica: Replica) -> Previews | None:
    """The previews that ``delay_compensation`` asks for; logs the choice of ``"auto"``.

    Raises:
        UnsupportedError: a preview is wanted and the optimizer has none.
    """
    optimizer = replica.optimizer
    refuse_compensation(wanted, optimizer)
    rule = None if wanted == "none" else rule_of(optimizer)
    if wanted == "auto":
        log = logger.warning if rule is None else logger.info
        chosen, name = "none" if rule is None else "preview", type(optimizer).__name__
        log("step_mode='delayed': delay_compensation='auto' takes %r for %s", chosen, name)
    return None if rule is None else Previews(rule, replica)


@dataclass(slots=True)
class Prepared:
    """Previews made before the boundary that publishes them."""

    parts: list[Part]
    settings: Settings
    shares: dict[int, Share] = field(default_factory=dict)
    """By the ``id`` of a pair."""


class Behind:
    """Prepares the previews of some neighbours in an arena, block by block.

    Args:
        writes: False: only the shares, since the model may not be written to yet.
    """

    def __init__(
        self,
        prepared: Prepared,
        pairs: Sequence[Placed],
        rule: PreviewRule,
        count: float,
        writes: bool = True,
    ) -> None:
        self._prepared, self._pairs, self._rule, self._writes = prepared, pairs, rule, writes
        self._terms = rule.terms(prepared.settings[pairs[0].group], count)
        self._first = pairs[0].slot
        self._owners: list[int] = []
        self._norms: list[Tensor] = []

    def block(self, run: Run, block: Block) -> None:
        """Write the previews of a block, from its masters and state as they are."""
        terms, found, roots = self._terms, run.scratch(block), run.scratch(block, 1)
        for w, *state, new, root in zip(*run.joined(block, found, roots), strict=True):
            terms.write(w, *self._rule.columns(*state), new if self._writes else None, root)
        if self._writes:
            torch._foreach_copy_(block.previews or block.targets, found)
        if terms.is_rooted:
            self._norms += torch._foreach_norm(roots)
            self._owners += [slot - self._first for slot in block.slots]

    def end(self) -> None:
        """Note the shares of the gradients. Synchronises with a device."""
        sizes = [pair.stepped.numel() for pair in self._pairs]
        shares = self._terms.shares(sizes, self._owners, self._norms)
        self._prepared.shares.update(zip(map(id, self._pairs), shares, strict=True))


class Previews:
    """Previews of one optimizer's updates. See Note [Previews]."""

    def __init__(self, rule: PreviewRule, replica: Replica) -> None:
        self._rule, self._replica, self._streams = rule, replica, replica.streams
        self._prepared: Prepared | None = None
        self._next: Prepared | None = None
        """What is prepared, or being prepared, for the next boundary."""

    # On the training thread.

    @property
    def is_prepared(self) -> bool:
        """Previews are prepared, or being prepared."""
        return self._next is not None

    def begin(self) -> Prepared | None:
        """What is to be prepared for the settings as they are now; None: that has begun already.

        From here on an update that is running prepares what it updates (:meth:`behind`)."""
        now: Settings = frozen(_settings_of(self._replica.optimizer))
        if self._next is not None and _are_equal(now, self._next.settings):
            return None
        self._next = Prepared(self._replica.parts, now)
        return self._next

    @property
    def _writes_at_once(self) -> bool:
        """Masters are on a device: previews are made in the model, without memory of their own."""
        return not self._replica.offload and not self._streams.is_host

    def follow(self) -> None:
        """Make preview buffers for masters in host memory that have none."""
        if self._writes_at_once:
            return
        bare = [pair for pair in self._replica.pairs if pair.is_master and pair.preview is None]
        for pair in bare:
            pair.preview = pair.staging
        bare = [pair for pair in bare if pair.preview is None]
        buffers = self._streams.host_like([pair.target for pair in bare])
        for pair, buffer in zip(bare, buffers, strict=True):
            pair.preview = buffer

    def covers(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether every parameter that has one of ``grads`` (in the order of the parts) was updated
        before: a first update cannot be previewed."""
        stepped = compress(self._replica.ordered, [grad is not None for grad in grads])
        groups = self._replica.optimizer.param_groups
        return all(
            pair.has_state or not self._replica.keys_of(groups[pair.group])
            for pair in stepped
            if pair.is_master
        )

    def forget(self) -> None:
        """Drop what was prepared: masters or state may be edited. Nothing may be preparing now."""
        self._prepared = self._next = None

    # On the optimizer thread.

    @torch.no_grad()
    def prepare(self, prepared: Prepared) -> None:
        """Prepare what :meth:`behind` has left out, from masters and state as they are."""
        for part in prepared.parts:
            left = [id(pair) not in prepared.shares for pair in part.pairs]
            self._make(part, prepared, left, writes=not self._writes_at_once)
        self._prepared = prepared

    def behind(self) -> Callable[[Run, int, int], Behind | None] | None:
        """The ``follow`` of :meth:`.Run.step` that prepares updated blocks; None: not yet."""
        prepared = self._next
        if prepared is None or prepared.parts is not self._replica.parts or self._writes_at_once:
            return None

        def follow(run: Run, a: int, b: int) -> Behind | None:
            counts = run.counts(a, b)
            alike = min(counts) == max(counts)
            return Behind(prepared, run.pairs[a:b], self._rule, counts[0]) if alike else None

        return follow

    def take(self) -> Prepared:
        """What was prepared for this boundary; empty where settings or parts have changed since."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared is self._next:
            self._next = None  # else that is of the one after this already
        parts, settings = self._replica.parts, _settings_of(self._replica.copy)
        fits = prepared is not None and prepared.parts is parts
        if prepared is not None and fits and _are_equal(settings, prepared.settings):
            return prepared
        return Prepared(parts, settings)

    def publish(
        self,
        part: Part,
        prepared: Prepared,
        grads: Sequence[Tensor | None],
        factors: Sequence[float],
        newer: set[int],
    ) -> None:
        """Write to the model what the next forward sees of ``part``.

        Args:
            grads: on the model's device.
            factors: what each is still to be multiplied by, to be unscaled and clipped.
            newer: ``id`` of parameters whose masters are newer than the model.
        """
        due = [
            pair.is_master and grad is not None
            for pair, grad in zip(part.pairs, grads, strict=True)
        ]
        missing = any(id(pair) not in prepared.shares for pair in compress(part.pairs, due))
        if missing and not self._writes_at_once:
            self._streams.wait_for_side()  # the memory that is overwritten may still be sent up
        if missing or self._writes_at_once:
            self._make(part, prepared, due, writes=True)
        for _, places, run in self._replica.runs_of(part):
            mine, scaled = [grads[place] for place in places], [factors[place] for place in places]
            in_blocks = not self._replica.sends and run.is_laid_out(mine)
            for a, b in stretches([not due[place] for place in places], [in_blocks] * len(places)):
                for block in run.blocks_of(a, b) if in_blocks else ():
                    run.gather(block, mine, DeferredUnscale(), copies=True)
                    shares = [prepared.shares[id(run.pairs[i])] for i in block.places]
                    _add_shares(run, block, shares, [scaled[i] for i in block.places])
                for place in () if in_blocks else range(a, b):
                    share = prepared.shares[id(run.pairs[place])]
                    self._add_share(run.pairs[place], mine[place], share, scaled[place])
        for pair, is_due in zip(part.pairs, due, strict=True):
            if not is_due and id(pair.param) in newer:
                pair.publish(self._streams)

    def _add_share(self, pair: Placed, grad: Tensor | None, share: Share, factor: float) -> None:
        """Like :func:`_add_shares`, but for one parameter and on the model's device."""
        assert grad is not None
        if pair.preview is not None:
            self._streams.up(pair.preview, pair.target)
        rate, limit = _scaled(share, factor)
        bounded = grad.float() if grad.dtype in LOW_PRECISION else grad
        bounded = bounded if limit > MAX_LIMIT else bounded.clamp(-limit, limit)
        torch.add(pair.target, bounded, alpha=rate, out=pair.target)

    def _make(self, part: Part, prepared: Prepared, due: Sequence[bool], writes: bool) -> None:
        """Make the previews of those that are ``due`` and whose state is known; not ``writes``:
        only the shares of their gradients."""
        for _, places, run in self._replica.runs_of(part):
            left_out = [not (due[p] and part.pairs[p].is_master) for p in places]
            left_out = [
                out or not (run.pairs[i].has_state or not run.keys)
                for i, out in enumerate(left_out)
            ]
            for a, b in stretches(left_out, run.counts(0, len(places))):
                count = run.counts(a, a + 1)[0]
                behind = Behind(prepared, run.pairs[a:b], self._rule, count, writes)
                for block in run.blocks_of(a, b):
                    behind.block(run, block)
                behind.end()


def _scaled(share: Share, factor: float) -> Share:
    """The share of a gradient that is still to be multiplied by ``factor``.

    Rate and limit are scaled instead of a float16 gradient, which could not hold the product.
    """
    return Share(share.rate * factor, share.limit / factor if factor else math.inf)


def _add_shares(run: Run, block: Block, shares: Sequence[Share], factors: Sequence[float]) -> None:
    """Write ``preview + share`` to the model, one multiply and add, from gradients in scratch."""
    grads, sums = run.scratch(block), run.scratch(block, 1)
    rates, limits = zip(*map(_scaled, shares, factors), strict=True)
    torch._foreach_copy_(sums, block.previews or block.targets)
    if min(limits) < MAX_LIMIT:
        most = [min(limit, MAX_LIMIT) for limit in limits]
        if len(grads) == 1:  # in one operation
            grads[0].clamp_(-most[0], most[0])
        else:
            torch._foreach_clamp_max_(grads, most)
            torch._foreach_clamp_min_(grads, [-limit for limit in most])
    # With the rates as tensors the kernel rounds once, as add_ does with ``alpha``.
    torch._foreach_addcmul_(sums, grads, torch.tensor(rates, device=sums[0].device).unbind())
    torch._foreach_copy_(block.targets, sums)


def _settings_of(optimizer: Optimizer) -> Settings:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _are_equal(one: Settings, other: Settings) -> bool:
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    return structure == other_structure and all(map(_is_equal, leaves, others))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
