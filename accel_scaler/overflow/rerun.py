"""Running a window again, after it has overflowed.

``run_again`` runs it under an ``OverflowFinder`` and puts back parameters, their gradients, buffers
and random state, no more. ``make_again`` runs it for its gradients, at another scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..models import as_replay, is_fsdp2
from ..scaling import Origin, gradients_of, local
from .finder import OverflowFinder
from .hooks import is_tensor, map_tensors, tensors_in
from .recording import ForwardCall, Source, WindowRecording, largest_of, last_of, random_state


def run_again(
    recording: WindowRecording,
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    factor: float | None = None,
) -> Origin | None:
    """Run the window again. Returns where it overflows; None where all is finite.

    Synchronises with each device once. Ranks do not communicate, but for those that share DTensors:
    DDP's wrapper is left out, whose forward may wait for other ranks.

    Args:
        recording: one without an ``obstacle()``.
        factor: what the gradients of the outputs are multiplied by, for another scale. inf and NaN
            among them become 0, since the change of the model that is being tried may cure them.
            None: they are taken as they are.

    Raises:
        Whatever the model raises; all is put back then, too.
    """
    models = list(recording.models)
    with _restored(models, recording.used[0].device), closing(OverflowFinder()) as finder:
        for model in models:
            finder.watch(model)
        for number, forwards in enumerate(_micro_batches(recording)):
            seeded = forwards()
            if factor is None:
                losses = recording.losses[number : number + 1]
            else:  # the window's own loss may be inf
                losses = [output for output, _ in seeded if output.numel() == 1]
                seeded = [(r, torch.where(g.isfinite(), g * factor, 0.0)) for r, g in seeded]
            finder.before_backward(losses)
            with around_backward():
                _backward(seeded)
        return finder.find()


def make_again(
    recording: WindowRecording,
    parameters: Sequence[Tensor],
    passing: set[Source],
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    scale: float = 1.0,
    factor: float = 1.0,
    changes_model: bool = False,
) -> str:
    """Make the gradients of ``parameters`` again, through the wrapped models and with the
    collectives of ordinary backwards. Returns why these are not those of the window; "": they are.

    Synchronises.

    Args:
        recording: one without an obstacle.
        passing: outputs to whose gradients nothing is added; see :meth:`WindowRecording.passing`.
        scale: that of the new gradients.
        factor: what the gradients of the other outputs are multiplied by for that.
        changes_model: the outputs may be others than those of the window.

    Raises:
        Whatever the model raises. The gradients are anything then, as where it returns a reason;
        :func:`as_overflowed` puts others in their place.
    """
    models, pairs = list(recording.models), list[tuple[Tensor, Tensor]]()
    sharded: list[Any] = [m for model in models for m in model.modules() if is_fsdp2(m)]
    flags = [p.requires_grad for p in parameters]
    with (
        _restored(models, recording.used[0].device, {id(p) for p in parameters}) as writes,
        _buffers_as_before(recording.used, changes_model),
    ):
        try:
            none = dict.fromkeys(map(id, parameters), torch.zeros(()))
            recording.largest = none | largest_of(parameters) | recording.largest
            for grad in gradients_of(parameters):
                grad.zero_()  # the same tensor: it may be a view of a bucket, or have some
            recording.note(parameters)
            for number, forwards in enumerate(
                _micro_batches(
                    recording,
                    passing,
                    pairs,
                    changes_model,
                    None if recording.is_proven else writes,
                )
            ):
                for p in parameters:
                    p.requires_grad_(id(p) not in recording.frozen[number])
                seeded = [(root, seed * factor) for root, seed in forwards()]
                for model in sharded:
                    model.set_requires_gradient_sync(recording.synced[number], recurse=False)
                with around_backward():
                    _backward(seeded)
        finally:
            for p, flag in zip(parameters, flags, strict=True):
                p.requires_grad_(flag)
        why = "" if changes_model else recording.difference(parameters, scale, factor)
        recording.note(parameters)
    recording.is_proven = not writes.has_written
    if writes.has_written:
        return "its forward writes to its parameters"
    are_same = changes_model or all(torch.allclose(*pair, rtol=1e-3) for pair in pairs)
    return why if are_same else "its forward gave another output: it has state of its own"


def as_overflowed(parameters: Sequence[Tensor], kept: Collection[int]) -> Callable[[], None]:
    """A function to call where :func:`make_again` has failed: gradients are as after any overflow.
    They are the tensors of now, with inf; with their values of now, of which host memory has a copy
    until then, where ``kept`` has the ``id`` of the parameter. Synchronises."""
    before = []
    for p, grad in ((p, p.grad) for p in parameters):
        is_kept = grad is not None and (id(p) in kept or grad.is_sparse)  # these cannot be filled
        values = local(grad).to("cpu", copy=True) if is_kept else torch.tensor(math.inf)
        before.append((p, grad, values))

    @torch.no_grad()
    def put_back() -> None:
        for p, grad, values in before:
            p.grad = grad
            if grad is not None:
                local(grad).copy_(values)

    return put_back


def _micro_batches(
    recording: WindowRecording,
    passing: Collection[Source] = (),
    pairs: list[tuple[Tensor, Tensor]] | None = None,
    changes_model: bool = False,
    writes: AbstractContextManager[Any] | None = None,
) -> Iterator[Callable[[], list[tuple[Tensor, Tensor]]]]:
    """For each backward of the window a function that runs its forwards, and returns their outputs
    with the gradients of these. ``pairs`` gets elements of outputs, each with its first value.
    ``writes`` is entered around each forward."""
    for number in range(max(recording.backwards, 1)):

        def forwards(number: int = number) -> list[tuple[Tensor, Tensor]]:
            seeded, made = [], dict[Source, Tensor]()
            for call in recording.used:
                if call.backward != number:
                    continue
                if pairs is None:  # to look on: gradients and buffers are anyone's
                    outputs = _forward(call, made, without_ddp=True)
                else:
                    for each in () if changes_model else call.buffers:
                        each.restore()
                    with writes or nullcontext(), _reducing(recording.parallel, call.syncs):
                        outputs = _forward(call, made)
                for n, grad in call.grads.items():
                    if (call, n) in passing:
                        made[call, n] = outputs[n]
                    else:
                        seeded.append((outputs[n], grad.tensor))
                    if pairs is not None and n in call.last:
                        pairs.append((last_of(outputs[n], n)[n], call.last[n]))
            return seeded

        yield forwards


def _forward(
    call: ForwardCall, made: Mapping[Source, Tensor], without_ddp: bool = False
) -> list[Tensor]:
    """``made``: outputs that are given to the next forward with their graph."""
    run, args = call.run(), call.args
    assert run is not None
    if without_ddp:  # it is what runs, or what a Trainer's ``compute_loss`` is given
        run, args = _without_ddp(run), tuple(map(_without_ddp, args))
    # The script may have made an input require gradients since, for a gradient penalty.
    fresh: dict[int, Tensor] = {}
    for each in call.inputs:
        plain = each.tensor.detach().requires_grad_(each.requires_grad)
        fresh[id(each.tensor)] = made.get(each.source, plain) if each.source else plain
    args, kwargs = map_tensors((args, call.kwargs), lambda t: fresh.get(id(t), t))
    call.restore_random_state()
    with torch.enable_grad(), ExitStack() as stack:
        for context in call.autocast:
            stack.enter_context(context)
        return tensors_in(run(*args, **kwargs))


def _without_ddp(value: Any) -> Any:
    return value.module if isinstance(value, DistributedDataParallel) else value


def _backward(seeded: list[tuple[Tensor, Tensor]]) -> None:
    roots, seeds, handles = [], [], []
    for root, seed in seeded:
        if not root.requires_grad:
            continue

        def replace(_: Tensor, seed: Tensor = seed) -> Tensor:
            """``seed``: all that came to this output, also by way of another output."""
            return seed

        handles.append(root.register_hook(replace))  # type: ignore[no-untyped-call]
        roots.append(root)
        seeds.append(seed)
    try:
        if roots:
            torch.autograd.backward(roots, seeds)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _buffers_as_before(calls: Sequence[ForwardCall], keeps: bool) -> Iterator[None]:
    """Buffers may be written to in the block; afterwards they are as they are now, unless
    ``keeps``: then they start as before the first of these forwards, and stay."""
    copied = [each for call in reversed(calls) for each in call.buffers if each.copy is not None]
    now = [(each, each.place[each.name], each.place[each.name].clone()) for each in copied]
    for each in copied if keeps else ():
        each.restore()
    try:
        yield
    finally:
        for each, tensor, copy in () if keeps else now:
            each.place[each.name] = tensor
            tensor.data.copy_(copy)


@contextmanager
def _reducing(
    models: Iterable[DistributedDataParallel], syncs: Container[DistributedDataParallel]
) -> Iterator[None]:
    """Forwards of ``syncs`` in the block lead to a backward that reduces gradients, and those of
    other ``models`` to one that does not."""
    before = [(model, model.require_backward_grad_sync) for model in models]
    for model, _ in before:
        model.require_backward_grad_sync = model in syncs
    try:
        yield
    finally:
        for model, synced in before:
            model.require_backward_grad_sync = synced


@contextmanager
def _restored(
    models: Iterable[Module], device: torch.device, remade: Collection[int] | None = None
) -> Iterator[_CopyOnWrite]:
    """Models may be run in the block: parameters, their gradients, buffers and random state are
    afterwards as they were; but for the gradients of ``remade`` (the ``id`` of parameters), which
    stay, and buffers beside these.

    Note [Other parameter objects]
    To look on, the block runs on other Parameter objects with the same memory. Their gradients are
    dropped as soon as hooks have seen them, and hooks on the model's own parameters, as DDP's
    reducer, do not run. A copy of a parameter is made only when something is about to write to it.
    FSDP2 gathers from its own parameters, so there the gradients are put aside instead. What is to
    be kept is made on the model's own, with every hook.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    restore_random_state = random_state(device)
    places: list[dict[str, Any]] = [m._parameters for m in modules]
    places += [m._buffers for m in modules] if remade is None else []
    before = [dict(place) for place in places]
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    aside = [p for p in parameters.values() if p.requires_grad and id(p) not in (remade or ())]
    grads = [(p, p.grad) for p in aside]
    writes = _CopyOnWrite(parameters.values())
    try:
        for p, _ in grads:
            p.grad = None
        if remade is None:
            _replace(places, is_sharded=any(map(is_fsdp2, modules)))
        with (
            torch.inference_mode(False),
            as_replay(),
            torch.compiler.set_stance("force_eager"),
            writes if remade is None else nullcontext(),  # it takes a while: else in forwards only
        ):
            yield writes
    finally:
        for place, own in zip(places, before, strict=True):
            place.clear()
            place.update(own)
        for p, grad in grads:
            p.grad = grad
        writes.restore()
        restore_random_state()


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies the memory of a parameter before an operation writes to it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = [p for p in parameters if _address(p)]
        self._addresses = set(map(_address, parameters))
        self._data = [(p, p.data) for p in parameters]
        self.has_written = False
        """Something wrote to a parameter; known once that was undone."""
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                address = _address(tensor) if is_tensor(tensor) else 0
                if address in self._addresses and address not in self._copies:
                    storage = tensor.untyped_storage()
                    self._copies[address] = storage, storage.clone()
        return func(*args, **kwargs)

    def restore(self) -> None:
        """Write the copies back; version counters stay."""
        moved = [(p, data) for p, data in self._data if _address(p) != _address(data)]
        self.has_written = bool(moved or self._copies)
        for p, data in moved:  # by ``p.data = ...``
            p.data = data
        for storage, copy in self._copies.values():
            storage.copy_(copy)


def _address(tensor: Any) -> int:
    """Of its memory; 0 for a tensor without memory of its own (sharded, quantised, meta)."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return 0
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _replace(places: list[dict[str, Any]], is_sharded: bool) -> None:
    """Put aliases in the place of parameters, and copies in the place of buffers."""
    others: dict[int, Tensor] = {}
    for place in places:
        for name, tensor in place.items():
            if isinstance(tensor, Parameter):
                # A frozen parameter of another class may be quantised: it stays.
                if not is_sharded and (tensor.requires_grad or type(tensor) is Parameter):
                    place[name] = others.setdefault(id(tensor), _alias(tensor))
            elif tensor is not None and not tensor.requires_grad:
                place[name] = others.setdefault(id(tensor), tensor.clone())


def _alias(p: Tensor) -> Parameter:
    alias = Parameter(p.detach(), requires_grad=p.requires_grad)
    vars(alias).update(vars(p))
    if p.requires_grad:
        alias.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    return alias


def _drop_gradient(p: Tensor) -> None:
    p.grad = None
