"""Models may be run within a block; parameters, buffers and random state are afterwards as before.

Nothing large is copied for it: parameters are run as other objects with the same memory, of which
a copy is made only when something is about to write to it. What else a forward writes to stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from ..models import is_fsdp2
from .random_state import RandomState


@contextmanager
def untouched(models: Iterable[Module], device: torch.device) -> Iterator[None]:
    """Within the block the models may be run; parameters, their gradients, buffers and the random
    numbers of Python, NumPy and torch are afterwards as they were."""
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    random = RandomState.now(device)
    places: list[dict[str, Any]] = [m._parameters for m in modules]
    places += [m._buffers for m in modules]
    before = [dict(place) for place in places]
    params = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    grads = [(p, p.grad) for p in params.values() if p.requires_grad]
    writes = _Writes(params.values())
    try:
        for p, _ in grads:
            p.grad = None
        _replace(places, is_sharded=any(map(is_fsdp2, modules)))
        _flatten(modules)
        with writes:
            yield
    finally:
        for place, own in zip(places, before, strict=True):
            place.clear()
            place.update(own)
        _flatten(modules)
        for p, grad in grads:
            p.grad = grad
        writes.put_back()
        random.put_back()


class _Writes(TorchFunctionMode):
    """Keeps a copy of what is about to be written to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {_memory_of(tensor) for tensor in tensors} - {None}
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            memory = _memory_of(tensor)
            if memory is not None and memory in self._known and memory not in self._kept:
                storage = tensor.untyped_storage()
                before: Any = torch.UntypedStorage
                before = before(storage.nbytes(), device=storage.device).copy_(storage)
                self._kept[memory] = storage, before
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Without a word to the version counters."""
        for storage, before in self._kept.values():
            storage.copy_(before)
        self._kept.clear()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    name: str = getattr(func, "__name__", "")
    given: list[Any] = [kwargs["out"]] if kwargs.get("out") is not None else []
    if name.startswith("__i") or name == "__setitem__" or name[-1:] == "_" != name[-2:-1]:
        given += args[:1] or kwargs.values()
    for each in given:
        for tensor in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(tensor, Tensor):
                yield tensor


def _memory_of(tensor: Tensor) -> int | None:
    """None: it has no memory of its own that could be copied."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    address: int = tensor.untyped_storage().data_ptr()
    return address or None


def _replace(places: list[dict[str, Any]], is_sharded: bool) -> None:
    """Other parameters with the same memory, and copies of buffers."""
    others: dict[int, Tensor] = {}
    for place in places:
        for name, tensor in place.items():
            if isinstance(tensor, Parameter):
                # What is sharded is gathered from its own; a frozen one may be of any class.
                if is_sharded or not (tensor.requires_grad or type(tensor) is Parameter):
                    continue
                place[name] = others.setdefault(id(tensor), _alias(tensor))
            elif tensor is not None and not tensor.requires_grad:
                place[name] = others.setdefault(id(tensor), tensor.clone())


def _alias(p: Tensor) -> Parameter:
    """Another leaf with the same memory, whose gradient goes as soon as it has been looked at."""
    alias = Parameter(p.detach(), requires_grad=p.requires_grad)
    vars(alias).update(vars(p))
    if getattr(p, "grad_dtype", p.dtype) is not p.dtype:
        alias.grad_dtype = p.grad_dtype
    if p.requires_grad:
        alias.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    return alias


def _drop(p: Tensor) -> None:
    p.grad = None


def _flatten(modules: Iterable[Module]) -> None:
    """A recurrent layer keeps its weights in a list beside."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            names = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]
