"""Parameters whose update is still running, and gradients that it reads: the first use waits.

Note [Pending tensors]
----------------------
While its update is due, a parameter's class is :class:`PendingParameter`. torch then passes every
operation on it to ``__torch_function__``, which waits, restores the class, and runs the operation.
So tied weights, parameters used outside their module, edits in place and copies are correct, and a
parameter that is ready costs nothing.

Not all of torch asks ``__torch_function__``: ``torch.tensor(p)``, scripted functions, collectives
and ``torch.func`` do not. But each of them checks that its argument is a tensor. Neither pending
class has ``Tensor`` among its bases, so the check asks for ``__class__``, a property that waits.

``.grad`` stays the same object, of class :class:`PendingGradient` until the step is over. Dropping
it does not wait. Reading it, zeroing it in place or adding to it waits as for a parameter. autograd
adds to it without asking, so what starts a backward waits: see
:meth:`accel_scaler.optimizer_step.stepper.Stepper.wait_for_gradients`.

A pending tensor refers to its step weakly, in an attribute: neither a model nor a gradient that a
script has kept must keep an optimizer that nobody uses any more. The optimizer thread keeps the
step that it runs, so for a step that is gone there is nothing left to wait.

Any thread may use a parameter, also while the training thread hands over the next step. ``_lock``
guards the attribute and every change of a class; nobody waits under it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..scaling import parameters_of

_lock = threading.RLock()
"""Reentrant: a signal handler or a finalizer may use a parameter while its thread holds it."""

_HOLD = "accel_scaler_hold"
"""Attribute of a pending tensor: a weak reference to what it waits for, whose ``wait_for(tensor)``
calls :func:`release`, or raises ``StepError``."""

_consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
_GRAD: Any = Tensor.grad
_POP: Any = dict.pop
_CLASS: Any = object.__dict__["__class__"]
"""Reads and sets the real class, whatever the class says of itself."""

_ATTRIBUTES = "shape", "dtype", "device", "requires_grad", "_version"
PASSIVE: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
    + [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
)
"""Operations that touch no element and so do not wait."""


class _PendingMeta(type(nn.Parameter)):  # type: ignore[misc]
    """Makes a class with the memory layout of a tensor and without ``Tensor`` in ``__mro__``."""

    is_made = False

    def mro(cls) -> list[type]:
        order: list[type] = super().mro()
        return [c for c in order if c not in (Tensor, nn.Parameter)] if cls.is_made else order


def _body_of(*classes: type) -> dict[str, Any]:
    """All attributes of ``classes``, for a class that does not inherit from them."""
    plain: Any = classes[-1]

    class Plain(plain):  # type: ignore[misc]
        """What a pending tensor returns as its ``__class__``. Called, it makes a plain one."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

    def class_of(self: Any) -> Any:
        _wait_for(self)
        # Not the real class: the caller has just compared with that one, and would answer no.
        return Plain

    def dict_of(self: Any) -> Any:
        _wait_for(self)
        return self.__dict__

    found: dict[str, Any] = {}
    for cls in classes:
        found.update(vars(cls))
    for name in ("__weakref__", "__doc__", "__module__"):
        found.pop(name, None)
    found["__dict__"], found["__class__"] = property(dict_of), property(class_of)
    found["__torch_function__"] = classmethod(_torch_function)
    # These do not ask ``__torch_function__``, or copy class and attributes as well.
    waiting = ("as_subclass", "set_", "__deepcopy__", "__reduce_ex__")
    return found | {name: _waiting(name) for name in waiting}


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Wait for the operands that are pending, then run ``func``."""
    kwargs = kwargs or {}
    if func in PASSIVE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    _wait_for_all((args, kwargs))
    return func(*args, **kwargs)


def _passive(access: Any) -> Callable[..., Any]:
    """A way to access an attribute of a tensor that touches no element."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return access(*args)

    return call


