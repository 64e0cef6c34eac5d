"""What an optimizer keeps of its own: looked through, copied for a step, and brought back.

A copy of an optimizer steps as the optimizer does where all it holds is plain values: numbers,
text, tensors, and containers of these. What refers to the parameters themselves, or to anything
that a copy would share with the user (a lock, a file, a function with a memory of its own), does
not go along.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optimizer_step import ATTRIBUTE
from ..scaling import parameters_of

__all__ = [
    "Settings",
    "attributes_of_every_optimizer",
    "find_parameters",
    "find_unlike",
    "frozen",
    "own_attributes",
    "tensors_in",
]

_VALUES: tuple[type, ...] = (
    *(type(None), EllipsisType, bool, int, float, complex, str, bytes, Decimal, Fraction, Enum),
    *(range, slice, type, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.Size, torch.finfo, torch.iinfo),
)
"""Never changed in place, so shared."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque)

_ACCESS = ("__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__del__")

_MISSING: Any = object()


@cache
def attributes_of_every_optimizer() -> frozenset[str]:
    """What torch itself puts on an instance. Not at import: the first optimizer loads dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))) | {
        "step",
        "param_groups",
    }


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Those that are not torch's, nor ours."""
    torchs = attributes_of_every_optimizer()
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in torchs and key != ATTRIBUTE
    }


def find_parameters(optimizer: Optimizer) -> str | None:
    """Where the optimizer keeps its parameters, or another optimizer, besides its groups."""
    own = set(map(id, parameters_of(optimizer)))
    for where, value in _held(optimizer):
        if _reaches(value, own, set()):
            return where
    for key, entry in optimizer.state.items():
        inner = entry.values() if isinstance(entry, dict) else (entry,)
        if any(id(value) in own for value in inner):
            return "its state" if isinstance(key, Tensor) else f"{key!r} of its state"
    return None


def _reaches(value: Any, own: set[int], seen: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) in own
    if type(value) is int:
        return value in own  # found again by id(p), under which the copy's are not known
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, nn.Module):
        return any(id(p) in own for p in nn.Module.parameters(value))
    if not isinstance(value, (dict, list, tuple, set, frozenset, deque)) or id(value) in seen:
        return False
    seen.add(id(value))
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(_reaches(item, own, seen) for item in items)


def find_unlike(optimizer: Optimizer) -> str | None:
    """Why a copy of the optimizer might step unlike it; None: it does not."""
    cls = type(optimizer)
    for name in _ACCESS:
        if getattr(cls, name, None) is not getattr(Optimizer, name, None):
            return f"its class defines {name}"
    for kind in cls.__mro__:
        for name in ("param_groups", "state", "defaults"):
            if name in vars(kind):
                return f"its class defines {name}"
        if vars(kind).get("__slots__"):
            return "its class has __slots__"
    if type(optimizer.state) not in (dict, defaultdict):
        return f"its state is a {type(optimizer.state).__name__}"
    look = _Look(optimizer)
    for where, value in _held(optimizer):
        if (what := look.at(value)) is not None:
            return f"{where} {what}"
    return None


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """All that a step may read on the optimizer, its groups and its parameters, with its place."""
    for key, value in own_attributes(optimizer).items():
        yield f"its attribute {key!r}", value
    yield "its attribute 'defaults'", optimizer.__dict__.get("defaults")
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key!r} of its group {number}", value
        for p in group["params"]:
            for key, value in vars(p).items():
                yield f"the attribute {key!r} of one of its parameters", value


