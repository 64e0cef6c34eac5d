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

``.grad`` stays the same object, of class :class:`PendingGradient` until its part of the step is
done. Dropping it does not wait. Reading it, zeroing it in place or adding to it waits as for a
parameter. autograd adds to it without asking, so what starts a backward waits: see
:meth:`accel_scaler.optimizer_step.stepper.Stepper.wait_for_gradients`.

A pending tensor keeps its hold in an attribute (``HOLD_KEY``). A parameter refers to it weakly: a
model must not keep an optimizer that nobody uses any more. The task in flight keeps the optimizer,
so a hold that is gone has nothing left to wait for.

Any thread may use a parameter, also while the training thread hands over the next step. ``_lock``
guards the attribute and every change of a class; nobody waits under it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models import untraced
from ..scaling import parameters_of
from .compile_session import is_in_compiled_call

_lock = threading.RLock()
"""Reentrant: a signal handler or a finalizer may use a parameter while its thread holds it."""

HOLD_KEY = "accel_scaler_hold"
"""Attribute of a pending gradient: the function that waits for it; of a parameter: a weak reference
to its :class:`ParameterHold`."""

_consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
_grad_of = attrgetter("grad")
_GRAD: Any = Tensor.grad
_CLASS: Any = object.__dict__["__class__"]
"""Reads and sets the real class, whatever the class says of itself."""

_ATTRIBUTES = (
    *("grad", "requires_grad", "is_leaf", "grad_fn", "grad_dtype", "_version", "retains_grad"),
    *("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "output_nr"),
    *("is_cuda", "is_cpu", "is_sparse", "is_meta", "_backward_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous"),
    *("get_device", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)
_SLOTS = [getattr(Tensor, name, None) for name in _ATTRIBUTES]
_ACCESSES = ("__get__", "__set__", "__delete__")
PASSIVE: frozenset[Any] = frozenset(
    [getattr(Tensor, name) for name in _METHODS]
    + [getattr(slot, kind) for slot in _SLOTS for kind in _ACCESSES if hasattr(slot, kind)]
)
"""Operations that touch no element and so do not wait: above all, everything in ``zero_grad``."""


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
    found["__dict__"] = property(dict_of)
    found["__class__"] = property(class_of, _set_class)
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


def _set_class(self: Any, cls: Any) -> None:
    _wait_for(self)
    _CLASS.__set__(self, cls)


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
    # By way of ``__torch_function__`` it takes four times as long.
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
    """Wait for the update of ``t``, or for the step that reads it. Any thread."""
    if type(t) is PendingGradient:
        _wait_for_gradient(t)
        return
    # Without the attribute: another thread has just released it.
    while type(t) in _OWN_OF and (ref := getattr(t, HOLD_KEY, None)) is not None:
        if (hold := ref()) is not None:
            hold.wait_for(t)
        else:
            _release([t], ref)


def _set_classes(tensors: Sequence[Any], classes: dict[Any, Any]) -> None:
    """Give each of ``tensors`` the class that ``classes`` has for its own, if any. No loop in
    Python: there may be thousands."""
    old = list(map(type, tensors))
    _consume(map(_CLASS.__set__, tensors, map(classes.get, old, old)))


def _hold(tensors: Sequence[Any], hold: object) -> None:
    """``tensors`` wait for ``hold`` from now on."""
    with _lock:
        _consume(map(setattr, tensors, repeat(HOLD_KEY), repeat(hold)))
        _set_classes(tensors, _PENDING_OF)


def _release(params: Iterable[Any], ref: object) -> None:
    """The ``params`` that wait for the hold behind ``ref`` are plain parameters again."""
    with _lock:
        mine = [p for p in params if getattr(p, HOLD_KEY, None) is ref]
        _set_classes(mine, _OWN_OF)
        _consume(map(delattr, mine, repeat(HOLD_KEY)))


def wait_for_parameters(params: Sequence[Tensor]) -> None:
    """Wait for the ``params`` that are pending."""
    if not _OWN_OF.keys().isdisjoint(map(type, params)):
        for p in params:
            _wait_for(p)


def can_hold_parameters(params: Iterable[Tensor]) -> bool:
    """Whether uses can be seen: of plain parameters, not of a subclass such as DTensor."""
    return set(map(type, params)) <= {nn.Parameter, PendingParameter}


@dataclass(eq=False)
class ParameterHold:
    """Parameters that wait for the parts of one task. A parameter has one hold at a time."""

    params: Sequence[Tensor]
    """In the order of their parts."""
    ends: Sequence[int]
    """For each part, how many of ``params`` are ready when it is done."""
    part_of: dict[int, int]
    """``id(parameter)`` -> parts that must be done for it."""
    wait: Callable[[int], int]
    """Called with a number of parts, on the thread that uses a parameter; returns how many are done
    (at least that many), or raises ``StepError``."""
    was_traced: bool = False
    """A compiled function has met one of the parameters while it was pending."""
    _released: int = 0
    """How many of ``params``, from the first on, are plain again."""

    def __post_init__(self) -> None:
        self._ref = weakref.ref(self)
        wait_for_parameters(self.params)
        try:
            _hold(self.params, self._ref)
        except BaseException:  # Ctrl-C, with some of them held
            self.release()
            raise

    def wait_for(self, p: Tensor) -> None:
        """Wait for ``p``, and restore the class of every parameter that is ready."""
        part = self.part_of[id(p)]
        if is_in_compiled_call():
            # It was compiled for plain parameters: each pending one costs a compile, and after
            # some of them dynamo runs the function uncompiled. So wait for all at the first.
            self.was_traced = True
            part = len(self.ends)
        self.release(self.wait(part))

    def release(self, parts: int | None = None) -> None:
        """Restore the class of the parameters of the first ``parts`` (default: all)."""
        ready = len(self.ends) if parts is None else min(parts, len(self.ends))
        end = self.ends[ready - 1] if ready else 0
        with _lock:
            _release(self.params[self._released : end], self._ref)
            self._released = max(self._released, end)


def hold_gradients(gradients: Sequence[Any], wait: Callable[[], object]) -> None:
    """Uses of ``gradients``, plain tensors, ``wait`` from now on; aliases do not. ``wait`` is
    called on the thread that uses one, and raises ``StepError`` where the step was lost."""
    _hold(gradients, wait)


def is_held(grad: Any) -> bool:
    """Whether the optimizer thread may be reading ``grad``, or has lost it."""
    return type(grad) is PendingGradient


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


@untraced
def wait_for_gradients(params: Iterable[Tensor]) -> None:
    """Wait until no step reads ``.grad`` of ``params``. Raises ``StepError`` where the step that
    had one of them failed."""
    grads: list[Any] = list(map(_grad_of, params))
    if PendingGradient in set(map(type, grads)):
        for grad in filter(is_held, grads):
            _wait_for_gradient(grad)


def _wait_for_gradient(grad: Any) -> None:
    wait = getattr(grad, HOLD_KEY, None)
    if wait is not None:  # else another thread has just waited for it
        wait()
        _release([grad], wait)
