"""A window is run again after it has overflowed, to see in which module that began.

It runs on other parameter objects with the same memory, on copies of the buffers, with the random
numbers of that time; these three are as before afterwards (``untouched``). Sharded models (FSDP2)
run on their own parameters, whose gradients are put aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..models import as_replay
from ..scaling import Origin
from .finder import OverflowFinder, place_of, search_sums
from .ranges import Range, in_words, tensors_in, with_tensors
from .recording import ForwardCall, Kept, OutputGradient, WindowRecording
from .trace import Place
from .untouched import untouched

MOST_DIFFERENCES = 3
"""Named of a replay that gave something else."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a second run of a window has shown."""

    origin: Origin | None
    """Where the overflow began; None: nothing was inf or NaN."""
    nonfinite: frozenset[str]
    """Names of the parameters whose gradients were inf or NaN in some micro-batch."""
    differences: tuple[str, ...]
    """What was not as it had been; none: it is the same window, bit for bit as far as is known."""
    seconds: float


def obstacle(recording: WindowRecording, stepped: frozenset[Module] = frozenset()) -> str:
    """Why the window cannot be run again, and what helps; "": it can. Does not synchronise.

    Args:
        stepped: models whose parameters another optimizer has updated already.
    """
    hint = "find_overflow='always' watches modules while they run"
    if recording.left_out:
        return f"a forward was not kept: {recording.left_out}; {hint}"
    if not recording.calls:
        return (
            "no forward of a prepared model, with gradients and outside of torch.func's "
            f"transforms, was seen in it; {hint}"
        )
    if all(call.model.module() in stepped for call in recording.calls):
        return f"another optimizer has updated its model in it already; {hint}"
    for call in recording.calls:
        if call.model.module() is None:
            return "a model that ran in it is gone"
        for kept in call.inputs:
            if kept.change:
                return f"input {kept.path} of a forward is not what it was: {kept.change}; {hint}"
        for kept in (grad.kept for grad in call.grads):
            if kept.change:
                return f"the {kept.path} is not what it was: {kept.change}; {hint}"
    return ""


def run_again(
    recording: WindowRecording,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    stops: bool = True,
    cures: bool = False,
    factor: float = 1.0,
    stepped: frozenset[Module] = frozenset(),
) -> Replay:
    """Run the window again, watched, until something is inf or NaN.

    Synchronises with the device once a micro-batch, and once more for the search.

    Args:
        recording: one without an :func:`obstacle`.
        around: entered around each backward, as the training loop does.
        stops: False: every micro-batch is run, whatever was found (ranks that communicate).
        cures: the model was changed, to see whether that cures it: outputs and losses of the
            window are not compared with, and what came to the model as inf or NaN comes as 0.
        factor: what the gradients of the outputs are multiplied by: another scale.
        stepped: models that are left out, since their parameters have been updated already.

    Raises:
        Whatever the model raises; parameters, buffers and random state are put back then, too.
    """
    start = time.perf_counter()
    calls = sorted(recording.calls, key=lambda call: call.order)
    calls = [call for call in calls if call.model.module() not in stepped]
    models = list(dict.fromkeys(m for c in calls if (m := c.model.module()) is not None))
    run = _Run(recording, around, cures, factor)
    with (
        torch.inference_mode(False),
        as_replay(),
        untouched(models, calls[0].model.device),
        torch.compiler.set_stance("force_eager"),
        _watched(models) as finder,
    ):
        for micro in _micro_batches(recording, calls):
            run.micro_batch(finder, micro)
            if stops and finder.nonfinite_parameters():
                break
        nonfinite, origin = finder.nonfinite_parameters(), finder.find()
    seconds = time.perf_counter() - start
    return Replay(origin, frozenset(nonfinite), tuple(run.differences), seconds)


def overflowed_sum(models: Iterable[Module], micro: int) -> Origin | None:
    """A gradient that is not finite though every part of it is: it was summed over micro-batches or
    ranks. Synchronises.

    Args:
        models: whose parameters still have the gradients of the window.
        micro: the number of its last micro-batch.
    """
    return search_sums(_places(models), micro)


def _places(models: Iterable[Module]) -> Iterator[tuple[Place, str, Tensor]]:
    for model in models:
        for name, p in Module.named_parameters(model):
            module, _, own = name.rpartition(".")
            yield place_of(module, model.get_submodule(module), model), own, p


MicroBatch = tuple[int, list[ForwardCall], list[tuple[ForwardCall, OutputGradient]]]


def _micro_batches(recording: WindowRecording, calls: list[ForwardCall]) -> Iterator[MicroBatch]:
    """``(number, forwards, gradients)``: what ran up to one backward, and came in it."""
    done: set[int] = set()
    for backward in range(max(recording.backwards, 1)):
        is_last = backward + 1 >= recording.backwards
        grads = [(c, g) for c in calls for g in c.grads if g.backward == backward]
        wanted = {id(call) for call, _ in grads}
        forwards = [
            call
            for call in calls
            if id(call) not in done and (id(call) in wanted or (is_last and not call.grads))
        ]
        done.update(map(id, forwards))
        yield backward, forwards, grads


