"""Running a window again, after it has overflowed.

``WindowRecording`` keeps references during the window: what each forward was given, the random
state, autocast, and the gradients that came to the model's outputs, so that it does not matter what
the loss was made of. Nothing is copied and nothing is read from the device.

``run_again`` runs the window under an ``OverflowFinder`` and puts back parameters, their gradients,
buffers and random state, no more.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..devices import is_capturing
from ..models import as_replay, is_fsdp2, is_in_backward, is_replaying, is_transformed, unwrap
from ..scaling import Origin
from .finder import OverflowFinder
from .hooks import ForwardListener, Hook, is_tensor, map_tensors, tensors_in
from .trace import is_batched

MAX_BYTES = 1 << 28
"""Of inputs, gradients and random states that are kept of one window."""

BYTES_OF_RANDOM_STATE = 1 << 14


def random_state(device: torch.device) -> Callable[[], None]:
    """What makes the present random state, of Python, NumPy (where it is loaded) and torch on the
    host and on one device, the present one again. Does not synchronise."""
    numpy: Any = sys.modules.get("numpy.random")
    on_python, on_host = random.getstate(), torch.get_rng_state()
    in_numpy = None if numpy is None else numpy.get_state()
    has_own = device.type not in ("cpu", "meta") and not is_capturing()
    module: Any = torch.get_device_module(device.type) if has_own else None
    on_device = module.get_rng_state(device) if hasattr(module, "get_rng_state") else None

    def restore() -> None:
        random.setstate(on_python)
        torch.set_rng_state(on_host)
        if numpy is not None:
            numpy.set_state(in_numpy)
        if on_device is not None:
            module.set_rng_state(on_device, device)

    return restore


class _Kept(NamedTuple):
    """A tensor that a forward was given, detached; or what came to a tensor of its output."""

    tensor: Tensor
    version: int
    requires_grad: bool = False


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One training forward of a watched model."""

    model: weakref.ref[Module]
    """Without wrappers."""
    device: torch.device
    backward: int
    """The number of the backward that reaches it."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[_Kept]
    restore_random_state: Callable[[], None]
    autocast: list[torch.autocast]
    grads: dict[int, _Kept] = field(default_factory=dict)
    """By the number of the tensor of the output."""


class WindowRecording(ForwardListener):
    """Keeps what the forwards of the present window were given, and where ``statistics`` says so
    the running statistics of batch norms: a forward that overflows leaves inf or NaN in them, which
    no later window takes out again.

    Leaves out forwards without gradients, those inside another watched model's forward or inside a
    transform of ``torch.func``, and those of which a graph is captured.
    """

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.calls: list[ForwardCall] = []
        """Of the present window, after those of earlier ones whose backward came in it."""
        self.backwards = 0
        self.losses: list[Tensor] = []
        self.left_out = ""
        """Why a forward was not recorded."""
        self._keeps_statistics = statistics
        self._statistics: list[tuple[Tensor, Tensor]] = []
        """Each, and its copy from before the window."""
        self._is_over = True
        self._bytes = 0

    def watch(self, prepared: Module, inner: Module) -> None:
        """Record this model's training forwards. Does nothing the second time.

        Args:
            prepared: what the training loop calls.
            inner: the model in it. It is what is run again, since the wrappers of distributed
                training communicate.
        """
        plain = unwrap(inner)
        hooked = prepared if isinstance(prepared, torch._dynamo.OptimizedModule) else plain
        # With autocast in the compiler's wrapper alone it would run without autocast.
        is_outside = "_original_forward" in vars(plain) and "forward" not in vars(plain)
        is_scripted = isinstance(plain, torch.jit.ScriptModule)
        if hooked not in self._modules and not is_outside and not is_scripted:
            self._listen(hooked, weakref.ref(plain), prepend=True)

    def before_backward(self, loss: Tensor) -> None:
        if self._is_over:
            self.new_window()
        self._stack().clear()  # a forward that was interrupted never left
        self.backwards += 1
        self._count(_bytes(loss))
        if not self.left_out:
            self.losses.append(loss.detach())

    def new_window(self) -> None:
        self._drop()
        self.backwards = self._bytes = 0
        self.left_out = ""
        self._is_over = False
        if self._keeps_statistics:
            buffers = [pair for model in self._modules for pair in model.named_buffers()]
            kept = [b for name, b in buffers if name.endswith(("running_mean", "running_var"))]
            self._statistics = [(buffer, buffer.clone()) for buffer in kept]

    def obstacle(self) -> str:
        """Why the window cannot be run again; "" if it can. Does not synchronise."""
        if self.left_out:
            return f"a forward was not recorded: {self.left_out}"
        if not self.calls:
            return "no forward of a prepared model, with gradients, was seen in it"
        for call in self.calls:
            if call.model() is None:
                return "a model that ran in it is gone"
            kept = (*call.inputs, *call.grads.values())
            if any(each.version != _version(each.tensor) for each in kept):
                return "an input, or the gradient of an output, was changed in place since"
        return ""

    @torch.no_grad()
    def restore_statistics(self) -> None:
        """Put back running statistics that are not finite any more. Synchronises."""
        for value, copy in self._statistics:
            if not value.isfinite().all():
                value.copy_(copy)

    # Called by hooks.

    def enter(
        self, model: weakref.ref[Module], module: Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if is_replaying() or is_transformed():
            return
        stack = self._stack()
        is_inner = any(call is not None for call in stack) or is_in_backward()
        if is_inner or not torch.is_grad_enabled() or is_capturing():
            stack.append(None)
            return
        if self._is_over:
            self.new_window()
        stack.append(self._call(model, module, args, kwargs))

    def leave(self, model: weakref.ref[Module], module: Module, args: Any, output: Any) -> None:
        """A model's forward ends; by an exception if ``output`` is None."""
        if is_replaying() or is_transformed():
            return
        stack = self._stack()
        call: ForwardCall | None = stack.pop() if stack else None
        if call is None or output is None:
            return
        for number, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is not None:
                # The graph keeps the call, so that a backward in a later window finds it.
                hook: Any = Hook(self, "add_gradient", call, number)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        self._add(call, len(self.calls))

    def add_gradient(self, call: ForwardCall, number: int, grad: Any) -> None:
        if not is_tensor(grad) or is_transformed() or is_batched(grad) or is_replaying():
            return
        if call not in self.calls:  # of an earlier window, as a generator's
            self._add(call, 0)
        self._count(_bytes(grad))
        backward = max(self.backwards - 1, 0)
        if torch.is_grad_enabled():
            self.left_out = "its gradient is differentiated itself (create_graph=True)"
        if number in call.grads or (call.grads and call.backward != backward):
            self.left_out = "two backwards went through it (retain_graph=True)"
        if not self.left_out:
            call.backward = backward
            call.grads[number] = _Kept(grad, _version(grad))

    def _call(
        self, model: weakref.ref[Module], module: Module, args: Any, kwargs: dict[str, Any]
    ) -> ForwardCall | None:
        inputs: list[_Kept] = []

        def detach(tensor: Tensor) -> Tensor:
            plain = tensor.detach() if tensor.requires_grad else tensor
            inputs.append(_Kept(plain, _version(tensor), tensor.requires_grad))
            return plain

        try:
            args, kwargs = map_tensors((args, kwargs), detach)
        except Exception as error:  # raised by the user's containers; the forward goes on
            self.left_out = f"its inputs cannot be copied ({type(error).__name__}: {error})"
            return None
        first = next(module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        autocast = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]
        state = random_state(device)
        return ForwardCall(model, device, self.backwards, args, kwargs, inputs, state, autocast)

    def _add(self, call: ForwardCall, place: int) -> None:
        self._count(sum(_bytes(each.tensor) for each in call.inputs) + BYTES_OF_RANDOM_STATE)
        if not self.left_out:
            self.calls.insert(place, call)

    def _count(self, size: int) -> None:
        """Drops all that is kept where it becomes too much."""
        self._bytes += size
        if self._bytes > MAX_BYTES and not self.left_out:
            self._drop()
            self.left_out = f"its inputs and gradients take more than {MAX_BYTES >> 20} MiB"

    def _drop(self) -> None:
        for call in self.calls:
            call.grads.clear()  # a graph may keep the call
        self.calls, self.losses = [], []


