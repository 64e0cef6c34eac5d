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
A DTensor (FSDP2, tensor parallelism) needs no such trick: whatever uses it reads its shard, an
attribute, which waits.

On a device an operation waits on its own stream, and other streams may use the parameter later.
Until the device is past the update, the class is restored for one operation only; after it the
parameter is pending again.

``.grad`` stays the same object, of class :class:`PendingGradient` until its part of the step is
done. Dropping it does not wait. Reading it, zeroing it in place or adding to it waits as for a
parameter. autograd adds to it without asking, so what starts a backward waits: see
:meth:`accel_scaler.optimizer_step.stepper.Stepper.wait_for_gradients`.

A pending tensor keeps what it waits for in an attribute (``HOLD_KEY``). A parameter refers to its
hold weakly: a model must not keep an optimizer that nobody uses any more. What is left then is the
order of the device's work. Only where the model does not have the newest values yet, a parameter
keeps the hold, which can publish them, until its next use.

Any thread may use a parameter, also while the training thread hands over the next step; on a device
its operation may then run beside the update. ``_lock`` guards the attribute and every change of a
class; nobody waits under it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..errors import StepError
from ..models import is_transformed, untraced
from .compile_session import is_in_compiled_call
from .streams import PartEvents

_lock = threading.RLock()
"""Reentrant: a signal handler or a finalizer may use a parameter while its thread holds it."""

HOLD_KEY = "accel_scaler_hold"
"""Attribute of a pending gradient: its :class:`GradientHold`; of a parameter: its ``_Mark``."""

_consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
_grad_of = attrgetter("grad")
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
"""Operations that touch no element and so do not wait: those of ``zero_grad`` above all."""


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
        # Not the real class: that is what the question began with, and the answer would be no.
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
    found.update(_methods_that_wait())
    return found


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Wait for the operands that are pending, then run ``func``."""
    kwargs = kwargs or {}
    if func in PASSIVE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    pending = list(_pending_in((args, kwargs)))
    try:
        for t in pending:
            _wait_for(t, everywhere=False)
        return func(*args, **kwargs)
    finally:
        _take_back(pending)


def _get_class(self: Any) -> Any:
    _wait_for(self)
    return type(self)


def _set_class(self: Any, cls: Any) -> None:
    _wait_for(self)
    _CLASS.__set__(self, cls)


def _methods_that_wait() -> dict[str, Any]:
    """Those that do not ask ``__torch_function__``, or that copy class and attributes as well."""
    return {n: _waiting(n) for n in ("as_subclass", "set_", "__deepcopy__", "__reduce_ex__")}


def _waiting(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _wait_for(self)
        return getattr(self, name)(*args, **kwargs)

    return method


class PendingParameter(nn.Parameter, metaclass=_PendingMeta):
    """An ``nn.Parameter`` whose update may still be running on the optimizer thread."""

    locals().update(_body_of(Tensor, nn.Parameter))


class PendingGradient(Tensor, metaclass=_PendingMeta):
    """A gradient that the optimizer thread may still be reading; otherwise the same."""

    locals().update(_body_of(Tensor))


for _class in (PendingParameter, PendingGradient):
    _class.is_made = True
    _class.__bases__ = _class.__bases__  # computes the order of bases anew

_PENDING_OF: dict[Any, Any] = {nn.Parameter: PendingParameter, Tensor: PendingGradient}
"""Class -> class while pending; DTensor's once there was one."""
_OWN_OF: dict[Any, Any] = {PendingParameter: nn.Parameter, PendingGradient: Tensor}
"""Class while pending -> class."""