def _waiting(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _wait_for(self)
        return getattr(self, name)(*args, **kwargs)

    return method


class PendingParameter(nn.Parameter, metaclass=_PendingMeta):
    """An ``nn.Parameter`` whose update may still be running on the optimizer thread."""

    locals().update(_body_of(Tensor, nn.Parameter))
    # Whoever drops a gradient asks first whether there is one.
    grad = property(_passive(_GRAD.__get__), _passive(_GRAD.__set__), _passive(_GRAD.__delete__))


class PendingGradient(Tensor, metaclass=_PendingMeta):
    """A gradient that the optimizer thread may still be reading; otherwise the same."""

    locals().update(_body_of(Tensor))


for _class in (PendingParameter, PendingGradient):
    _class.is_made = True
    _class.__bases__ = _class.__bases__  # computes the order of bases anew

_PENDING_OF: dict[Any, Any] = {nn.Parameter: PendingParameter, Tensor: PendingGradient}
"""Class -> class while pending."""
_OWN_OF: dict[Any, Any] = {PendingParameter: nn.Parameter, PendingGradient: Tensor}
"""Class while pending -> class."""


def _wait_for_all(values: Iterable[Any]) -> None:
    """Wait for the operands among ``values`` that are pending."""
    for value in values:
        if type(value) in _OWN_OF:
            _wait_for(value)
        elif isinstance(value, (list, tuple)):
            _wait_for_all(value)
        elif isinstance(value, dict):
            _wait_for_all(value.values())


def _wait_for(t: Any) -> None:
    # Without the attribute: another thread has just released it.
    while type(t) in _OWN_OF and (ref := getattr(t, _HOLD, None)) is not None:
        if (step := ref()) is not None:
            step.wait_for(t)
        else:
            release([t], ref)


def wait_for(tensors: Sequence[Any]) -> None:
    """Wait for those of ``tensors`` that are pending. Any thread."""
    if not _OWN_OF.keys().isdisjoint(map(type, tensors)):
        _consume(map(_wait_for, tensors))


def _set_classes(tensors: Sequence[Any], classes: dict[Any, Any]) -> None:
    """Give each of ``tensors`` the class that ``classes`` has for its own, if any. No loop in
    Python: there may be thousands."""
    old = list(map(type, tensors))
    _consume(map(_CLASS.__set__, tensors, map(classes.get, old, old)))


def hold(tensors: Sequence[Tensor], ref: weakref.ref[Any]) -> None:
    """Each use of ``tensors``, plain parameters and gradients, waits for ``ref`` from now on. Uses
    of aliases do not."""
    with _lock:
        _consume(map(setattr, tensors, repeat(_HOLD), repeat(ref)))
        _set_classes(tensors, _PENDING_OF)


def release(tensors: Iterable[Any], ref: weakref.ref[Any]) -> None:
    """Those of ``tensors`` that wait for ``ref`` are plain again."""
    with _lock:
        mine = [t for t in tensors if getattr(t, _HOLD, None) is ref]
        _set_classes(mine, _OWN_OF)
        _consume(map(_POP, map(vars, mine), repeat(_HOLD), repeat(None)))  # some stand twice


def is_held(t: Any) -> bool:
    """Whether the optimizer thread may be using ``t``, or has lost it."""
    return type(t) in _OWN_OF


def can_hold_parameters(params: Iterable[Tensor]) -> bool:
    """Whether uses can be seen: of plain parameters, not of a subclass such as DTensor."""
    return set(map(type, params)) <= {nn.Parameter, PendingParameter}


def drop_gradients(optimizer: Optimizer) -> bool:
    """Do what ``zero_grad(set_to_none=True)`` does; False: the optimizer's is not torch's own, or a
    profiler labels it, and nothing was done."""
    own: Any = getattr(optimizer.zero_grad, "__func__", None)
    if own is not Optimizer.zero_grad or torch.autograd.profiler._is_profiler_enabled:
        return False
    # It touches no element: pending tensors need not be asked, one by one.
    with torch._C.DisableTorchFunctionSubclass():
        _consume(map(_GRAD.__set__, parameters_of(optimizer), repeat(None)))
    return True
