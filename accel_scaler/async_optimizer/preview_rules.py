"""What an optimizer's next update will be before its gradient is known: one rule a class.

All of an update is known in advance but what the gradient adds to it and to the second moments. A
rule says the known part exactly, from the state after ``k`` updates; second moments are taken to
stay as they are, bias corrected. What the gradient adds is its share, with one step size for each
tensor: the root of the mean of its second moments stands for each of them. With ``w`` the
parameter, ``g`` its gradient (unscaled, clipped; negated by ``maximize``) and ``wd`` a weight decay
that is added to the gradient:

    preview = keep * w - velocity_rate * b - momentum_rate * m / d - gradient_rate * e
    share   = -gradient_rate * clamp(g / rms(d), -reach, reach)
    e       = clamp(wd * w / d, -reach, reach)
    d       = root_scale * root + eps,    rms(d) = root_scale * sqrt(mean(root**2)) + eps
    root    = sqrt(v)

``reach`` is the most that any gradient divided by its own second moment comes to, since it is part
of that itself: sqrt((1 - b2^(k+1)) / (1 - b2)) for Adam. It matters where second moments say little
of the gradient to come: of a matrix whose gradients were zero so far (LoRA), of rare tokens.

Optimizers without second moments have no ``d`` (it is 1): preview and share are then the update
itself, up to rounding. Each rule is the formula in the documentation of its class in
``torch.optim``, with ``g`` set apart. What previews do to a run: docs/one-step-late.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .supported_optimizers import known_class

Group = Mapping[str, Any]
States = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Terms:
    """The known terms of tensors that share settings and counts; lists have an entry for each."""

    gradient_rate: float
    """Below zero with ``maximize``."""
    keep: float = 1.0
    weight_decay: float = 0.0
    velocity: list[Tensor] = field(default_factory=list)
    velocity_rate: float = 0.0
    momentum: list[Tensor] = field(default_factory=list)
    momentum_rate: float = 0.0
    seconds: list[Tensor] = field(default_factory=list)
    """Second moments; empty: ``d`` is 1."""
    root_scale: float = 1.0
    eps: float = 0.0
    reach: float = math.inf

    def preview(
        self, weights: list[Tensor], into: list[Tensor] | None, largest: int
    ) -> list[Share]:
        """Write previews of ``weights``, float32, into tensors of the same shapes, rounded.

        Args:
            into: None: only the shares are wanted.
            largest: so many elements are worked on at a time, at most so many are taken for it,
                three times.

        Returns what each gradient adds. Waits for the device where there are second moments.
        """
        norms: list[Tensor] = []
        owners: list[int] = []
        kept = self.keep - (0.0 if self.seconds else self._decay_rate)
        for places, pieces in self._batches(weights, into, largest):
            w, out, velocity, momentum, seconds = map(list, zip(*pieces, strict=True))
            roots = list(torch._foreach_sqrt(seconds)) if self.seconds else []
            if roots:
                norms += torch._foreach_norm(roots)
                owners += places
            if into is None:
                continue
            found = list(torch._foreach_mul(w, kept))
            if self.velocity_rate:
                torch._foreach_add_(found, velocity, alpha=-self.velocity_rate)
            if roots:
                torch._foreach_add_(roots, self.eps / self.root_scale)
                rate = self.momentum_rate / self.root_scale
                torch._foreach_addcdiv_(found, momentum, roots, value=-rate) if rate else None
                if self._decay_rate:
                    self._add_decay(found, w, roots)
            torch._foreach_copy_(out, found)
        squares = [0.0] * len(weights)
        if norms:
            for owner, norm in zip(owners, torch.stack(norms).tolist(), strict=True):
                squares[owner] += norm * norm
        return [self._share(q, w.numel()) for q, w in zip(squares, weights, strict=True)]

    @property
    def _decay_rate(self) -> float:
        return abs(self.gradient_rate) * self.weight_decay

    def _add_decay(self, found: list[Tensor], weights: list[Tensor], roots: list[Tensor]) -> None:
        decays = list(torch._foreach_div(weights, roots))
        most = self.reach * self.root_scale / self.weight_decay
        torch._foreach_clamp_min_(decays, -most)
        torch._foreach_clamp_max_(decays, most)
        torch._foreach_add_(found, decays, alpha=-self._decay_rate / self.root_scale)

    def _batches(
        self, weights: list[Tensor], into: list[Tensor] | None, largest: int
    ) -> Iterator[tuple[list[int], list[tuple[Tensor, ...]]]]:
        """Pieces of all tensors, so many that they have ``largest`` elements, and whose they are.

        Each is a tuple: weights, where to, velocity, momentum, second moments; what there is none
        of is the weights again.
        """
        columns = (into, self.velocity, self.momentum, self.seconds)
        places: list[int] = []
        pieces: list[tuple[Tensor, ...]] = []
        have = 0
        for place, w in enumerate(weights):
            row = (w, *(column[place] if column else w for column in columns))
            for piece in pieces_of(row, largest):
                pieces.append(piece)
                places.append(place)
                have += piece[0].numel()
                if have >= largest:
                    yield places, pieces
                    places, pieces, have = [], [], 0
        if pieces:
            yield places, pieces

    def _share(self, square: float, size: int) -> Share:
        """``square``: the sum of those of its roots."""
        if not self.seconds:
            return Share(-self.gradient_rate, math.inf)
        rms = self.root_scale * math.sqrt(square) / math.sqrt(max(size, 1)) + self.eps
        return Share(-self.gradient_rate / rms, self.reach * rms) if rms > 0.0 else Share(0.0, 0.0)


def pieces_of(tensors: Sequence[Tensor], largest: int) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, cut alike: flat pieces of ``largest`` elements, where memory allows."""
    if tensors[0].numel() <= largest or not all(map(Tensor.is_contiguous, tensors)):
        yield tuple(tensors)
    else:
        yield from zip(*(torch.split(t.view(-1), largest) for t in tensors), strict=True)


