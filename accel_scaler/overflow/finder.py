"""``OverflowFinder``: hooks on a model that find the module that overflowed first.

The hooks leave a range of two elements for each tensor that they see, on its device. Nothing is
read from the device before a boundary has overflowed. Gradients are seen by hooks on tensors, since
a module's own backward hooks forbid changing its output in place.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from ..devices import is_capturing
from ..models import is_in_backward, is_transformed
from ..scaling import Origin
from .hooks import ForwardListener, Hook, tensors_in
from .module_names import plain_name
from .search import search
from .trace import (
    Call,
    Entry,
    Gradient,
    Loss,
    ParameterGradient,
    Range,
    Seen,
    WatchedModule,
    WindowTrace,
)


class OverflowFinder(ForwardListener):
    """Watches models and names the module that overflowed first.

    It reads every activation and every gradient once more. It changes no value, keeps no activation
    alive, and synchronises with the device in :meth:`find` only.

    Forwards without gradients are not kept, nor the first ones beyond a bounded number. A module
    that activation checkpointing runs again takes no part in the order of the forward; only its
    gradients count. Compiled and scripted modules cannot be seen into: there a loss or a parameter
    is named at best.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parameters: Any = WeakTensorKeyDictionary()
        """Parameters with a hook."""
        self._seen: Any = WeakTensorKeyDictionary()
        self._window = WindowTrace()

    def watch(self, model: Module) -> None:
        """Put hooks on every module and parameter of a model, once each.

        Call it again after modules were added or parameters unfrozen.
        """
        for name, module in model.named_modules():
            watched = WatchedModule(plain_name(name), type(module).__name__)
            for own, p in module.named_parameters(recurse=False):
                if p.requires_grad and p not in self._parameters:
                    hook = Hook(self, "add_parameter_gradient", watched, own)
                    self._parameters[p] = True
                    self._handles.append(p.register_hook(hook))
            if module not in self._modules and not isinstance(module, torch.jit.ScriptModule):
                self._listen(module, watched)

    def before_backward(self, loss: Any) -> None:
        if self._is_over:
            self.new_window()
        window = self._window
        window.backwards += 1
        for tensor in tensors_in(loss):
            seen = self._look(tensor)
            if seen.range is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                window.losses.append(Loss(window.micro, seen.range, dtype))
                seen.loss = window.losses[-1]

    def new_window(self) -> None:
        self._is_over = False
        self._window = WindowTrace()
        self._threads = threading.local()  # a forward that was interrupted never left

    def find(self) -> Origin | None:
        """Where the overflow of the present window began; None if all that was seen is finite.

        Synchronises with each device once.
        """
        return search(self._window)

    def close(self) -> None:
        self._parameters, self._seen = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        super().close()

    # Called by hooks.

    def enter(self, watched: WatchedModule, module: Module, args: Any, kwargs: Any) -> None:
        if not self._is_listening():
            return
        stack = self._stack()
        parent: Call | None = stack[-1] if stack else None
        if parent is None:
            if not torch.is_grad_enabled():
                return
            if self._is_over and not is_in_backward():
                self.new_window()
                stack = self._stack()
        window = self._window
        earlier = window.latest.get(watched) if is_in_backward() else None
        if parent is None and earlier is not None:
            parent = earlier.parent  # a checkpoint's second run belongs where the first one was
        call = Call(watched, parent, window.backwards if parent is None else parent.micro)
        stack.append(call)
        call.inputs = self._entries((args, kwargs), call, consumes=True)
        if earlier is None:
            window.latest[watched] = call
            window.events.append((False, call))

    def leave(self, watched: WatchedModule, module: Module, args: Any, output: Any) -> None:
        """A module's forward ends; by an exception if ``output`` is None."""
        stack = self._stack()
        if not stack or stack[-1].module is not watched:
            return
        call: Call = stack.pop()
        if not self._is_listening():
            return
        call.outputs = self._entries(output, call, consumes=False)
        if self._window.latest.get(watched) is call:
            self._window.events.append((True, call))

    def add_gradient(self, seen: Seen, grad: Any) -> None:
        found = self._range_of(grad)
        if found is not None:
            self._window.gradients.append(Gradient(self._window.micro, found, seen))

    def add_parameter_gradient(self, watched: WatchedModule, name: str, grad: Any) -> None:
        found = self._range_of(grad)
        if found is not None:
            gradient = ParameterGradient(self._window.micro, found, watched, name)
            self._window.parameter_gradients.append(gradient)

    def _range_of(self, grad: Any) -> Range | None:
        is_seen = isinstance(grad, Tensor) and self._is_listening()
        return Range.of(grad) if is_seen else None

    def _is_listening(self) -> bool:
        """False where tensors have no values, or where a range would become part of a program."""
        return not (torch._C._is_tracing() or is_transformed() or is_capturing())

    def _entries(self, value: Any, call: Call, consumes: bool) -> list[Entry]:
        entries = []
        for tensor in tensors_in(value):
            # A parameter whose update is pending is of another class, and isinstance would wait.
            if not issubclass(type(tensor), Tensor) or isinstance(tensor, Parameter):
                continue  # its gradient is watched by itself
            seen = self._look(tensor)
            if seen.range is None:
                continue
            entries.append(Entry(seen.range, tensor.requires_grad))
            if tensor.requires_grad:
                (seen.consumers if consumes else seen.producers).append(call)
        return entries

    def _look(self, tensor: Tensor) -> Seen:
        """Take the range, once for every version of a tensor."""
        version = 0 if tensor.is_inference() else tensor._version
        seen: Seen | None = self._seen.get(tensor)
        if seen is None or seen.version != version:
            seen = self._seen[tensor] = Seen(version, Range.of(tensor.detach()))
            if tensor.requires_grad and seen.range is not None:
                hook: Any = Hook(self, "add_gradient", seen)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return seen
