"""The tensors in what a module is given and in what it returns.

Lists, tuples, dicts and whatever is registered with ``torch.utils._pytree`` (the outputs of
transformers) are containers, and so is every mutable mapping (``BatchEncoding``). Other objects, as
plain dataclasses and key-value caches, are passed as they are, and nobody looks into them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


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
