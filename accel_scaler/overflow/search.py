"""Which module's activation or gradient was the first that was not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from ..scaling import Origin, Pair
from .trace import (
    Call,
    Entry,
    Gradient,
    Loss,
    Range,
    WatchedModule,
    WindowTrace,
    in_words,
    pair_of,
)


def search(window: WindowTrace) -> Origin | None:
    """Look through a window, one micro-batch after the other; None if all was finite."""
    Range.read(window.ranges())
    for micro in window.micro_batches():
        each = _MicroBatch(window, micro)
        found = each.forward() or each.loss() or each.backward() or each.parameter()
        if found is not None:
            return found
    return None


class _Suspect(NamedTuple):
    """A call in whose forward a non-finite value appeared."""

    call: Call
    made: list[Entry]
    is_data: bool = False
    """The model was given that value."""

    @property
    def spreads(self) -> bool:
        """Whether a non-finite value got out of the model, instead of being masked on the way."""
        outer = list(self.call.parents())
        if not self.call.bad_outputs or self.is_data:
            outer.insert(0, self.call)
        return all(each.bad_outputs or not each.outputs for each in outer)

    @property
    def is_masked(self) -> bool:
        return all(entry.range.is_masked for entry in self.made)


class _MicroBatch:
    """The search in one micro-batch, in the order in which it ran."""

    def __init__(self, window: WindowTrace, micro: int) -> None:
        self.window, self.micro = window, micro
        self.events = [event for event in window.events if event[1].micro == micro]
        self.losses = [loss for loss in window.losses if loss.micro == micro]
        self.is_loss_finite = all(loss.range.is_finite for loss in self.losses)

    def forward(self) -> Origin | None:
        """The origin in the first module that made a non-finite value which got out of it."""
        later = [loss for loss in self.window.losses if loss.micro >= self.micro]
        if later and all(loss.range.is_finite for loss in later):
            return None
        suspects = list(self._suspects())
        found = [each for each in suspects if each.spreads]
        if not self.is_loss_finite:
            found = found or suspects  # it may have left by another way, as an auxiliary loss
        elif self.losses:
            found = [each for each in found if not each.is_masked]
        found.sort(key=lambda each: each.is_masked)  # a masked score is as it should be
        return self._in_forward(found[0]) if found else None

    def _suspects(self) -> Iterator[_Suspect]:
        """In order of time: calls with finite inputs in which a non-finite value appeared."""
        for is_over, call in self.events:
            bad_inputs = call.bad_inputs
            if is_over:
                if call.bad_outputs and not bad_inputs:
                    yield _Suspect(call, call.bad_outputs)
            elif bad_inputs:
                if call.parent is None:
                    yield _Suspect(call, bad_inputs, is_data=True)
                elif not call.parent.bad_inputs:
                    # Its own code made it, or a module before, which was seen.
                    yield _Suspect(call.parent, bad_inputs)

    def _in_forward(self, suspect: _Suspect) -> Origin:
        call, made = suspect.call, pair_of(suspect.made)
        if suspect.is_data:
            first = next(each for _, each in self.events if each.parent is None)
            what = "batch" if call is first else f"input of {call.module}"
            bad = in_words(made).split()[-1]
            text = f"the {what} already contained {bad}, micro-batch {self.micro}"
            return self._origin("forward", call.module, made, pair_of(call.outputs), text)
        given = pair_of(entry for entry in call.inputs if entry.is_finite)
        which = "output" if call.bad_outputs else "a value inside"
        text = (
            f"forward of {call.module}, micro-batch {self.micro}: input "
            f"{in_words(given)}, {which} {in_words(made)}"
        )
        return self._origin("forward", call.module, given, made, text)

    def loss(self) -> Origin | None:
        """The origin in a loss of finite activations."""
        loss = next((loss for loss in self.losses if not loss.range.is_finite), None)
        if loss is None:
            return None
        text = (
            f"loss ({loss.dtype}), micro-batch {self.micro}: {in_words(loss.range.values)}, "
            f"though every activation seen is finite{self._unseen()}: look at how the "
            "loss is computed"
        )
        return Origin("loss", "", loss.dtype, self.micro, None, loss.range.values, text)

    def backward(self) -> Origin | None:
        """The origin of the first non-finite gradient: a module, its own code, or the loss."""
        gradients = (g for g in self.window.gradients if g.micro == self.micro)
        first = next((g for g in gradients if not g.range.is_finite), None)
        if first is None:
            return None
        seen = first.seen
        if seen.loss is not None:
            return self._at_loss(first, seen.loss)
        if any(not entry.is_finite for call in seen.producers for entry in call.outputs):
            # The loss leaves out non-finite rows, as rows without a label: their gradient is NaN.
            made = next((each for each in self._suspects() if not each.is_data), None)
            if made is not None:
                return self._in_forward(made)
        consumers = _innermost(c for c in seen.consumers if c not in seen.producers)
        return self._in_backward(consumers[-1], first) if consumers else self._between(first)

    def _gradient_at_output(self, call: Call, first: Gradient) -> Pair | None:
        """Range of the gradients of a call's outputs that came before ``first``."""
        return pair_of(
            each
            for each in takewhile(lambda each: each is not first, self.window.gradients)
            if each.micro == self.micro and call in each.seen.producers
        )

    def _at_loss(self, first: Gradient, loss: Loss) -> Origin:
        made, value = first.range.values, loss.range.values
        text = (
            f"gradient of the loss ({loss.dtype}), micro-batch {self.micro}: {in_words(made)} "
            f"while the loss is {in_words(value)}: the scale does not fit {loss.dtype}; compute "
            "the loss in float32"
        )
        return Origin("loss", "", loss.dtype, self.micro, made, value, text)

    def _in_backward(self, call: Call, first: Gradient, before: Call | None = None) -> Origin:
        """The origin in a module, or with ``before`` in its own code after that call."""
        came, made = self._gradient_at_output(call, first), first.range.values
        after, taker = "", "its input"
        if before is not None:
            after = f", in its own code after {before.module}"
            taker = f"what {before.module} gave it"
        text = (
            f"backward of {call.module}, micro-batch {self.micro}{after}: gradient of its output "
            f"{in_words(came)}, gradient of {taker} {in_words(made)}{_forward_of(before or call)}"
        )
        return self._origin("backward", call.module, made, came, text)

    def _between(self, first: Gradient) -> Origin:
        """The origin in code between modules, or in the loss that a model may compute itself."""
        before = min(first.seen.producers, key=lambda call: len([*call.parents()]))
        if before.parent is not None:
            return self._in_backward(before.parent, first, before)
        made = first.range.values
        text = (
            f"backward of the loss, micro-batch {self.micro}: gradient of the output of "
            f"{before.module} {in_words(made)} before any module's backward: look at how the loss "
            "is computed"
        )
        return Origin("backward", "", "loss", self.micro, made, None, text)

    def parameter(self) -> Origin | None:
        """The origin in a parameter's gradient, of finite activations and gradients."""
        for each in self.window.parameter_gradients:
            if each.micro == self.micro and not each.range.is_finite:
                text = (
                    f"gradient of parameter {each.name} of {each.module}, micro-batch "
                    f"{self.micro}: {in_words(each.range.values)}, though activations and their "
                    f"gradients are finite{self._unseen()}"
                )
                return self._origin("parameter", each.module, None, each.range.values, text)
        return None

    def _unseen(self) -> str:
        return "" if self.window.events else " (no forward was seen: is the model compiled?)"

    def _origin(
        self, where: str, module: WatchedModule, input_: Pair | None, output: Pair | None, text: str
    ) -> Origin:
        return Origin(where, module.name, module.cls, self.micro, input_, output, text)


def _innermost(calls: Iterable[Call]) -> list[Call]:
    """The calls that contain none of the others, in order."""
    found = list(dict.fromkeys(calls))
    outer = {parent for call in found for parent in call.parents()}
    return [call for call in found if call not in outer]


def _forward_of(call: Call) -> str:
    given, made = in_words(pair_of(call.inputs)), in_words(pair_of(call.outputs))
    return f" (forward of {call.module}: input {given}, output {made})"
