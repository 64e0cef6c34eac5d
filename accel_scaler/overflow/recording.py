"""What is kept of a window so that it can be run again, should it overflow: references alone.

Of each forward with gradients: what the model was given, the random state, autocast. Of each
backward: the gradients that came to the model's outputs, by which it can be run again whatever the
loss was made of. Nothing is copied and nothing is read from the device; who keeps no tensor alive
otherwise (a loop that drops its batch) keeps it until the next window begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..devices import is_capturing
from ..models import is_compiled, is_in_backward, is_replaying, is_transformed, unwrap
from .hooks import Hook
from .random_state import RandomState
from .ranges import is_batched, tensors_in, with_tensors

MOST_BYTES = 1 << 28
"""Of inputs and gradients that one window may keep alive."""

MOST_FORWARDS = 1024
"""Of one window; a loop that never steps keeps no more."""

SMALL_OUTPUT = 1 << 12
"""Elements up to which an output is kept, to be compared with what a second run gives."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor without its graph, and what shows that it is no longer what it was."""

    path: str
    tensor: Tensor
    version: int
    requires_grad: bool
    bytes: int
    """Of the memory that it keeps alive."""

    @classmethod
    def of(cls, path: str, tensor: Tensor) -> Kept:
        """As it is now."""
        plain = tensor.detach() if tensor.requires_grad else tensor
        return cls(path, plain, _version(tensor), tensor.requires_grad, _bytes_of(plain))

    @property
    def change(self) -> str:
        """What became of it since; "": nothing that can be seen."""
        if self.bytes and not _bytes_of(self.tensor):
            return "its memory was given away"
        if _version(self.tensor) != self.version:
            return "it was changed in place"
        return ""


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """What came to one output in one backward."""

    backward: int
    output: int
    """Its number among the tensors of the output."""
    kept: Kept


@dataclass(eq=False, slots=True)
class ForwardCall:
    """One training forward of a watched model."""

    model: Model
    order: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Kept]
    random: RandomState
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool
    is_training: bool
    outputs: dict[int, Kept] = field(default_factory=dict)
    """Small ones, under their number."""
    grads: list[OutputGradient] = field(default_factory=list)
    bytes: int = 0


@dataclass(eq=False, slots=True)
class Model:
    """A watched model: what is run again."""

    module: weakref.ref[Module]
    device: torch.device
    is_compiled: bool
    """It runs compiled in training: what is run again, uncompiled, is rounded elsewhere."""
    autocast: Callable[[], Module | None] = lambda: None
    """What is around it and enters autocast: a model that was compiled before it was prepared."""


