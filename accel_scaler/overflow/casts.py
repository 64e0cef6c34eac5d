"""Tensors in containers, from float16 and bfloat16 to float32 and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

LOW = (torch.float16, torch.bfloat16)
FULL = (torch.float32,)
DEEPEST = 6
"""Containers in containers; a graph of objects that know each other has no end."""


def raised(value: Any) -> Any:
    """``value`` with its float16 and bfloat16 tensors in float32, seen by autograd.

    Tensors are looked for in tuples, lists, mappings, named tuples and dataclasses; containers
    that hold none, and all else, are passed as they are.
    """
    return _cast(value, LOW, lambda tensor: tensor.to(torch.float32))


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its float32 tensors in ``dtype``: finite elements clamped to its range.

    The gradient of a clamped element is 0; an inf or NaN stays one.
    """
    most = torch.finfo(dtype).max

    def lower(tensor: Tensor) -> Tensor:
        return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(dtype)

    return _cast(value, FULL, lower)


def first_dtype(
    value: Any, wanted: tuple[torch.dtype, ...], depth: int = DEEPEST
) -> torch.dtype | None:
    """That of the first tensor in ``value`` that is in one of these; None: there is none.

    A compiler traces it: no generators, nothing compared by identity.
    """
    if isinstance(value, Tensor):
        return value.dtype if value.dtype in wanted else None
    if isinstance(value, Mapping):
        value = list(value.values())
    elif _is_data(value):
        value = [getattr(value, spec.name, None) for spec in dataclasses.fields(value)]
    elif not isinstance(value, (tuple, list)):
        return None
    for item in value:
        found = first_dtype(item, wanted, depth - 1) if depth else None
        if found is not None:
            return found
    return None


def _cast(
    value: Any,
    wanted: tuple[torch.dtype, ...],
    cast: Callable[[Tensor], Tensor],
    depth: int = DEEPEST,
) -> Any:
    if first_dtype(value, wanted, depth) is None:
        return value
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, (tuple, list)):
        items = [_cast(item, wanted, cast, depth - 1) for item in value]
        if hasattr(value, "_make"):
            return value._make(items)
        return items if type(value) is list else type(value)(items)
    if isinstance(value, Mapping):
        found = {key: _cast(item, wanted, cast, depth - 1) for key, item in value.items()}
        if type(value) is dict:
            return found
        if not isinstance(value, MutableMapping):
            return type(value)(found)  # type: ignore[call-arg]
        other = copy.copy(value)
        for key, item in found.items():
            other[key] = item
        return other
    changed = copy.copy(value)
    for spec in dataclasses.fields(value):
        if hasattr(value, spec.name):
            item = _cast(getattr(value, spec.name), wanted, cast, depth - 1)
            object.__setattr__(changed, spec.name, item)  # in a frozen one too
    return changed


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