def run_again(
    recording: WindowRecording,
    around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    factor: float | None = None,
) -> Origin | None:
    """Run the window again. Returns where it overflows; None where all is finite.

    Synchronises with each device once.

    Args:
        recording: one without an ``obstacle()``.
        factor: what the gradients of the outputs are multiplied by: another scale. inf and NaN
            among them come as 0, as they may be what the change of the model, which is on trial,
            cures.

    Raises:
        Whatever the model raises; all is put back then, too.
    """
    calls = recording.calls
    models = list(dict.fromkeys(model for call in calls if (model := call.model()) is not None))
    with (
        torch.inference_mode(False),
        as_replay(),
        _restored(models, calls[0].device),
        torch.compiler.set_stance("force_eager"),
        closing(OverflowFinder()) as finder,
    ):
        for model in models:
            finder.watch(model)
        for number in range(max(recording.backwards, 1)):
            seeded: list[tuple[Tensor, Tensor]] = []
            for call in calls:
                if call.backward == number:
                    outputs = _forward(call)
                    seeded += [(outputs[n], grad.tensor) for n, grad in call.grads.items()]
            if factor is None:
                losses = recording.losses[number : number + 1]
            else:  # the window's own loss may be inf
                losses = [output for output, _ in seeded if output.numel() == 1]
            finder.before_backward(losses)
            with around_backward():
                _backward(seeded, factor)
        return finder.find()