class Share(NamedTuple):
    """What a gradient adds at once: ``rate * clamp(g, -limit, limit)``."""

    rate: float
    limit: float


class Rule(NamedTuple):
    """Of one class of optimizers."""

    terms: Callable[[Group, float, States], Terms]
    """From a group's settings, the updates that were done, and the state of some of its tensors."""
    needs: Callable[[Group], Sequence[str]]
    """What a tensor's state must hold; before its first update it does not."""


def _sign(group: Group) -> float:
    return -1.0 if group.get("maximize") else 1.0


def _rate(group: Group) -> float:
    return float(group["lr"])


def _sgd(group: Group, k: float, states: States) -> Terms:
    """b' = mu b + (1 - dampening) g', g' = g + wd w. Update: l b', with Nesterov l (g' + mu b')."""
    rate, mu = _rate(group), float(group["momentum"])
    gradient, velocity, held = rate, 0.0, []
    if mu:
        held = _each(states, "momentum_buffer")
        kept = 1.0 - group["dampening"]
        gradient, velocity = rate * kept, rate * mu
        if group["nesterov"]:
            gradient, velocity = rate * (1.0 + mu * kept), rate * mu * mu
    return Terms(
        _sign(group) * gradient,
        weight_decay=float(group["weight_decay"]),
        velocity=held,
        velocity_rate=velocity,
    )


def _adam(group: Group, k: float, states: States) -> Terms:
    """m' = b1 m + (1 - b1) g, l m' / (1 - b1^(k+1)) / (sqrt(v / (1 - b2^k)) + eps).

    ``v`` is the largest one so far with ``amsgrad``. Decoupled decay: w (1 - l wd); else g + wd w.
    """
    rate = _rate(group)
    beta1, beta2 = map(float, group["betas"])
    step, square = rate / (1.0 - beta1 ** (k + 1)), "exp_avg_sq"
    terms = Terms(
        _sign(group) * step * (1.0 - beta1),
        momentum=_each(states, "exp_avg"),
        momentum_rate=step * beta1,
        seconds=_each(states, "max_" + square if group["amsgrad"] else square),
        root_scale=1.0 / math.sqrt(_correction(beta2, k)),
        eps=float(group["eps"]),
        reach=math.sqrt(_correction(beta2, k + 1) / (1.0 - beta2)),
    )
    return _decayed(terms, group)


def _adamw(group: Group, k: float, states: States) -> Terms:
    """Adam's, with decoupled decay; older releases of torch do not say so in the group."""
    return _adam({"decoupled_weight_decay": True, **group}, k, states)


def _correction(beta: float, k: float) -> float:
    """Of a running mean's bias; 1 where it was made and never updated."""
    return 1.0 - beta**k if k > 0.0 else 1.0


def _each(states: States, name: str) -> list[Tensor]:
    return [state[name] for state in states]


def _decayed(terms: Terms, group: Group) -> Terms:
    weight_decay = float(group["weight_decay"])
    if group.get("decoupled_weight_decay"):
        terms.keep -= _rate(group) * weight_decay
    else:
        terms.weight_decay = weight_decay
    return terms


def _adam_needs(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg",)


RULES: dict[str, Rule] = {
    "SGD": Rule(_sgd, lambda group: ("momentum_buffer",) if group["momentum"] else ()),
    "Adam": Rule(_adam, _adam_needs),
    "AdamW": Rule(_adamw, _adam_needs),
}
"""By the name of torch's class."""


def rule_of(optimizer: Optimizer) -> Rule | None:
    """The rule by which ``optimizer`` steps; None: none was derived."""
    known = known_class(type(optimizer))
    if known is None or not known.__module__.startswith("torch.optim"):
        return None
    return RULES.get(known.__name__)
