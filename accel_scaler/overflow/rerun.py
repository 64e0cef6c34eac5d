"""Running a window again, after it has overflowed.

``run_again`` runs it under an ``OverflowFinder`` and puts back parameters, their gradients, buffers
and random state, no more. ``make_again`` runs it for its gradients, at another scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..models import as_replay, is_fsdp2
from ..scaling import Origin, gradients_of, local
from .finder import OverflowFinder
from .hooks import is_tensor, map_tensors, tensors_in
from .recording import (
    Backward,
    ForwardCall,
    Output,
    WindowRecording,
    device_of,
    last_of,
    random_state,
)


def run_again(
    recording: WindowRecording,
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    factor: float | None = None,
) -> Origin | None:
    """Run the window again. Returns where it overflows; None where all is finite.

    Synchronises with each device once. Ranks do not communicate, but for ranks that share DTensors:
    DDP's wrapper is left out, whose forward may wait for other ranks.

    Args:
        recording: one without an ``obstacle()``.
        factor: the multiplier of the gradients of the roots, for another scale. inf and NaN
            among them become 0, since the change of the model that is being tried may cure them.
            None: they are taken as they are.

    Raises:
        Whatever the model raises; all is put back then, too.
    """
    models = list(recording.models)
    with _restored(models), closing(OverflowFinder()) as finder:
        for model in models:
            finder.watch(model)
        for backward in recording.backwards:
            made = _forwards(recording, backward, as_wrapped=False)
            losses, seeds = [backward.loss], {o: g.tensor for o, g in backward.seeds.items()}
            if factor is not None:  # the window's own loss may be inf
                losses = [made[output] for output in seeds if made[output].numel() == 1]
                seeds = {o: torch.where(g.isfinite(), g * factor, 0.0) for o, g in seeds.items()}
            finder.before_backward(losses)
            with around_backward():
                _run_backward(made, seeds)
        return finder.find()


def make_again(
    recording: WindowRecording,
    parameters: Sequence[Tensor],
    around_backward: Callable[[], AbstractContextManager[None]],
    factor: float,
) -> str:
    """Make the gradients of ``parameters`` again, through the wrapped models and with the
    collectives of ordinary backwards. Returns why these are not the window's; "": they are.

    Synchronises.

    Args:
        recording: one without an obstacle to that.
        factor: the multiplier of the gradients of the roots.

    Raises:
        Whatever the model raises. The gradients are anything then, as where it returns a reason.
    """
    models, pairs = list(recording.models), list[tuple[Tensor, Tensor]]()
    sharded: list[Any] = [m for model in models for m in model.modules() if is_fsdp2(m)]
    with _restored(models, parameters) as writes:
        for each in recording.buffers:
            each.restore()
        before = recording.gradients.clear(parameters)
        for backward in recording.backwards:
            made = _forwards(recording, backward, as_wrapped=True)
            for model in sharded:
                model.set_requires_gradient_sync(backward.has_given, recurse=False)
            with around_backward():
                _run_backward(made, {o: g.tensor * factor for o, g in backward.seeds.items()})
            lasts = [(last_of(tensor), output.last) for output, tensor in made.items()]
            pairs += [(now, then) for now, then in lasts if now is not None and then is not None]
        are_made = recording.gradients.take(parameters, before)
    if writes.has_written:
        return "its forward writes to its parameters"
    if not all(torch.allclose(*pair, rtol=1e-3) for pair in pairs):
        return "its forward gave another output: it has state of its own"
    return "" if are_made else "a parameter got a gradient that no recorded forward gives"


def fill_with_inf(parameters: Sequence[Tensor]) -> None:
    """Where :func:`make_again` has failed: leave gradients as an overflow does."""
    for grad in map(local, gradients_of(parameters)):
        (grad._values() if grad.is_sparse else grad).detach().fill_(math.inf)


def _forwards(
    recording: WindowRecording, backward: Backward, as_wrapped: bool
) -> dict[Output, Tensor]:
    """Run the forwards of a backward again: through DDP's wrappers, with the buffers that they had,
    or without. Returns the new tensor of each root."""
    made: dict[Output, Tensor] = {}
    for call in backward.calls:
        with ExitStack() as stack:
            for each in call.buffers if as_wrapped else ():
                each.restore()
            for wrapper in set(recording.parallel) - set(call.syncs) if as_wrapped else ():
                stack.enter_context(wrapper.no_sync())
            returned = _forward(call, as_wrapped)
        made |= {o: returned[o.number] for o in backward.seeds if o.call is call}
    return made


def _forward(call: ForwardCall, as_wrapped: bool) -> list[Tensor]:
    """Run a forward again. Returns all tensors in its result."""
    run, args = call.run(), call.args
    assert run is not None
    if not as_wrapped:  # it is the model, or the argument of a Trainer's ``compute_loss``
        run, args = _without_ddp(run), tuple(map(_without_ddp, args))
    # The script may have made an input require gradients since, for a gradient penalty.
    fresh = {
        id(each.tensor): each.tensor.detach().requires_grad_(each.requires_grad)
        for each in call.inputs
    }
    args, kwargs = map_tensors((args, call.kwargs), lambda t: fresh.get(id(t), t))
    call.restore_random_state()
    with torch.enable_grad(), ExitStack() as stack:
        for kind, dtype, is_on in call.autocast:
            # Around a forward that enters autocast itself, none: the outermost one clears the cache
            # of cast weights.
            if is_on or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, is_on))
        return tensors_in(run(*args, **kwargs))


def _without_ddp(value: Any) -> Any:
    return value.module if isinstance(value, DistributedDataParallel) else value


def _run_backward(made: dict[Output, Tensor], seeds: dict[Output, Tensor]) -> None:
    """Run a backward from the roots ``seeds``, with these gradients; ``made`` has the tensors."""
    handles, seeds = [], {o: seed for o, seed in seeds.items() if made[o].requires_grad}
    for output, seed in seeds.items():

        def replace(_: Tensor, seed: Tensor = seed) -> Tensor:
            """``seed``: all that came to this root, also by way of another output."""
            return seed

        handles.append(made[output].register_hook(replace))  # type: ignore[no-untyped-call]
    try:
        if seeds:
            torch.autograd.backward([made[output] for output in seeds], list(seeds.values()))
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restored(models: Sequence[Module], remade: Sequence[Tensor] = ()) -> Iterator[_CopyOnWrite]:
    """Models may be run in the block: parameters, their gradients, buffers and random state are
    afterwards as they were, but for the gradients of the parameters ``remade``. Without ``remade``
    each gradient is dropped as soon as hooks have seen it, so that there is no need of memory for
    all of them."""
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    restore_random_state = random_state(device_of(models[0]))
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    stay = set(map(id, remade))
    grads = [(p, p.grad) for p in parameters.values() if p.requires_grad and id(p) not in stay]
    places = [(m._buffers, dict(m._buffers)) for m in modules]
    buffers = [(b, b.clone()) for _, own in places for b in own.values() if b is not None]
    writes, handles = _CopyOnWrite(parameters.values()), list[Any]()
    try:
        for p, _ in grads:
            p.grad = None
            if not remade and p.is_leaf:
                hook: Any = p.register_post_accumulate_grad_hook
                handles.append(hook(_drop_gradient))
        eagerly = torch.compiler.set_stance("force_eager")
        with torch.inference_mode(False), as_replay(), eagerly, writes:
            yield writes
    finally:
        for handle in handles:
            handle.remove()
        for place, own in places:
            place.clear()
            place.update(own)
        for b, copy in buffers:
            b.data.copy_(copy)
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
        """Whether something wrote to a parameter; known once that was undone."""
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            declared = func._schema.arguments
            given = {each.name: arg for each, arg in zip(declared, args, strict=False)} | kwargs
            writes = [a.name for a in declared if a.alias_info and a.alias_info.is_write]
            for tensor in tree_leaves([given.get(name) for name in writes]):
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
    """The address of a tensor's storage; 0 where it has none (sharded, quantised, meta)."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return 0
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    # Not ``untyped_storage()``, which is counted as one more user of the memory for good.
    address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    return address


def _drop_gradient(p: Tensor) -> None:
    p.grad = None
