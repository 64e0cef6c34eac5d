"""Models may be run within a block, and are afterwards as if they had not been.

Nothing large is copied for it: parameters are run as other objects with the same memory, of which
a copy is made only when something is about to write to it.
"""

from __future__ import annotations

import collections
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from .hooks import is_fsdp2
from .random_state import RandomState

DEEPEST = 6
"""Containers in containers that are looked through."""

MOST_ITEMS = 1 << 12
"""Of a container that is looked through; of a larger one the items are put back, not what is in
them."""

MOST_BYTES = 1 << 28
"""Of an array that is copied; a larger one is data."""

NOT_THE_MODELS_OWN = {"torch", "accelerate", "accel_scaler", *sys.stdlib_module_names}
"""Packages whose objects hold more than a model's state."""

_ORDERED = collections.OrderedDict


@contextmanager
def untouched(models: Iterable[Module], device: torch.device) -> Iterator[None]:
    """Within the block the models may be run; afterwards all is as it was.

    Parameters, gradients, buffers, modes, hooks and random numbers; attributes of the modules and
    of their classes, down to containers in containers, objects of their packages (a config), what
    their hooks close over, and the globals that their methods name. What functions elsewhere write
    to stays.
    """
    everywhere, found = RandomState.now(device), _Found(list(models))
    writes = _Writes(found.tensors())
    try:
        found.put_aside()
        with writes:
            yield
    finally:
        found.put_back()
        writes.put_back()
        everywhere.put_back()


