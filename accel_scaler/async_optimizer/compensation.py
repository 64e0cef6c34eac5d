"""What ``delayed`` gives the model while an update is late: a preview of it.

The exact update reaches the masters beside the next forward and backward, and the model one step
later. Until then the model holds, written at the boundary, before that forward, what the next
update will be without its gradient, made of the masters and the state before, and the fresh
gradient's share of it (:mod:`.preview_rules`).

Masters only ever see exact updates, so what the model was off is gone with the next one. A
parameter without a gradient in the window is not moved by its update: it is published as it is.

What can be made before the gradient is known is made on the optimizer thread, behind the update
before: in host memory, in the model's dtype, in the buffer that is sent up. Where masters are on a
device there is no such buffer, and previews are made where they are written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UnsupportedError
from ..scaling import LOW_PRECISION
from .master_params import ParameterPair
from .preview_rules import RULES, Share, pieces_of, rule_of
from .replica import LARGEST_PART, Part, Replica, frozen
from .streams import SideStreams

logger = logging.getLogger("accel_scaler")

PIECE = 1 << 20
"""Elements that the host works on at a time, so that what is made on the way stays in its cache."""

LARGEST = torch.finfo(torch.float32).max
"""torch refuses a limit past it; no gradient is larger."""

Settings = list[dict[str, Any]]
"""Of each group, as they were when they were frozen."""


def refuse_compensation(wanted: str, optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` for a preview where none was derived."""
    if wanted == "preview" and rule_of(optimizer) is None:
        raise UnsupportedError(
            f"delay_compensation='preview': none was derived for this {type(optimizer).__name__}, "
            f"only for torch's own {', '.join(RULES)}. Use 'none', which 'auto' takes here, or "
            "step_mode='overlap'."
        )


def choose_compensation(wanted: str, optimizer: Optimizer) -> str:
    """What ``delay_compensation`` means for ``optimizer``; the choice of ``auto`` is said.

    Raises:
        UnsupportedError: a preview is wanted, and none was derived.
    """
    refuse_compensation(wanted, optimizer)
    if wanted != "auto":
        return wanted
    chosen = "none" if rule_of(optimizer) is None else "preview"
    say = logger.info if chosen == "preview" else logger.warning
    name = type(optimizer).__name__
    say("step_mode='delayed': delay_compensation='auto' takes %r for %s", chosen, name)
    return chosen


