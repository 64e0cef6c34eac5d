"""Hooks on models, and the tensors in what a module is given and in what it returns.

Lists, tuples, dicts and whatever is registered with ``torch.utils._pytree`` (the outputs of
transformers) are containers, and so is every mutable mapping (``BatchEncoding``). Other objects, as
plain dataclasses and key-value caches, are passed as they are, and nobody looks into them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
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


def is_tensor(value: Any) -> bool:
    """Whether it is one. ``isinstance`` would wait for a parameter whose update is pending."""
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


def named_tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor)``: the key or the index in the outermost container; "" for a lone tensor."""
    items: Any = [("", value)]
    if is_tensor(value):
        pass
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        for tensor in tensors_in(item):
            yield str(key), tensor


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``change(tensor)`` instead of each tensor; containers are copied."""

    def change_leaf(leaf: Any) -> Any:
        if is_tensor(leaf):
            return change(leaf)
        if isinstance(leaf, MutableMapping):
            # Also an output of transformers whose class pytree does not know yet.
            changed = copy.copy(leaf)
            for key, item in leaf.items():
                changed[key] = map_tensors(item, change)
            return changed
        return leaf

    return tree_map(change_leaf, value)
