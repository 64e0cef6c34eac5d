"""Which module's activation or gradient was the first that was not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .ranges import Pair, Ranges, joined, shown
from .trace import Call, Entry, Gradient, Loss, Own, Pass, Place, Window, pair_of

__all__ = ["First", "search"]


@dataclass(frozen=True)
class First:
    """Where an overflow began.

    ``input`` and ``output`` are ``(lo, hi)``, NaN in both where there was a NaN, None where
    nothing was seen. In a forward: of the module's input and output. In a backward: ``output`` is
    the gradient that came in (with respect to the module's output), ``input`` the one that went
    out. For a parameter: the module's input, and the gradient with respect to its output. For a
    loss: ``output`` is the loss.
    """

    where: str
    """``"forward"``, ``"loss"``, ``"backward"`` or ``"parameter"``."""
    module: str
    """Its name in the model; ``""`` for the model itself, and for code outside of it."""
    cls: str
    """Class of the module; the dtype of a loss; ``"loss"`` for code between model and loss."""
    micro_batch: int
    """Number of the backward in its window, from 0."""
    input: Pair | None
    output: Pair | None
    text: str
    """One sentence."""

    def as_json(self) -> dict[str, Any]:
        """The form in a telemetry file: strict JSON, where inf is ``"inf"``."""
        return {
            "where": self.where,
            "module": self.module,
            "class": self.cls,
            "micro_batch": self.micro_batch,
            "input": _as_json(self.input),
            "output": _as_json(self.output),
            "text": self.text,
        }


def _as_json(pair: Pair | None) -> list[float | str] | None:
    return None if pair is None else [x if math.isfinite(x) else str(x) for x in pair]


class _Suspect(NamedTuple):
    """A call in whose forward something broken appeared."""

    call: Call
    made: list[Entry]
    is_given: bool = False
    """It was broken when the model got it."""


def search(window: Window, with_roots: bool) -> First | None:
    """Look through a window, one micro-batch after the other; None: all was finite.

    Args:
        with_roots: several models are watched; say which.
    """
    Ranges.read(window.ranges())
    return _Search(window, with_roots).run()


class _Search:
    def __init__(self, window: Window, with_roots: bool) -> None:
        self.window, self.with_roots = window, with_roots

    def run(self) -> First | None:
        window = self.window
        seen = {walk.micro for walk in window.passes} | {loss.micro for loss in window.losses}
        seen |= {each.micro for each in window.gradients} | {each.micro for each in window.own}
        for micro in sorted(seen):
            found = (
                self._forward(micro)
                or self._loss(micro)
                or self._backward(micro)
                or self._parameter(micro)
            )
            if found is not None:
                return found
        return None

    # The forward.

    def _forward(self, micro: int) -> First | None:
        losses = [loss for loss in self.window.losses if loss.micro == micro]
        is_lost = any(loss.range.is_broken for loss in losses)
        walks = sorted(
            (
                w
                for w in self.window.passes
                if w.micro == micro and (w.is_reached or not w.is_hooked)
            ),
            key=lambda walk: walk.order,
        )
        # Under a finite loss a masked score is as it should be.
        suspects = [
            s
            for walk in walks
            for s in _suspects(walk)
            if is_lost or not losses or not all(entry.range.is_masked for entry in s.made)
        ]
        spread = [s for s in suspects if _spreads(s)]
        chosen = next(iter(spread), None)
        if chosen is None and is_lost:  # it may have left by another way, as an auxiliary loss
            chosen = next(iter(suspects), None)
        if chosen is None:
            return None
        if chosen.is_given:
            chosen = self._made_without_gradient(chosen) or chosen
        return self._tell_forward(chosen, micro)

    def _made_without_gradient(self, given: _Suspect) -> _Suspect | None:
        """A detached tensor: another watched model may have made it, as a generator does."""
        for walk in sorted(self.window.passes, key=lambda walk: walk.order):
            if walk.order >= given.call.walk.order:
                return None
            for suspect in _suspects(walk):
                if _spreads(suspect) and not suspect.is_given:
                    return suspect
        return None

    def _tell_forward(self, s: _Suspect, micro: int) -> First:
        call, made = s.call, pair_of(entry.range for entry in s.made)
        if s.is_given:
            text = (
                f"input of {self._label(call.place)}, micro-batch {micro}: {shown(made)} before "
                "any module saw it: look at the data"
            )
            return self._first("forward", call.place, micro, made, _outputs(call), text)
        given = pair_of(entry.range for entry in call.inputs if not entry.is_broken)
        names = [entry.path for entry in s.made if entry.path]
        which = f"output {', '.join(names)}" if names and len(call.outputs) > 1 else "output"
        if not call.broken:
            which = "a value inside"
        text = (
            f"forward of {self._label(call.place)}, micro-batch {micro}: input {shown(given)}, "
            f"{which} {shown(made)}{_weights_of(call)}"
        )
        return self._first("forward", call.place, micro, given, made, text)

    def _loss(self, micro: int) -> First | None:
        for loss in self.window.losses:
            if loss.micro == micro and loss.range.is_broken:
                text = (
                    f"loss ({loss.dtype}), micro-batch {micro}: {shown(loss.range.values)}, "
                    f"though every activation seen is finite{self._blind()}: look at how the "
                    "loss is computed"
                )
                return First("loss", "", loss.dtype, micro, None, loss.range.values, text)
        return None

    # The backward.

    def _backward(self, micro: int) -> First | None:
        first = next(
            (g for g in self.window.gradients if g.micro == micro and g.range.is_broken), None
        )
        if first is None:
            return None
        listener = first.listener
        if listener.loss is not None:
            return self._tell_scale(first, listener.loss)
        consumers = _innermost(
            c for c in listener.consumers if all(c is not p for p in listener.producers)
        )
        # A module whose output nobody used got no gradient, and made none.
        active = [c for c in consumers if self._came(c, first)] or consumers
        shares = [
            s for s in self.window.shares if s.micro == micro and any(s.call is c for c in active)
        ]
        for share in shares:
            if share.range.is_broken:
                return self._tell_backward(share.call, first, [])
        unknown = [c for c in active if all(s.call is not c for s in shares)]
        if active and not unknown:  # every share is finite: other code, or their sum
            around = [c for c in listener.consumers if c.place.has_code and _holds_all(c, active)]
            if around:
                return self._tell_sum(max(around, key=lambda call: call.depth), first, active)
            if listener.producers:
                return self._tell_between(first)
        active = unknown or active
        if active:
            return self._tell_backward(active[-1], first, active[:-1])
        return self._tell_between(first)

    def _came(self, call: Call, first: Gradient) -> Pair | None:
        """Range of the gradient at a call's output, before the first broken one."""
        return self.window.gradient_at_output([call], first.micro, first)

    def _tell_scale(self, first: Gradient, loss: Loss) -> First:
        went, value = first.range.values, loss.range.values
        text = (
            f"gradient of the loss ({loss.dtype}), micro-batch {first.micro}: {shown(went)} while "
            f"the loss is {shown(value)}: the scale does not fit {loss.dtype}; compute the loss in "
            "float32"
        )
        return First("loss", "", loss.dtype, first.micro, went, value, text)

    def _tell_backward(self, call: Call, first: Gradient, others: list[Call]) -> First:
        came = self._came(call, first)
        shared = ", ".join(dict.fromkeys(str(c.place) for c in others if c.place is not call.place))
        text = (
            f"backward of {self._label(call.place)}, micro-batch {first.micro}: gradient of its "
            f"output {shown(came)}, gradient of its input {shown(first.range.values)}"
            f"{_forward_of(call)}{f'; or of {shared}, with the same input' if shared else ''}"
        )
        return self._first("backward", call.place, first.micro, first.range.values, came, text)

    def _tell_sum(self, call: Call, first: Gradient, parts: list[Call]) -> First:
        came, went = self._came(call, first), first.range.values
        names = ", ".join(dict.fromkeys(str(part.place) for part in parts))
        text = (
            f"backward of {self._label(call.place)}, micro-batch {first.micro}, in its own code or "
            f"the sum of what comes from there and from {names}: gradient of its output "
            f"{shown(came)}, gradient of its input {shown(went)}{_forward_of(call)}"
        )
        return self._first("backward", call.place, first.micro, went, came, text)

    def _tell_between(self, first: Gradient) -> First:
        """The broken gradient was made in code between modules."""
        made = self._last_producer(first)
        went = first.range.values
        if made.parent is None:
            text = (
                f"backward of the loss, micro-batch {first.micro}: gradient of the output of "
                f"{self._label(made.place)} {shown(went)} before any module's backward: look at "
                "how the loss is computed"
            )
            return First("backward", "", "loss", first.micro, went, None, text)
        call = made.parent
        came = self._came(call, first)
        text = (
            f"backward of {self._label(call.place)}, micro-batch {first.micro}, in its own code "
            f"after {made.place}: gradient of its output {shown(came)}, gradient of what "
            f"{made.place} gave it {shown(went)}{_forward_of(made)}"
        )
        return self._first("backward", call.place, first.micro, went, came, text)

    def _last_producer(self, first: Gradient) -> Call:
        """The outermost module that ended before the code that made the broken gradient.

        One that had got a gradient before, at another output (a model that returns its loss
        beside the logits), holds that code itself.
        """
        outside_in = sorted(first.listener.producers, key=lambda call: call.depth)
        for call in outside_in[:-1]:
            if self._came(call, first) is None:
                return call
        return outside_in[-1]

    def _parameter(self, micro: int) -> First | None:
        for own in self.window.own:
            if own.micro == micro and own.range.is_broken:
                return self._tell_parameter(own)
        return None

    def _tell_parameter(self, own: Own) -> First:
        calls = self.window.calls_of(own.place, own.micro)
        came = self.window.gradient_at_output(calls, own.micro)
        given = pair_of(e.range for call in calls for e in call.inputs if not e.is_broken)
        text = (
            f"gradient of parameter {own.name} of {self._label(own.place)}, micro-batch "
            f"{own.micro}: {shown(own.range.values)}, though activations and their gradients are "
            f"finite; module input {shown(given)}, gradient of its output {shown(came)}"
            f"{self._blind()}"
        )
        return self._first("parameter", own.place, own.micro, given, came, text)

    def _blind(self) -> str:
        return "" if self.window.passes else " (no forward was seen: is the model compiled?)"

    def _label(self, place: Place) -> str:
        return f"{place} of {place.root}" if self.with_roots and place.name else str(place)

    @staticmethod
    def _first(
        where: str, place: Place, micro: int, given: Pair | None, made: Pair | None, text: str
    ) -> First:
        return First(where, place.name, place.cls, micro, given, made, text)


def _suspects(walk: Pass) -> Iterator[_Suspect]:
    """In order of time: calls given what is finite, in which something broken appeared."""
    for left, call in walk.events:
        if left:
            if call.broken and not call.is_fed_badly:
                yield _Suspect(call, call.broken)
        elif call.is_fed_badly:
            found = [entry for entry in call.inputs if entry.is_broken]
            if call.parent is None:
                yield _Suspect(call, found, is_given=True)
            elif not call.parent.is_fed_badly:
                yield _Suspect(call.parent, found)  # its own code, or the module before: seen


def _spreads(s: _Suspect) -> bool:
    """Whether what broke got out, instead of being masked or replaced on the way."""
    outer = list(s.call.parents())
    if not s.call.broken or s.is_given:
        outer.insert(0, s.call)
    if any(call.outputs and not call.broken for call in outer):
        return False
    made = {id(entry.range) for entry in s.made}
    inside = {id(call) for call in (s.call, *outer)}
    takers = [
        call
        for left, call in s.call.walk.events
        if left and id(call) not in inside and any(id(entry.range) in made for entry in call.inputs)
    ]
    return not takers or any(call.broken or not call.outputs for call in takers)


def _innermost(calls: Iterable[Call]) -> list[Call]:
    """Those that contain none of the others, in order."""
    found = list({id(call): call for call in calls}.values())
    outer = {id(parent) for call in found for parent in call.parents()}
    return [call for call in found if id(call) not in outer]


def _holds_all(outer: Call, calls: list[Call]) -> bool:
    return all(any(parent is outer for parent in call.parents()) for call in calls)


def _outputs(call: Call) -> Pair | None:
    return pair_of(entry.range for entry in call.outputs)


def _forward_of(call: Call) -> str:
    given = pair_of(entry.range for entry in call.inputs)
    return f" (forward of {call.place}: input {shown(given)}, output {shown(_outputs(call))})"


def _weights_of(call: Call) -> str:
    """Names a module's own parameters and buffers that broke before its output could."""
    module = call.place.module()
    if module is None:
        return ""
    ranges = Ranges()
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    taken = [(name, made) for name, tensor in own if (made := ranges.take(tensor)) is not None]
    ranges.read(made for _, made in taken)
    bad = [name for name, made in taken if made.is_broken and not made.is_masked]
    if bad:
        return f"; its {', '.join(bad)} is not finite itself"
    most = min((torch.finfo(e.dtype).max for e in call.outputs), default=math.inf)
    for name, made in taken:
        lo, hi = joined([made])
        if max(-lo, hi) > most:
            return f"; its {name} is {shown((lo, hi))}, beyond {most:g}, the most its output holds"
    return ""