class _Look:
    """Through the values that one optimizer holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: set[int] = set()
        self._open: set[int] = set()
        """Containers that are being looked through."""
        self._memory: dict[int, int] = {}
        """Storage -> ``id`` of the attribute that has it; 0: a parameter or its state."""
        self._is_ready = False

    def at(self, value: Any) -> str | None:
        """What is wrong with ``value``, to follow its name; None: it can be copied."""
        if id(value) in self._open:
            return "contains itself"
        if isinstance(value, _VALUES) or id(value) in self._seen:
            return None
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return self._at_tensor(value)
        if type(value) in _CONTAINERS:
            keys: Iterable[Any] = value if isinstance(value, (dict, set, frozenset)) else ()
            if any(isinstance(key, Tensor) for key in keys):
                return "finds a tensor by its identity, which a copy has not"
            factory = getattr(value, "default_factory", None)
            items = [*value.values(), *value] if isinstance(value, dict) else value
            self._open.add(id(value))
            for item in (factory, *items):
                if (what := self.at(item)) is not None:
                    return what
            self._open.discard(id(value))
            return None
        if self._is_code(value):
            return None
        return f"holds a {type(value).__name__}, which a copy would share or miss"

    def _at_tensor(self, value: Tensor) -> str | None:
        if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
            return f"holds a {type(value).__name__} that is more than its values"
        if not self._is_ready:
            self._is_ready = True
            for entry in self._optimizer.state.values():
                for t in entry.values() if isinstance(entry, dict) else (entry,):
                    if isinstance(t, Tensor):
                        self._memory[_storage(t)] = 0
            for p in parameters_of(self._optimizer):
                self._memory[_storage(p)] = 0
        if value.numel() and self._memory.setdefault(_storage(value), id(value)) != id(value):
            return "shares memory with something else that the step uses"
        return None

    def _is_code(self, value: Any) -> bool:
        """As much the author's code, and no more, as the methods of the class are."""
        if isinstance(value, BuiltinFunctionType):
            return isinstance(value.__self__, (type(None), type, ModuleType))
        modules = {cls.__module__ for cls in type(self._optimizer).__mro__}
        return (
            type(value) is FunctionType
            and value.__module__ in modules
            and vars(sys.modules[value.__module__]).get(value.__qualname__) is value
        )