class StrangeGradients:
    """Gradients of leaves that are no parameter of the models, yet in their graph: those that were
    put aside in the block are put back at its end."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    def put_aside(self, roots: Iterable[Tensor]) -> None:
        """Of all that a backward from these comes to."""
        stack = [root.grad_fn for root in roots]
        seen: set[Any] = set()
        while stack:
            node: Any = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and id(leaf) not in self._kept:
                self._kept[id(leaf)] = leaf, leaf.grad
                leaf.grad = None
            stack += [after for after, _ in node.next_functions]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for leaf, grad in self._kept.values():
            leaf.grad = grad
        self._kept.clear()


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


class _Found:
    """All that a forward of these models may write to, as it is."""

    def __init__(self, models: list[Module]) -> None:
        self._modules: list[Module] = []
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of objects."""
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._put_back: list[Callable[[], Any]] = []
        """Of arrays, generators and cells."""
        self._tensors: list[Tensor] = []
        self._seen: set[int] = set()
        inner = [module for model in models for module in model.modules()]
        self._packages = {_package(type(module)) for module in inner} - NOT_THE_MODELS_OWN
        for module in inner:
            self._look(module, 0)
        params = {id(p): p for m in self._modules for p in m._parameters.values() if p is not None}
        self._grads = [(p, p.grad) for p in params.values() if p.requires_grad]
        self._is_sharded = any(map(is_fsdp2, self._modules))

    def tensors(self) -> Iterator[Tensor]:
        """All but those that are run as a copy anyway."""
        yield from self._tensors
        for module in self._modules:
            yield from (p for p in module._parameters.values() if p is not None)

    def put_aside(self) -> None:
        """Other parameters with the same memory, and copies of buffers."""
        for p, _ in self._grads:
            p.grad = None
        others: dict[int, Tensor] = {}
        if not self._is_sharded:  # it gathers its own
            others = {id(p): _alias(p) for p, _ in self._grads}
        for module in self._modules:
            for name, value in list(vars(module).items()):
                if type(value) in (list, dict, _ORDERED):
                    _swap(value, others)
                elif isinstance(value, Tensor) and not value.requires_grad:
                    vars(module)[name] = others.setdefault(id(value), value.clone())
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.requires_grad:
                    module._buffers[name] = others.setdefault(id(buffer), buffer.clone())

    def put_back(self) -> None:
        """Everything as it was."""
        for now, before in self._spaces:
            for name in now.keys() - before.keys():
                del now[name]
            for name, value in before.items():
                if now.get(name) is not value:
                    now[name] = value
        for cls, own in self._classes:
            for name in [n for n in vars(cls) if n not in own and not n.startswith("__")]:
                type.__delattr__(cls, name)
            for name, value in own.items():
                if vars(cls).get(name) is not value:
                    type.__setattr__(cls, name, value)
        for container, content in self._containers:
            if not _is_same(_content(container), content):
                _refill(container, content)
        for put_back in self._put_back:
            put_back()
        for p, grad in self._grads:
            p.grad = grad

    def _look(self, value: Any, depth: int) -> None:
        """Note a value, and what is in it."""
        if type(value) in _PLAIN or id(value) in self._seen or depth > DEEPEST:
            return
        self._seen.add(id(value))
        if issubclass(type(value), torch._C.TensorBase):
            self._tensors.append(value)
        elif isinstance(value, Module):
            self._modules.append(value)
            self._look_at_class(type(value))
            self._look_at_attributes(value, 0)
        elif isinstance(value, _CONTAINERS):
            content = _content(value)
            self._containers.append((value, content))
            if len(content) <= MOST_ITEMS:
                is_dict = isinstance(value, dict)
                for item in content:
                    self._look(item[1] if is_dict else item, depth + 1)
        elif isinstance(value, tuple):
            for item in value[:MOST_ITEMS]:
                self._look(item, depth + 1)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._look_at_function(value, depth + 1)
        elif not self._look_at_state(value) and (
            isinstance(value, _HOLDERS) or _package(type(value)) in self._packages
        ):
            self._look_at_attributes(value, depth + 1)

    def _look_at_attributes(self, owner: Any, depth: int) -> None:
        own = getattr(owner, "__dict__", None)
        if type(own) is dict:
            before = dict(own)
            self._spaces.append((own, before))
            for value in before.values():
                self._look(value, depth)
        for name in [n for cls in type(owner).__mro__ for n in vars(cls).get("__slots__", ())]:
            if not name.startswith("__") and hasattr(owner, name):
                value = getattr(owner, name)
                self._put_back.append(functools.partial(object.__setattr__, owner, name, value))
                self._look(value, depth)

    def _look_at_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if id(each) not in self._seen and _package(each) in self._packages:
                self._seen.add(id(each))
                own = {k: v for k, v in vars(each).items() if not k.startswith("__")}
                self._classes.append((each, own))
                for value in own.values():
                    if isinstance(value, _CONTAINERS):
                        self._look(value, 1)
                    elif isinstance(value, types.FunctionType):
                        self._look_at_globals(value)

    def _look_at_globals(self, method: types.FunctionType) -> None:
        """Those that its code names: containers, and numbers that it may count with."""
        space = method.__globals__
        for name in method.__code__.co_names:
            value = space.get(name)
            if type(value) in (int, float):
                self._put_back.append(functools.partial(space.__setitem__, name, value))
            elif isinstance(value, _CONTAINERS):
                self._look(value, 1)

    def _look_at_function(self, function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self._look(value, depth)
        elif isinstance(function, types.MethodType):
            self._look(function.__self__, depth)
            self._look(function.__func__, depth)
        elif (function.__module__ or "").partition(".")[0] not in NOT_THE_MODELS_OWN:
            for value in function.__defaults__ or ():
                self._look(value, depth)
            for cell in function.__closure__ or ():
                try:
                    value = cell.cell_contents
                except ValueError:  # an empty one
                    continue
                self._put_back.append(functools.partial(setattr, cell, "cell_contents", value))
                self._look(value, depth)

    def _look_at_state(self, value: Any) -> bool:
        """Whether it is a generator of random numbers or an array."""
        numpy: Any = sys.modules.get("numpy")
        put: Callable[[], Any] | None = None
        if isinstance(value, torch.Generator):
            put = functools.partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            put = functools.partial(value.setstate, value.getstate())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            put = functools.partial(setattr, bits, "state", bits.state)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            put = functools.partial(value.set_state, value.get_state())
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.flags.writeable and value.nbytes <= MOST_BYTES:
                put = functools.partial(numpy.copyto, value, value.copy())
        else:
            return False
        if put is not None:
            self._put_back.append(put)
        return True


_CONTAINERS = (list, dict, set, collections.deque)
_HOLDERS = (types.SimpleNamespace, collections.UserDict, collections.UserList)
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def _package(cls: type) -> str:
    return (cls.__module__ or "").partition(".")[0]


def _alias(p: Tensor) -> Parameter:
    """Another leaf with the same memory, whose gradient goes as soon as it has been looked at."""
    alias = Parameter(p.detach())
    vars(alias).update(vars(p))
    if getattr(p, "grad_dtype", p.dtype) is not p.dtype:
        alias.grad_dtype = p.grad_dtype
    alias.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    return alias


def _drop(p: Tensor) -> None:
    p.grad = None


def _swap(container: Any, others: dict[int, Tensor]) -> None:
    """Put the other parameters where theirs are."""
    items = enumerate(container) if isinstance(container, list) else list(container.items())
    for key, value in items:
        if id(value) in others:
            container[key] = others[id(value)]


def _content(container: Any) -> list[Any]:
    """Items in order, whatever a subclass makes of them."""
    if isinstance(container, dict):
        kind: Any = _ORDERED if isinstance(container, _ORDERED) else dict
        return list(kind.items(container))
    return list.copy(container) if isinstance(container, list) else list(container)


def _is_same(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    if one and type(one[0]) is tuple:  # items of a dict are made anew each time
        return all(
            a is b
            or (type(a) is tuple is type(b) and len(a) == len(b) and all(map(operator.is_, a, b)))
            for a, b in zip(one, other, strict=True)
        )
    return all(map(operator.is_, one, other))


def _refill(container: Any, content: list[Any]) -> None:
    """Its contents again."""
    if isinstance(container, dict):
        kind: Any = _ORDERED if isinstance(container, _ORDERED) else dict
        kind.clear(container)
        for key, value in content:
            kind.__setitem__(container, key, value)
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)
