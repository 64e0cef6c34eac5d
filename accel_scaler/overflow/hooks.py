"""Hooks on models, and the tensors in the inputs and the results of modules.

Lists, tuples, dicts and whatever is registered with ``torch.utils._pytree`` (the outputs of
transformers) are containers, and so is every mutable mapping (``BatchEncoding``). Other objects, as
plain dataclasses and key-value caches, are passed as they are, and nobody looks into them.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from ..models import inert


class Hook:
    """Calls ``listener.method(*about, *arguments of the hook)`` while the listener lives.

    A copy or a pickle of it does nothing.
    """

    __torch_unserializable__ = True  # a tensor is saved without its hooks, and without a warning

    def __init__(self, listener: Any, method: str, *about: Any) -> None:
        self._listener, self._method, self._about = weakref.ref(listener), method, about

    def __reduce__(self) -> Any:
        return inert()

    def __call__(self, *given: Any) -> None:
        # Traced to nothing, a hook does not break the graph of a compiled model.
        listener = None if torch.compiler.is_compiling() else self._listener()
        if listener is not None:
            getattr(listener, self._method)(*self._about, *given)


class ForwardListener:
    """Hears the forwards of modules, window after window: ``enter`` and ``leave``."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()
        self._threads = threading.local()
        self._is_over = False

    def _listen(self, module: Module, about: Any, prepend: bool = False) -> None:
        self._modules.add(module)
        enter, leave = Hook(self, "enter", about), Hook(self, "leave", about)
        self._handles += [
            module.register_forward_pre_hook(enter, prepend=prepend, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _stack(self) -> list[Any]:
        """The forwards that run on this thread, the innermost last."""
        stack: list[Any] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def end_window(self) -> None:
        """An optimizer has stepped. Another one may still step, and overflow, in the same window,
        so nothing is dropped before the next forward or backward."""
        self._is_over = True

    def new_window(self) -> None:
        """Drop all that was seen."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove every hook and drop all that was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        self.new_window()


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor. ``isinstance`` would wait for a parameter whose update is
    pending."""
    return issubclass(type(value), torch._C.TensorBase)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if is_tensor(leaf):
            found.append(leaf)
        elif isinstance(leaf, MutableMapping):
            found += tensors_in(list(leaf.values()))
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``change(tensor)`` instead of each tensor; containers are copied."""

    def change_leaf(leaf: Any) -> Any:
        if is_tensor(leaf):
            return change(leaf)
        if isinstance(leaf, MutableMapping):
            # transformers registers the class of an output with pytree on its first use only.
            changed = copy.copy(leaf)
            for key, item in leaf.items():
                changed[key] = map_tensors(item, change)
            return changed
        return leaf

    return tree_map(change_leaf, value)
