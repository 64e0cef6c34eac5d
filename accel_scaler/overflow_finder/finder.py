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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..devices import is_capturing
from ..errors import listed
from .hooks import AtParameter, AtTensor, Enter, Leave, edge_of, hook_inputs
from .ranges import Range, Ranges, shown, tensors_in
from .search import First, search
from .trace import MOST, Call, Entry, Listener, Loss, Own, Pass, Place, Share, Window

__all__ = ["First", "OverflowFinder"]

MOST_LISTENING = 256
"""Calls remembered for one tensor: one that lives as long as the run is met in every forward."""


@dataclass
class _Seen:
    """What is known of a living tensor."""

    version: int
    window: int
    range: Range | None
    listener: Listener | None = None


class OverflowFinder:
    """Watches models and names the module that overflowed first.

    A debugging switch: it reads every activation and every gradient once more. It does not
    change a value, holds no activation, and synchronises with the device in :meth:`find` only.

    Forwards without gradients are not kept, nor those that no backward reaches, beyond a
    bounded number. What activation checkpointing runs again in the backward takes no part in the
    order of the forward; only its gradients count. Compiled and scripted modules cannot be seen
    into: there a loss or a parameter is named at best.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._params: Any = WeakTensorKeyDictionary()
        """parameter -> ``(place, name, handle or None)``, in the models' order."""
        self._frozen: list[weakref.ref[Tensor]] = []
        self._seen: Any = WeakTensorKeyDictionary()
        self._ranges = Ranges()
        self._numbers, self._orders = itertools.count(), itertools.count()
        self._window = Window(next(self._numbers))
        self._threads = threading.local()
        self._is_over = False
        self._is_open = True

    def watch(self, model: nn.Module) -> None:
        """Put hooks on every module and parameter of a model, once each.

        Call it again after modules were added. Warns about modules that torch.compile or
        TorchScript runs, which hooks cannot see.

        Args:
            model: names are those of its ``named_modules()``.
        """
        self._is_open = True
        closed = []
        for name, module in model.named_modules():
            place = Place(
                name,
                type(module).__name__,
                type(model).__name__,
                weakref.ref(module),
                next(module.children(), None) is None,
                getattr(type(module), "forward", None) is not nn.Sequential.forward,
            )
            if _is_closed(module):
                closed.append(str(place))
            for own, p in module.named_parameters(recurse=False):
                if p not in self._params:
                    self._params[p] = (place, own, None)
                    self._frozen.append(weakref.ref(p))
            if module in self._modules or isinstance(module, torch.jit.ScriptModule):
                continue
            self._modules.add(module)
            self._handles += [
                module.register_forward_pre_hook(Enter(self, place), with_kwargs=True),
                module.register_forward_hook(Leave(self, place), always_call=True),
            ]
        self._watch_parameters()
        if model not in self._roots:
            self._roots.add(model)
            if closed:
                warnings.warn(
                    "find_overflow cannot see into compiled or scripted modules: "
                    f"{listed(closed[:3], len(closed))}. It will name a loss or a parameter at "
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
        self._window = Window(next(self._numbers))
        self._ranges.clear()
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
                noted = Loss(window.micro, seen.range, dtype)
                window.losses.append(noted)
                if tensor.requires_grad:
                    self._listen(tensor, seen).loss = noted

    def find(self) -> First | None:
        """Where the overflow of the present window began; None: nothing non-finite was seen.

        Synchronises with each device once.
        """
        return search(self._window, len(self._roots) > 1) or self._summed()

    def close(self) -> None:
        """Remove every hook and forget everything."""
        for handle in self._handles:
            handle.remove()
        for _, _, handle in self._params.values():
            if handle is not None:
                handle.remove()
        self._is_open = False  # hooks on tensors of a graph that is still alive
        self._handles.clear()
        self._frozen.clear()
        for each in (self._modules, self._roots):
            each.clear()
        self._params, self._seen = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.new_window()

    def _watch_parameters(self) -> None:
        """Also those that were frozen when the model was watched, and are no longer."""
        still = []
        for ref in self._frozen:
            p = ref()
            if p is None:
                continue
            place, name, _ = self._params[p]
            if p.requires_grad:
                handle = _hook_on(p, AtParameter(self, place, name))
                self._params[p] = (place, name, handle)
            else:
                still.append(ref)
        self._frozen = still

    def _summed(self) -> First | None:
        """Every part was finite: a sum over micro-batches or ranks may not be."""
        taken = []
        for p, (place, name, _) in list(self._params.items()):
            made = None if p.grad is None else self._ranges.take(p.grad)
            if made is not None:
                taken.append((made, place, name))
        Ranges.read(made for made, _, _ in taken)
        for made, place, name in taken:
            if made.is_broken:
                micro = self._window.micro
                text = (
                    f"gradient of parameter {name} of {place}, micro-batch {micro}: "
                    f"{shown(made.values)} when it was summed, over micro-batches or ranks; what "
                    "was seen here to go into it is finite"
                )
                return First("parameter", place.name, place.cls, micro, None, None, text)
        return None

    # Called by hooks.

    def enter(self, place: Place, value: Any) -> None:
        """A module's forward begins."""
        if not self._is_open or _is_blind():
            return
        stack = self._stack()
        parent = stack[-1] if stack else None
        if parent is None:
            if not torch.is_grad_enabled():
                return
            if self._is_over and not _is_in_backward():
                self.new_window()
                stack = self._stack()
            self._watch_parameters()
        window = self._window
        first = window.latest.get(place) if _is_in_backward() else None
        if parent is not None:
            walk = parent.walk
        elif first is not None:
            # A checkpoint's second run: it lies where the first one lay.
            parent, walk = first.parent, first.walk
        else:
            walk = window.open_pass(next(self._orders))
        call = Call(place, parent, walk)
        stack.append(call)
        call.inputs = self._entries(value, call, consumes=True)
        call.is_counted = first is None
        if first is None:
            window.latest[place] = call
            self._add(walk, False, call)

    def leave(self, place: Place, value: Any) -> None:
        """A module's forward ends, by an exception too (then ``value`` is None)."""
        stack = self._stack()
        if not stack or stack[-1].place is not place:
            return
        call = stack.pop()
        if not self._is_open or _is_blind():
            call.edges = []
            return
        call.outputs = self._entries(value, call, consumes=False)
        if call.edges:
            hook_inputs(self, call, call.edges, [t for _, t in tensors_in(value)])
            call.edges = []  # they hold the graph
        if call.is_counted:
            self._add(call.walk, True, call)

    def arrive(self, listener: Listener, grad: Any) -> None:
        """A gradient came to a tensor."""
        made = self._ranges.take(grad) if self._can_take(grad) else None
        if made is not None:
            self._window.arrive(listener, made)

    def share(self, call: Call, grad: Any) -> None:
        """A module adds this to the gradient of its input."""
        made = self._ranges.take(grad) if self._can_take(grad) else None
        if made is not None:
            self._window.shares.append(Share(self._window.micro, call, made))

    def arrive_at_parameter(self, place: Place, name: str, grad: Any) -> None:
        """A gradient came to a parameter."""
        made = self._ranges.take(grad) if self._can_take(grad) else None
        if made is not None:
            self._window.own.append(Own(self._window.micro, place, name, made))

    def _can_take(self, grad: Any) -> bool:
        return isinstance(grad, Tensor) and self._is_open and not _is_blind()

    @staticmethod
    def _add(walk: Pass, left: bool, call: Call) -> None:
        if walk.size < MOST:
            walk.events.append((left, call))
            walk.size += 1 + len(call.outputs if left else call.inputs)

    def _stack(self) -> list[Call]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[Call] = self._threads.stack
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
                listener = self._listen(tensor, seen)
                calls = listener.consumers if consumes else listener.producers
                if len(calls) < MOST_LISTENING:
                    calls.append(call)
                call.walk.is_hooked = True
                if consumes and torch.is_grad_enabled() and call.place.is_leaf:
                    call.edges.append(edge_of(tensor))
        return entries

    def _look(self, tensor: Tensor) -> _Seen:
        """Take the range, once for every state of a tensor."""
        number = self._window.number
        version = 0 if tensor.is_inference() else tensor._version
        seen: _Seen | None = self._seen.get(tensor)
        if seen is None or seen.version != version:
            seen = _Seen(version, number, self._ranges.take(tensor.detach()))
            self._seen[tensor] = seen
        elif seen.window != number:
            # Through .data it may have changed; a leaf has met nobody yet in this window.
            seen.window, seen.range = number, self._ranges.take(tensor.detach())
            if tensor.is_leaf and seen.listener is not None:
                seen.listener.consumers.clear()
        return seen

    def _listen(self, tensor: Tensor, seen: _Seen) -> Listener:
        if seen.listener is None:
            seen.listener = Listener()
            _hook_on(tensor, AtTensor(self, seen.listener))
        return seen.listener


def _hook_on(tensor: Any, hook: Callable[[Any], None]) -> Any:
    return tensor.register_hook(hook)


def _is_blind() -> bool:
    """Where tensors have no values to look at, or a range would become part of a program."""
    return (
        torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_capturing()
    )


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_closed(module: Any) -> bool:
    return (
        isinstance(module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule))
        or module._compiled_call_impl is not None
    )