def _storage(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a kind of tensor without memory of its own
        return -id(t)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All that ``value`` holds, in containers of containers, too."""
    left, seen = [value], set()
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, _CONTAINERS) and id(item) not in seen:
            seen.add(id(item))
            left += item.values() if isinstance(item, dict) else item


def frozen(value: Any) -> Any:
    """As it is now, all the way down; what is neither tensor nor container is shared."""
    return _copy(value, {})


def _copy(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """``memo``: ``id`` -> what was copied and the copy; both are kept, so that ids stay theirs."""
    if id(value) in memo:
        return memo[id(value)][1]
    made: Any = value
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            made = value.detach().clone()
            memo[id(value)] = value, made
    elif type(value) in (list, set, deque, dict, OrderedDict, defaultdict):
        made = copy.copy(value)
        memo[id(value)] = value, made
        if isinstance(value, dict):
            for key, item in value.items():
                made[key] = _copy(item, memo)
        elif type(value) is not set:  # whose members cannot be changed in place
            for place, item in enumerate(value):
                made[place] = _copy(item, memo)
    elif type(value) is tuple:
        items = [_copy(item, memo) for item in value]
        if any(a is not b for a, b in zip(items, value, strict=True)):
            made = tuple(items)
            memo[id(value)] = value, made
    return made


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, but for the sign of a zero."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (a.shape, a.dtype, a.device, a.stride()) == (
            b.shape,
            b.dtype,
            b.device,
            b.stride(),
        ) and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))


class _Space:
    """One dictionary of the user's, its copy's, and both as they were when the step began."""

    def __init__(self, live: dict[str, Any], copied: dict[str, Any], but: Container[str]) -> None:
        self.live, self.copied, self.but = live, copied, but
        self.before: dict[str, Any] = {}
        """Other copies, which the step does not have."""


class Settings:
    """The values of one moment, copied for a step; what the step changes goes back after it."""

    def __init__(self) -> None:
        self._spaces: list[_Space] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    def give(self, live: dict[str, Any], copied: dict[str, Any], but: Container[str] = ()) -> None:
        """Make ``copied`` a copy of ``live``, leaving the keys in ``but`` as they are."""
        space = _Space(live, copied, but)
        for key in [key for key in copied if key not in but and key not in live]:
            del copied[key]
        for key, value in live.items():
            if key not in but:
                copied[key] = _copy(value, self._given)
                space.before[key] = _copy(value, self._before)
        self._spaces.append(space)

    def collect(self) -> list[str]:
        """Give the user what the step has changed, except where they have changed it meanwhile.

        Where both have changed a list, dict or set, both changes stay, the step's before the
        user's. Returns the keys where that is not possible: the user's alone is there.
        """
        back = {id(given): own for own, given in self._given.values()}
        merge = _Merge(back, set(self._given))
        spaces, self._spaces = self._spaces, []
        for space in spaces:
            for key in dict.fromkeys((*space.before, *space.copied)):
                if key not in space.but:
                    merge.item(space.live, space.copied, space.before, key, key)
        self._given, self._before = {}, {}
        return list(dict.fromkeys(merge.lost))


class _Merge:
    """What a step has changed, brought to where somebody may have changed something else.

    Args:
        back: ``id`` of a copy that the step had -> the user's object.
        given: ``id`` of each of these.
    """

    def __init__(self, back: dict[int, Any], given: set[int]) -> None:
        self._back, self._given = back, given
        self._done: dict[int, Any] = {}
        self.lost: list[str] = []
        """Attributes, or keys of groups, that both have changed in ways that exclude each other."""

    def item(self, live: Any, copied: Any, before: Any, key: Any, name: str) -> None:
        """Write to ``live[key]`` what differs in ``copied[key]``."""
        mine, made, old = _get(live, key), _get(copied, key), _get(before, key)
        if _same(made, old) or _same(mine, made):  # or what else refers to it was merged before
            return
        if _same(mine, old):
            if made is _MISSING:
                del live[key]
            else:
                live[key] = _give_back(made, self._back, set())
            return
        if old is _MISSING and type(mine) in _MERGED:
            old = type(mine)()  # both have made one
        elif id(mine) not in self._given:
            return  # theirs, in its place
        if type(mine) is type(made) is type(old) and type(mine) in _MERGED:
            self._both(mine, made, old, name)

    def _both(self, mine: Any, made: Any, old: Any, name: str) -> None:
        """``mine``, in place, with the step's changes of it; once, whoever refers to it."""
        if id(mine) in self._done:
            return
        self._done[id(mine)] = mine
        if isinstance(mine, dict):
            for key in dict.fromkeys((*old, *made)):
                self.item(mine, made, old, key, name)
            return
        if isinstance(mine, set):
            mine -= old - made
            mine |= made - old
            return
        theirs, its, was = list(mine), list(made), list(old)
        rolls = isinstance(mine, deque) and mine.maxlen is not None
        step, user = _shifted(its, was), _shifted(theirs, was)
        if len(theirs) == len(its) == len(was) and not rolls:
            for place in range(len(was)):
                self.item(theirs, its, was, place, name)
        elif step and user:
            theirs = theirs[step[0] : max(len(was) - user[0], 0)] + step[1] + user[1]
        elif step and step[0] == 0:
            theirs += step[1]
        elif user and user[0] == 0:
            theirs = its + user[1]
        else:
            self.lost.append(name)
            return
        joined = [_give_back(item, self._back, set()) for item in theirs]
        mine.clear()
        mine.extend(joined)


_MERGED = (dict, OrderedDict, defaultdict, set, list, deque)


def _shifted(now: list[Any], old: list[Any]) -> tuple[int, list[Any]] | None:
    """How many were taken from the front of ``old``, and what was put at its end; None: more."""
    for gone in range(len(old) or 1):
        rest = old[gone:]
        if len(now) >= len(rest) and all(map(_same, rest, now)):
            return gone, now[len(rest) :]
    return (len(old), []) if not now else None


def _get(container: Any, key: Any) -> Any:
    return container.get(key, _MISSING) if isinstance(container, dict) else container[key]


def _give_back(value: Any, back: dict[int, Any], seen: set[int]) -> Any:
    """The user's object for ``value`` with its present content; a new one as it is."""
    own = back.get(id(value), _MISSING)
    if id(value) in seen:
        return value if own is _MISSING else own
    seen.add(id(value))
    if isinstance(value, Tensor):
        if own is _MISSING:
            return value
        with torch.no_grad():
            if (own.shape, own.dtype, own.device) == (value.shape, value.dtype, value.device):
                own.copy_(value)
            else:
                own.data = value
        return own
    into = value if own is _MISSING else own
    if isinstance(value, dict):
        items = {key: _give_back(item, back, seen) for key, item in value.items()}
        into.clear()
        into.update(items)
    elif isinstance(value, (list, deque)):
        listed = [_give_back(item, back, seen) for item in value]
        into.clear()
        into.extend(listed)
    elif type(value) is set and into is not value:
        into.clear()
        into.update(value)
    elif type(value) is tuple:
        items_of = [_give_back(item, back, seen) for item in value]
        if any(a is not b for a, b in zip(items_of, value, strict=True)):
            into = tuple(items_of)
    return into