def _forward(call: ForwardCall) -> list[Tensor]:
    model = call.model()
    assert model is not None
    # The script may have made an input require gradients since, for a gradient penalty.
    fresh = {
        id(each.tensor): each.tensor.detach().requires_grad_(each.requires_grad)
        for each in call.inputs
    }
    args, kwargs = map_tensors((call.args, call.kwargs), lambda t: fresh.get(id(t), t))
    call.restore_random_state()
    with torch.enable_grad(), ExitStack() as stack:
        for context in call.autocast:
            stack.enter_context(context)
        return tensors_in(model(*args, **kwargs))


def _backward(seeded: list[tuple[Tensor, Tensor]], factor: float | None) -> None:
    roots, seeds, handles = [], [], []
    for root, seed in seeded:
        if not root.requires_grad:
            continue
        if factor is not None:
            seed = torch.where(seed.isfinite(), seed * factor, 0.0)

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
def _restored(models: Iterable[Module], device: torch.device) -> Iterator[None]:
    """Models may be run in the block: parameters, their gradients, buffers and random state are
    afterwards as they were.

    Note [Other parameter objects]
    The block runs on other Parameter objects with the same memory. Their gradients are dropped as
    soon as hooks have seen them, and hooks on the model's own parameters, as DDP's reducer, do not
    run. A copy of a parameter is made only when something is about to write to it. FSDP2 gathers
    from its own parameters, so there the gradients are put aside instead.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    restore_random_state = random_state(device)
    places: list[dict[str, Any]] = [m._parameters for m in modules]
    places += [m._buffers for m in modules]
    before = [dict(place) for place in places]
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    grads = [(p, p.grad) for p in parameters.values() if p.requires_grad]
    writes = _CopyOnWrite(parameters.values())
    try:
        for p, _ in grads:
            p.grad = None
        _replace(places, is_sharded=any(map(is_fsdp2, modules)))
        with writes:
            yield
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
        self._addresses = {_address(p) for p in parameters} - {0}
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


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