def _add_dtensor(cls: Any) -> None:
    """Let parameters of ``cls``, torch's ``DTensor``, be held."""

    class PendingDTensor(cls):  # type: ignore[misc]
        """A DTensor whose update may still be running on the optimizer thread."""

        __slots__ = ()
        __torch_function__: Any = classmethod(_torch_function)
        locals().update(_methods_that_wait())

        # torch.utils.swap_tensors, as in module.to(), gives class and attributes to another tensor.
        __class__: Any = property(_get_class, _set_class)

        @property
        def _local_tensor(self) -> Tensor:
            # Pending again after it, as after an operation: a thread that does not train reads old
            # values in ``delayed``, and the one that trains has yet to publish the newest.
            _wait_for(self, everywhere=False)
            local: Tensor = self._local_tensor
            _take_back([self])
            return local

        @_local_tensor.setter
        def _local_tensor(self, local: Tensor) -> None:
            _wait_for(self)
            self._local_tensor = local

    _PENDING_OF[cls], _OWN_OF[PendingDTensor] = PendingDTensor, cls


def _pending_in(value: Any) -> Iterator[Any]:
    if type(value) in _OWN_OF:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _pending_in(item)


def _wait_for(t: Any, everywhere: bool = True) -> None:
    """Wait for the update of ``t``, or for the step that reads it. ``everywhere``: whatever stream
    uses it then; else only the present one may, and :func:`_take_back` follows. Any thread."""
    if type(t) is PendingGradient:
        _wait_for_gradient(t, everywhere)
        return
    asked: _Mark | None = None
    while type(t) in _OWN_OF:
        with _lock:
            mark = getattr(t, HOLD_KEY, None)
            if mark is None or mark is asked:
                _set_classes([t], _OWN_OF)
                return
        asked = mark
        if (hold := mark.hold()) is not None:
            hold.wait_for(t, everywhere)
        elif mark.follow(everywhere):
            _release([t], mark)


def _take_back(tensors: Iterable[Any]) -> None:
    """Make those of ``tensors`` pending again for which other streams still have to wait."""
    with _lock:
        for t in tensors:
            if hasattr(t, HOLD_KEY):
                _set_classes([t], _PENDING_OF)


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


def _release(params: Iterable[Any], mark: object) -> None:
    """Those of ``params`` that wait for ``mark`` are plain parameters again."""
    with _lock:
        mine = [p for p in params if getattr(p, HOLD_KEY, None) is mark]
        _set_classes(mine, _OWN_OF)
        _consume(map(delattr, mine, repeat(HOLD_KEY)))


def outside_transforms() -> AbstractContextManager[Any]:
    """Leave the transforms of ``torch.func``, which write to no captured parameter."""
    return temporarily_clear_interpreter_stack() if is_transformed() else nullcontext()


def wait_for_parameters(params: Sequence[Tensor]) -> None:
    """Wait for those of ``params`` that are pending, for whatever stream uses them."""
    if not _OWN_OF.keys().isdisjoint(map(type, params)):
        for p in params:
            _wait_for(p)


def can_hold_parameters(params: Iterable[Tensor]) -> bool:
    """Whether uses can be seen: plain parameters and DTensors, no other subclass."""
    kinds: set[Any] = set(map(type, params))
    for kind in kinds - {*_PENDING_OF, *_OWN_OF}:
        if (kind.__module__, kind.__name__) == ("torch.distributed.tensor", "DTensor"):
            _add_dtensor(kind)
    return kinds <= {*_PENDING_OF, *_OWN_OF} - {Tensor, PendingGradient}