class _Run:
    """One run of a window again."""

    def __init__(
        self,
        recording: WindowRecording,
        around: Callable[[], AbstractContextManager[None]],
        cures: bool,
        factor: float,
    ) -> None:
        self.recording, self.around = recording, around
        self.cures, self.factor = cures, factor
        self.differences: list[str] = []
        self._outputs: dict[ForwardCall, list[Tensor]] = {}

    def micro_batch(self, finder: OverflowFinder, micro: MicroBatch) -> None:
        """Forwards, then one backward."""
        number, forwards, grads = micro
        for call in forwards:
            self._outputs[call] = self._forward(call)
        losses = self.recording.losses[number : number + 1]
        if self.cures:  # the window's own loss may be what is to be cured
            losses = []
            finder.note_loss(
                [o for c, g in grads for o in self._outputs[c][g.output :][:1] if o.numel() == 1]
            )
        for loss in losses:
            finder.note_loss(loss.tensor)
        if not grads:
            return
        last = {id(call): max(g.backward for g in call.grads) for call, _ in grads}
        stays = any(last[id(call)] > number for call, _ in grads)
        with self.around():
            roots, seeds, handles = [], [], []
            for call, grad in grads:
                if not self._takes_gradient(call, grad):
                    continue
                root, seed = self._outputs[call][grad.output], self._scaled(grad.kept.tensor)
                # All that came to it, whatever comes again from another output made of it.
                replaces: Any = partial(_replaced, seed)
                handles.append(root.register_hook(replaces))  # type: ignore[no-untyped-call]
                roots.append(root)
                seeds.append(seed)
            try:
                torch.autograd.backward(roots, seeds, retain_graph=stays)
            finally:
                for handle in handles:
                    handle.remove()
        if not stays:
            for call, _ in grads:
                self._outputs.pop(call, None)

    def _takes_gradient(self, call: ForwardCall, grad: OutputGradient) -> bool:
        outputs = self._outputs[call]
        if grad.output < len(outputs) and outputs[grad.output].requires_grad:
            return True
        self._differs(f"output {grad.output} takes no gradient")
        return False

    def _scaled(self, seed: Tensor) -> Tensor:
        if self.factor != 1.0:
            seed = seed * self.factor
        # What a loss that is to be cured gave is left out: 0 * inf is NaN still.
        return torch.where(seed.isfinite(), seed, 0.0) if self.cures else seed

    def _forward(self, call: ForwardCall) -> list[Tensor]:
        model = call.model.module()
        assert model is not None
        if model.training != call.is_training:
            self._differs(f"the model is in {'train' if model.training else 'eval'}() mode now")
        fresh = {
            id(kept.tensor): kept.tensor.detach().requires_grad_()
            for kept in call.inputs
            if kept.requires_grad
        }
        # Others were made to require gradients since, as for a gradient penalty.
        args, kwargs = with_tensors(
            (call.args, call.kwargs),
            lambda t: fresh.get(id(t), t.detach() if t.requires_grad else t),
        )
        call.random.put_back()
        with ExitStack() as stack:
            for kind, enabled, dtype in call.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=call.cache_enabled
                    )
                )
            stack.enter_context(torch.enable_grad())
            self.recording.last_outputs = None
            returned = (call.model.autocast() or model)(*args, **kwargs)
        if self.recording.last_outputs is not None:  # a later hook may have changed it
            returned, self.recording.last_outputs = self.recording.last_outputs, None
        outputs = [tensor for _, tensor in tensors_in(returned)]
        comparable = not (self.cures or call.model.is_compiled)
        for number, kept in call.outputs.items() if comparable else ():
            self._compare(kept, outputs[number] if number < len(outputs) else None)
        return outputs

    def _compare(self, before: Kept, now: Tensor | None) -> None:
        if before.change:
            return  # its owner went on working with it
        if now is None or now.shape != before.tensor.shape or now.dtype != before.tensor.dtype:
            self._differs(f"output {before.path or '0'} has another shape or dtype")
            return
        was, now = before.tensor.detach(), now.detach()
        if was.layout is not torch.strided or was.is_quantized or hasattr(was, "to_local"):
            return
        same = (was == now) | ((was != was) & (now != now))
        if not bool(same.all()):
            first, second = (in_words(_range_of(each)) for each in (was, now))
            self._differs(f"output {before.path or '0'} was {first}, is {second}")

    def _differs(self, text: str) -> None:
        if len(self.differences) < MOST_DIFFERENCES and text not in self.differences:
            self.differences.append(text)


def _range_of(tensor: Tensor) -> tuple[float, float] | None:
    made = Range.of(tensor)
    if made is None:
        return None
    Range.read([made])
    return made.values


def _replaced(seed: Tensor, _: Tensor) -> Tensor:
    return seed


@contextmanager
def _watched(models: Iterable[Module]) -> Iterator[OverflowFinder]:
    finder = OverflowFinder(is_eager=True)
    try:
        for model in models:
            finder.watch(model)
        yield finder
    finally:
        finder.close()