@dataclass(slots=True)
class Ahead:
    """What was made before a boundary, and what it was made of."""

    parts: list[Part]
    settings: Settings
    shares: dict[int, Share] = field(default_factory=dict)
    """By the ``id`` of a pair."""
    made_of: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Compensation:
    """Of one optimizer's late updates; there is a rule for it."""

    def __init__(self, replica: Replica, streams: SideStreams) -> None:
        rule = rule_of(replica.optimizer)
        assert rule is not None
        self._rule, self._replica, self._streams = rule, replica, streams
        self._ahead: Ahead | None = None
        self._settings: Settings | None = None
        """Those that it is made with, or will be."""

    # On the training thread.

    @property
    def has_settings(self) -> bool:
        """It is made already, or being made."""
        return self._settings is not None

    def new_settings(self) -> Settings | None:
        """The settings of the step that is to be previewed, as they are now; None: it is."""
        now: Settings = frozen(_settings_of(self._replica.optimizer))
        if self._settings is not None and _are_equal(now, self._settings):
            return None
        self._settings = now
        return now

    @property
    def makes_in_place(self) -> bool:
        """Masters are on a device: no memory is taken there, nor sent to the host and back."""
        return not self._replica.offload and not self._streams.is_host

    def follow(self) -> None:
        """Masters may be others: make buffers for those that have none."""
        if self.makes_in_place:
            return
        bare = [pair for pair in self._replica.pairs if pair.is_master and pair.ahead is None]
        for pair in bare:
            pair.ahead = pair.staging
        bare = [pair for pair in bare if pair.ahead is None]
        buffers = self._streams.host_like([pair.target for pair in bare])
        for pair, buffer in zip(bare, buffers, strict=True):
            pair.ahead = buffer

    def knows(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether every parameter with a gradient, in the order of the parts, was updated before:
        of its first update nothing is known in advance."""
        needs = list(map(self._rule.needs, self._replica.optimizer.param_groups))
        if not any(needs):
            return True
        state = self._replica.optimizer.state
        for pair in compress(self._replica.ordered, [grad is not None for grad in grads]):
            if pair.is_master and not _has(state.get(pair.param) or {}, needs[pair.group]):
                return False
        return True

    def forget(self) -> None:
        """What was made may be of something else; with nothing on its way."""
        self._ahead = self._settings = None

    # On the optimizer thread.

    @torch.no_grad()
    def prepare(self, settings: Settings) -> None:
        """Make what the next boundary publishes, of the masters and the state as they are."""
        ahead = Ahead(self._replica.parts, settings)
        ahead.made_of = self._sources()  # before: who edits one meanwhile is seen
        ahead.versions = _versions_of(ahead.made_of)
        for part in ahead.parts:
            self._make(part, ahead)
        self._ahead = ahead

    def take(self) -> Ahead:
        """What was made ahead, for one boundary; an empty one, where it would be another now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.settings is self._settings:
            self._settings = None  # else they are of the one after this already
        replica = self._replica
        settings = _settings_of(replica.copy)
        if ahead is not None and ahead.parts is replica.parts:
            found = self._sources()
            if (
                len(found) == len(ahead.made_of)
                and all(map(is_, found, ahead.made_of))
                and _versions_of(found) == ahead.versions
                and _are_equal(settings, ahead.settings)
            ):
                return ahead
        return Ahead(replica.parts, settings)

    def _sources(self) -> list[Any]:
        masters = [pair.stepped for pair in self._replica.ordered]
        return masters + [v for e in self._replica.copy.state.values() for v in e.values()]

    def publish(
        self,
        part: Part,
        ahead: Ahead,
        grads: Sequence[Tensor | None],
        factors: Sequence[float],
        newer: set[int],
    ) -> None:
        """Write to the model what the next forward shall see of ``part``.

        Args:
            grads: on the model's device.
            factors: what each is still to be multiplied by, to be unscaled and clipped.
            newer: ``id`` of parameters that have not what their masters have.
        """
        due = [
            pair.is_master and grad is not None
            for pair, grad in zip(part.pairs, grads, strict=True)
        ]
        missing = any(id(pair) not in ahead.shares for pair in compress(part.pairs, due))
        if missing and not self.makes_in_place:
            self._streams.wait_for_side()  # what is to be overwritten may be on its way up
        if missing or self.makes_in_place:
            self._make(part, ahead, due)
        for pair, grad, factor, is_late in zip(part.pairs, grads, factors, due, strict=True):
            if is_late and grad is not None:
                self._show(pair, grad, ahead.shares[id(pair)], factor)
            elif id(pair.param) in newer:
                pair.publish(self._streams)

    def _show(self, pair: ParameterPair, grad: Tensor, share: Share, factor: float) -> None:
        """Preview and share."""
        target, source = pair.target, pair.target if pair.ahead is None else pair.ahead
        if pair.ahead is not None and not self._streams.is_host:
            self._streams.up(source, target)
            source = target
        self.add_share(target, source, grad, share, factor)

    def add_share(
        self, target: Tensor, source: Tensor, grad: Tensor, share: Share, factor: float
    ) -> None:
        """``target = source + share``, one multiply and add.

        In float32 where they are narrower: rate and limit are those of a scaled gradient, which
        float16 has not (torch on a CPU rounds them to it, or refuses).
        """
        rate, limit = share.rate * factor, share.limit / factor if factor else math.inf
        for out, preview, piece in pieces_of((target, source, grad), largest_on(target.device)):
            bounded = piece.float() if piece.dtype in LOW_PRECISION else piece
            bounded = bounded if limit > LARGEST else bounded.clamp(-limit, limit)
            torch.add(preview, bounded, alpha=rate, out=out)

    def _make(self, part: Part, ahead: Ahead, due: Sequence[bool] | None = None) -> None:
        """Previews of a part, where the masters' state is known; ``due``: to be written at once."""
        state = self._replica.copy.state
        known: list[tuple[ParameterPair, Mapping[str, Any]]] = []
        for pair in part.pairs if due is None else compress(part.pairs, due):
            entry, needs = state.get(pair.stepped) or {}, self._rule.needs
            if pair.is_master and _has(entry, needs(ahead.settings[pair.group])):
                known.append((pair, entry))
        kinds: dict[Any, list[tuple[ParameterPair, Mapping[str, Any]]]] = {}
        counts = _numbers([entry.get("step", 0.0) for _, entry in known])  # SGD has none
        for count, (pair, entry) in zip(counts, known, strict=True):
            kinds.setdefault((pair.group, count), []).append((pair, entry))
        for (group, count), mine in kinds.items():
            pairs, states = [pair for pair, _ in mine], [entry for _, entry in mine]
            terms = self._rule.terms(ahead.settings[group], count, states)
            weights = [pair.stepped.detach() for pair in pairs]
            into = [pair.target if pair.ahead is None else pair.ahead for pair in pairs]
            is_wanted = due is not None or not self.makes_in_place
            largest = largest_on(weights[0].device)
            shares = terms.preview(weights, into if is_wanted else None, largest)
            ahead.shares.update(zip(map(id, pairs), shares, strict=True))


def largest_on(device: torch.device) -> int:
    """Elements that are worked on at a time there."""
    return PIECE if device.type == "cpu" else LARGEST_PART


def _settings_of(optimizer: Optimizer) -> Settings:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _versions_of(values: Iterable[Any]) -> list[int]:
    return [v._version for v in values if isinstance(v, Tensor)]


def _has(entry: Mapping[str, Any], names: Sequence[str]) -> bool:
    return all(entry.get(name) is not None for name in names)


def _numbers(values: Sequence[Any]) -> list[float]:
    """Of numbers, or tensors of shape (); waits for the device where they are there."""
    if all(isinstance(v, Tensor) and v.device.type != "cpu" for v in values) and values:
        return [float(v) for v in torch.stack(list(values)).tolist()]
    return list(map(float, values))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
