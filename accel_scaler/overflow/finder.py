"""``find_overflow``: hooks on a model that say which module was the first to overflow.

Nothing is run again and nothing is read from the device until a boundary has overflowed: hooks
leave a two-element range for each tensor they see. Gradients are seen by hooks on tensors,
because a module's own backward hooks forbid to change its output in place.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..devices import is_capturing
from ..errors import listed
from ..models import is_compiled, is_in_backward, is_transformed
from ..scaling import Origin
from .hooks import (
    Hook,
    gradient_edge,
    hook_inputs,
)
from .ranges import Range, in_words, tensors_in
from .search import search
from .trace import Call, Entry, InputGradient, Loss, ParameterGradient, Place, Uses, WindowTrace


@dataclass
class _Seen:
    """What is known of a living tensor."""

    version: int
    window: int
    range: Range | None
    uses: Uses | None = None


class OverflowFinder:
    """Watches models and names the module that overflowed first.

    A debugging switch: it reads every activation and every gradient once more. It does not
    change a value, holds no activation, and synchronises with the device in :meth:`find` only.

    Forwards without gradients are not kept, nor those that no backward reaches, beyond a
    bounded number. What activation checkpointing runs again in the backward takes no part in the
    order of the forward; only its gradients count. Compiled and scripted modules cannot be seen
    into: there a loss or a parameter is named at best.
    """

    def __init__(self, is_eager: bool = False) -> None:
        self._is_eager = is_eager
        self._handles: list[Any] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parameters: Any = WeakTensorKeyDictionary()
        """parameter -> ``(place, name, handle or None)``, in the models' order."""
        self._seen: Any = WeakTensorKeyDictionary()
        self._numbers = itertools.count()
        self._window = WindowTrace(next(self._numbers))
        self._threads = threading.local()
        self._is_over = False
        self._is_closed = False

    def watch(self, model: nn.Module) -> None:
        """Put hooks on every module and parameter of a model, once each.

        Call it again after modules were added. Warns about modules that torch.compile or
        TorchScript runs, which hooks cannot see.

        Args:
            model: names are those of its ``named_modules()``.
        """
        self._is_closed = False
        compiled = []
        for name, module in model.named_modules():
            place = place_of(name, module, model)
            if not self._is_eager and is_compiled(module):
                compiled.append(str(place))
            for own, p in module.named_parameters(recurse=False):
                if p not in self._parameters:
                    self._parameters[p] = (place, own, None)
            if module in self._modules or isinstance(module, torch.jit.ScriptModule):
                continue
            self._modules.add(module)
            enter, leave = Hook(self, "enter", place), Hook(self, "leave", place)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        self._watch_parameters()
        if model not in self._roots:
            self._roots.add(model)
            if compiled:
                warnings.warn(
                    "find_overflow cannot see into compiled or scripted modules: "
                    f"{listed(compiled[:3], len(compiled))}. It will name a loss or a parameter at "
                    "best. Run the model uncompiled to find the module.",
                    stacklevel=2,
                )

    def end_window(self) -> None:
        """A step is over. What was seen is kept until a forward or a backward follows: further
        optimizers may step, and overflow, in the same window."""
        self._is_over = True

    def new_window(self) -> None:
        """Forget everything seen so far: a window was closed or given up."""
        self._is_over = False
        self._window = WindowTrace(next(self._numbers))
        self._threads = threading.local()  # a forward that was interrupted never left

    def note_loss(self, loss: Any) -> None:
        """A backward from this loss is about to start.

        Args:
            loss: tensor of any shape, or a container of tensors; unscaled.
        """
        if self._is_over:
            self.new_window()
        window = self._window
        window.backwards += 1
        for _, tensor in tensors_in(loss):
            seen = self._look(tensor)
            if seen.range is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                window.losses.append(Loss(window.micro, seen.range, dtype))
                if tensor.requires_grad:
                    self._uses_of(tensor, seen).loss = window.losses[-1]

    def find(self, sums: bool = True) -> Origin | None:
        """Where the overflow of the present window began; None: nothing non-finite was seen.

        Synchronises with each device once.

        Args:
            sums: False: a gradient that is not finite though all that was seen to go into it is
                does not count. Another rank's part may not be.
        """
        found = search(self._window, len(self._roots) > 1)
        return found or (search_sums(self._places(), self._window.micro) if sums else None)

    def nonfinite_parameters(self) -> set[str]:
        """Names of those to which a gradient came, in the present window, that was not finite.

        Synchronises with each device once.
        """
        came = list(self._window.parameter_gradients)
        Range.read(each.range for each in came)
        return {
            f"{each.place.name}.{each.name}".lstrip(".")
            for each in came
            if not each.range.is_finite
        }

    def close(self) -> None:
        """Remove every hook and forget everything."""
        for handle in (*self._handles, *(each[-1] for each in self._parameters.values())):
            if handle is not None:
                handle.remove()
        self._is_closed = True  # hooks on tensors of a graph that is still alive
        for each in (self._handles, self._modules, self._roots):
            each.clear()
        self._parameters, self._seen = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.new_window()

    def _watch_parameters(self) -> None:
        """Also those that were frozen when the model was watched, and are no longer."""
        for p, (place, name, handle) in list(self._parameters.items()):
            if handle is None and p.requires_grad:
                hook = Hook(self, "add_parameter_gradient", place, name)
                self._parameters[p] = (place, name, p.register_hook(hook))

    def _places(self) -> Iterator[tuple[Place, str, Tensor]]:
        for p, (place, name, _) in list(self._parameters.items()):
            yield place, name, p

    # Called by hooks.

    def enter(self, place: Place, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A module's forward begins."""
        if not self._is_listening():
            return
        stack = self._stack()
        parent = stack[-1] if stack else None
        if parent is None:
            if not torch.is_grad_enabled():
                return
            if self._is_over and not is_in_backward():
                self.new_window()
                stack = self._stack()
            self._watch_parameters()
        window = self._window
        earlier = window.latest.get(place) if is_in_backward() else None
        if parent is not None:
            forward = parent.forward
        elif earlier is not None:
            # A checkpoint's second run: it lies where the first one lay.
            parent, forward = earlier.parent, earlier.forward
        else:
            forward = window.open_forward(next(self._numbers))
        call = Call(place, parent, forward, is_first=earlier is None)
        stack.append(call)
        call.inputs = self._entries({**dict(enumerate(args)), **kwargs}, call, consumes=True)
        if call.is_first:
            window.latest[place] = call
            forward.add(False, call)

    def leave(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ends, by an exception too (then ``output`` is None)."""
        stack = self._stack()
        if not stack or stack[-1].place is not place:
            return
        call = stack.pop()
        edges, call.edges = call.edges, []  # they hold the graph
        if not self._is_listening():
            return
        call.outputs = self._entries(output, call, consumes=False)
        if edges:
            outputs = [tensor for _, tensor in tensors_in(output)]
            hook_inputs(edges, outputs, lambda number: Hook(self, "add_share", call, number))
        if call.is_first:
            call.forward.add(True, call)

    def add_gradient(self, uses: Uses, grad: Any) -> None:
        """A gradient came to a tensor."""
        made = self._range_of(grad)
        if made is not None:
            self._window.add_gradient(uses, made)

    def add_share(self, call: Call, number: int, grads: Any, _: Any) -> None:
        """A module adds this to the gradient of its input."""
        made = self._range_of(grads[number])
        if made is not None:
            self._window.input_gradients.append(InputGradient(self._window.micro, made, call))

    def add_parameter_gradient(self, place: Place, name: str, grad: Any) -> None:
        """A gradient came to a parameter."""
        made = self._range_of(grad)
        if made is not None:
            came = ParameterGradient(self._window.micro, made, place, name)
            self._window.parameter_gradients.append(came)

    def _range_of(self, grad: Any) -> Range | None:
        is_seen = isinstance(grad, Tensor) and self._is_listening()
        return Range.of(grad) if is_seen else None

    def _is_listening(self) -> bool:
        """Not where tensors have no values, or a range would become part of a program."""
        return not (self._is_closed or torch._C._is_tracing() or is_transformed() or is_capturing())

    def _stack(self) -> list[Call]:
        stack: list[Call] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def _entries(self, value: Any, call: Call, consumes: bool) -> list[Entry]:
        entries = []
        for path, tensor in tensors_in(value):
            # A parameter whose update is due is no Tensor by its type alone, and isinstance waits.
            if not issubclass(type(tensor), Tensor) or isinstance(tensor, nn.Parameter):
                continue  # its gradient is watched by itself
            seen = self._look(tensor)
            if seen.range is None:
                continue
            dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
            entries.append(Entry(path, seen.range, tensor.requires_grad, dtype))
            if tensor.requires_grad:
                uses = self._uses_of(tensor, seen)
                (uses.consumers if consumes else uses.producers).append(call)
                call.forward.has_hooks = True
                if consumes and torch.is_grad_enabled() and call.place.is_leaf:
                    call.edges.append(gradient_edge(tensor))
        return entries

    def _look(self, tensor: Tensor) -> _Seen:
        """Take the range, once for every state of a tensor."""
        number = self._window.number
        version = 0 if tensor.is_inference() else tensor._version
        seen: _Seen | None = self._seen.get(tensor)
        if seen is None or seen.version != version:
            seen = self._seen[tensor] = _Seen(version, number, Range.of(tensor.detach()))
        elif seen.window != number:
            # Through .data it may have changed; a leaf has met nobody yet in this window.
            seen.window, seen.range = number, Range.of(tensor.detach())
            if tensor.is_leaf and seen.uses is not None:
                seen.uses.consumers.clear()
        return seen

    def _uses_of(self, tensor: Tensor, seen: _Seen) -> Uses:
        if seen.uses is None:
            seen.uses = Uses()
            hook: Any = Hook(self, "add_gradient", seen.uses)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return seen.uses


def place_of(name: str, module: nn.Module, model: nn.Module) -> Place:
    """What is told of ``module``, which the model knows by this name."""
    return Place(
        name,
        type(module).__name__,
        type(model).__name__,
        weakref.ref(module),
        is_leaf=next(module.children(), None) is None,
        has_code=getattr(type(module), "forward", None) is not nn.Sequential.forward,
    )


def search_sums(parameters: Iterable[tuple[Place, str, Tensor]], micro: int) -> Origin | None:
    """Where every part was finite: a sum over micro-batches or ranks may not be. Synchronises."""
    summed = [
        (made, place, name)
        for place, name, p in parameters
        if p.grad is not None and (made := Range.of(p.grad)) is not None
    ]
    Range.read(made for made, _, _ in summed)
    for made, place, name in summed:
        if not made.is_finite:
            text = (
                f"gradient of parameter {name} of {place}, micro-batch {micro}: "
                f"{in_words(made.values)} when it was summed, over micro-batches or ranks; "
                "what was seen here to go into it is finite"
            )
            return Origin("parameter", place.name, place.cls, micro, None, None, text, place)
    return None