class WindowRecording:
    """Keeps what the present window's forwards were given.

    Nothing is kept of forwards without gradients, inside of another watched model's or of a
    transform of ``torch.func``, or while a graph is captured.
    """

    def __init__(self) -> None:
        self.models: list[Model] = []
        self.calls: list[ForwardCall] = []
        """Of the present window, in order; those also whose backward came in it."""
        self.backwards = 0
        self.losses: list[Kept] = []
        self.left_out = ""
        """Why some forward was not kept."""
        self.last_outputs: Any = None
        """Of the forward that was run again last."""
        self.before_window: Callable[[], None] | None = None
        """Called before the first forward of each window."""
        self._has_begun = False
        self._handles: list[Any] = []
        self._on_leaves: list[Any] = []
        """Handles of hooks on tensors that outlive the window, as parameters that a model gives
        out."""
        self._watched: weakref.WeakSet[Module] = weakref.WeakSet()
        self._local = threading.local()
        self._bytes = 0
        self._order = 0
        self._is_over = False

    def watch(self, prepared: Module, inner: Module) -> None:
        """Keep what this model's training forwards are given. Once each.

        Args:
            prepared: what the training loop calls.
            inner: the model in it, which is what is run again: the wrappers of distributed
                training communicate.
        """
        plain = unwrap(inner)
        entered = prepared if isinstance(prepared, torch._dynamo.OptimizedModule) else plain
        if entered in self._watched or isinstance(plain, torch.jit.ScriptModule):
            return
        self._watched.add(entered)
        first = next(plain.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        compiled = entered is not plain or any(map(is_compiled, plain.modules()))
        model = Model(weakref.ref(plain), device, compiled)
        around = _compiled_around(prepared)
        own = vars(plain)  # where the compiler's module puts what is set on itself
        if around is not None and "_original_forward" in own and "forward" not in own:
            model.autocast = weakref.ref(around)
        self.models.append(model)
        enter, leave = Hook(self, "enter", model), Hook(self, "leave", model)
        self._handles += [
            entered.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            entered.register_forward_hook(leave, always_call=True),
        ]

    def note_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""
        if self._is_over:
            self.new_window()
        if self._stack():  # no forward runs now: of one, KeyboardInterrupt has taken the end
            self._stack().clear()
            self.left_out = "a forward was broken off before it"
        self.backwards += 1
        if loss.numel() <= SMALL_OUTPUT and len(self.losses) < MOST_FORWARDS:
            self.losses.append(Kept.of("loss", loss))

    def end_window(self) -> None:
        """A step is over. What was kept is let go when the next window begins: further
        optimizers may overflow in this one."""
        self._is_over = True

    def new_window(self) -> None:
        """Let go of everything."""
        for call in self.calls:
            call.grads.clear()
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()
        self.calls, self.losses = [], []
        self.backwards = self._bytes = 0
        self.left_out = ""
        self._is_over = self._has_begun = False

    def close(self) -> None:
        """Remove every hook and let go of everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self.models.clear()
        self.new_window()

    # Called by hooks.

    def enter(self, model: Model, module: Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A model's forward begins."""
        if is_replaying() or is_transformed():
            return
        stack = self._stack()
        is_inner = any(call is not None for call in stack) or is_in_backward()
        if is_inner or not torch.is_grad_enabled() or is_capturing():
            stack.append(None)
            return
        if self._is_over:
            self.new_window()
        if not self._has_begun:
            self._has_begun = True
            if self.before_window is not None:
                self.before_window()
        stack.append(self._make(model, module, args, kwargs))

    def leave(self, model: Model, module: Module, args: Any, output: Any) -> None:
        """A model's forward ends, by an exception too (then ``output`` is None)."""
        if is_replaying():
            self.last_outputs = output
            return
        if is_transformed():
            return
        stack = self._stack()
        call = stack.pop() if stack else None
        if call is None or output is None:
            return
        for kept in call.inputs:
            if kept.change:
                self.left_out = f"the model changes its input {kept.path} in place"
                return
        for number, (path, tensor) in enumerate(tensors_in(output)):
            if tensor.numel() <= SMALL_OUTPUT:
                call.outputs[number] = Kept.of(path, tensor)
            if tensor.requires_grad:
                # The graph keeps the call, so that a later window's backward finds it.
                hook: Any = Hook(self, "add_gradient", call, number)
                handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    self._on_leaves.append(handle)
        self._keep(call)

    def add_gradient(self, call: ForwardCall, number: int, grad: Any) -> None:
        """A gradient came to an output of a model."""
        if not _can_be_kept(grad) or is_replaying():
            return
        if call not in self.calls:  # its forward was in an earlier window, as a generator's
            self._keep(call)
        kept = Kept.of(f"gradient of output {number}", grad)
        self._bytes += kept.bytes
        if torch.is_grad_enabled():
            self.left_out = "its gradient is differentiated itself (create_graph=True)"
        elif self._bytes > MOST_BYTES:
            self.left_out = _too_much(self._bytes)
        else:
            call.grads.append(OutputGradient(max(self.backwards - 1, 0), number, kept))

    def _make(
        self, model: Model, module: Module, args: Any, kwargs: dict[str, Any]
    ) -> ForwardCall | None:
        found = list(tensors_in({**dict(enumerate(args)), **kwargs}))
        inputs = [Kept.of(path, t) for path, t in found]
        size = sum(kept.bytes for kept in inputs)
        if self._bytes + size > MOST_BYTES or len(self.calls) >= MOST_FORWARDS:
            self.left_out = _too_much(self._bytes + size)
            return None
        plain = {id(t): kept.tensor for (_, t), kept in zip(found, inputs, strict=True)}
        try:
            args, kwargs = with_tensors((args, kwargs), lambda t: plain[id(t)])
        except Exception as error:  # what its containers raise; the forward goes on
            self.left_out = f"its inputs cannot be copied ({type(error).__name__}: {error})"
            return None
        self._order += 1
        return ForwardCall(
            model,
            self._order,
            args,
            kwargs,
            inputs,
            RandomState.now(model.device),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys((model.device.type, "cpu"))
            ),
            torch.is_autocast_cache_enabled(),
            module.training,
            bytes=size,
        )

    def _keep(self, call: ForwardCall) -> None:
        if len(self.calls) < MOST_FORWARDS:
            self.calls.append(call)
            self._bytes += call.bytes

    def _stack(self) -> list[ForwardCall | None]:
        stack: list[ForwardCall | None] = self._local.__dict__.setdefault("stack", [])
        return stack


def _compiled_around(model: Module) -> Module | None:
    """What the compiler has made of a model, within what replicates that."""
    plain, wrapped = unwrap(model), model
    while wrapped is not plain and not isinstance(wrapped, torch._dynamo.OptimizedModule):
        wrapped = wrapped.module  # type: ignore[assignment]
    return wrapped if wrapped is not plain and wrapped._orig_mod is plain else None


def _too_much(size: int) -> str:
    return f"its inputs take {size / 2**20:.0f} MiB, and {MOST_BYTES >> 20} MiB are kept at most"


def _can_be_kept(grad: Any) -> bool:
    """A gradient with memory of its own; in a transform it belongs to no backward of a window."""
    return isinstance(grad, Tensor) and not (is_transformed() or is_batched(grad))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bytes_of(tensor: Any) -> int:
    """Of the memory that it keeps alive; 0 where it has none of its own to be asked."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is not torch.strided or local.is_meta:
        return 0
    size: int = local.untyped_storage().nbytes()
    return size