@dataclass(slots=True, eq=False)
class _Mark:
    """What a pending parameter keeps: its hold, weakly, and the order of the device's work."""

    hold: weakref.ref[ParameterHold]
    order: PartEvents | None
    fenced: ParameterHold | None
    """The hold, where its fence can publish values that the parameter does not have yet."""

    def follow(self, everywhere: bool) -> bool:
        """The hold is gone with its optimizer: order uses after all that was enqueued. Returns
        whether the device is past it; ``everywhere`` waits for that."""
        if self.order is None:
            return True
        self.order.follow()
        return self.order.is_past(wait=everywhere)


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
    order: PartEvents | None = None
    """The parts on the device, where ``wait`` orders the present stream only. None: what was waited
    for is done."""
    fence: Callable[[], bool] | None = None
    """Called first, on the thread that uses a parameter, until it is lifted. Returns whether all is
    done by now. Else the use waits for its part, and the parameter stays pending."""
    was_traced: bool = False
    """A compiled function has met one of the parameters while it was pending."""
    _released: int = 0
    """How many of ``params``, from the first on, are plain again."""

    def __post_init__(self) -> None:
        self._mark = _Mark(weakref.ref(self), self.order, None if self.fence is None else self)
        wait_for_parameters(self.params)
        try:
            _hold(self.params, self._mark)
        except BaseException:  # Ctrl-C, with some of them held
            self.release()
            raise

    def wait_for(self, p: Tensor, everywhere: bool = True) -> None:
        """Wait for ``p``, and restore the class of every parameter that is ready. For
        ``everywhere`` see ``_wait_for``."""
        with outside_transforms():
            fence, part = self.fence, self.part_of[id(p)]
            if is_in_compiled_call():
                # It was compiled for plain parameters: each pending one costs a compile, and after
                # some of them dynamo runs the function uncompiled. So wait for all at the first.
                self.was_traced = everywhere = True
                part = len(self.ends)
            if fence is not None and fence():
                return
            try:
                done = self.wait(part)
            except StepError:
                self.release()
                raise
            if fence is not None:
                if everywhere:
                    _release([p], self._mark)
            elif self.order is None or self.order.is_past(part, wait=everywhere):
                self.release(done)

    def lift_fence(self) -> None:
        """A use waits for its part alone from now on."""
        self.fence = self._mark.fenced = None

    def release(self, parts: int | None = None) -> None:
        """Restore the class of the parameters of the first ``parts`` (default: all)."""
        ready = len(self.ends) if parts is None else min(parts, len(self.ends))
        end = self.ends[ready - 1] if ready else 0
        with _lock:
            _release(self.params[self._released : end], self._mark)
            self._released = max(self._released, end)


@dataclass(slots=True, eq=False)
class GradientHold:
    """Gradients that the optimizer thread reads until a part of its task is done. Each of them
    refers to it, so that nothing keeps a gradient that its owner has dropped."""

    wait: Callable[[], object]
    """Called on the thread that uses one; raises ``StepError`` where the step was lost."""
    order: PartEvents | None = None
    """The parts on the device, where ``wait`` orders the present stream only."""
    part: int = 1
    """The number of the part that reads them."""


def hold_gradients(gradients: Sequence[Any], hold: GradientHold) -> None:
    """Uses of ``gradients``, plain tensors, wait for ``hold`` from now on; aliases do not."""
    _hold(gradients, hold)


def is_held(grad: Any) -> bool:
    """Whether the optimizer thread may be reading ``grad``, or has lost it."""
    return type(grad) is PendingGradient


@untraced
def wait_for_gradients(params: Iterable[Tensor]) -> None:
    """Wait until no step reads ``.grad`` of ``params``; the present stream may write to it then.
    Raises ``StepError`` where the step that had one of them failed."""
    grads: list[Any] = list(map(_grad_of, params))
    if PendingGradient in set(map(type, grads)):
        for grad in filter(is_held, grads):
            _wait_for_gradient(grad, everywhere=None)


def _wait_for_gradient(grad: Any, everywhere: bool | None) -> None:
    """See :func:`_wait_for`. None: for the present stream, which is to write to it."""
    hold = getattr(grad, HOLD_KEY, None)
    is_over = True
    if hold is not None:  # else another thread has just waited for it
        hold.wait()
        if hold.order is not None and everywhere is not None:
            is_over = hold.order.is_past(hold.part, wait=everywhere)
    with _lock:
        if is_held(grad) and getattr(grad, HOLD_KEY, None) is hold:
            if hold is not None and is_over:
                delattr(grad, HOLD_KEY)
            _set_classes([grad], _OWN_OF)
