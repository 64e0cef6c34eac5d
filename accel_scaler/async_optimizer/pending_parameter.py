"""Parameters whose update is still running, and gradients that it reads: the first use waits.

While its update is due, a parameter's class is :class:`PendingParameter`; torch then hands every
operation on it to ``__torch_function__``, which waits, gives the class back, and goes on. So a
tied weight, a parameter used outside its module, an edit in place or a copy are all right,
and a parameter that is ready costs nothing. On a device an operation waits on its own stream, and
others may be used later: until the device is past the update, it is given back for the
operation alone.

Not all of torch asks ``__torch_function__``: ``torch.tensor(p)``, scripted functions, collectives
and ``torch.func`` do not. But each asks whether what it was given is a tensor, so the class does
not say so by itself: see :class:`PendingParameter`.

``.grad`` stays what it was, of class :class:`PendingGradient` until its part of the step is done:
dropped, it costs no wait; looked at, zeroed in place or added to, it waits as a parameter does.
autograd adds to it without asking, so what starts a backward waits: see
:meth:`accel_scaler.optimizer_step.stepper.Stepper.settle_gradients`.

Any thread may use a parameter, also while the one that trains hands over the next step. ``_lock``
guards which hold has which parameter, and every change of a class; nobody waits under it.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from operator import attrgetter, eq
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..errors import StepError
from ..untraced import untraced
from .compile_session import is_in_compiled_call
from .streams import PartEvents

_holds: weakref.WeakSet[ParameterHold] = weakref.WeakSet()
"""Weak: an optimizer that nobody uses any more must not keep its model."""

_holders: dict[int, tuple[weakref.ref[ParameterHold], ...]] = {}
"""``id(parameter)`` -> those that hold it, so that no hold has to be asked that does not."""

_orphans: dict[int, PartEvents] = {}
"""``id(parameter)`` -> what puts its uses after an update of an optimizer that is gone."""

_lock = threading.RLock()
"""Reentrant: a signal handler or a finalizer may use a parameter while its thread has it."""

HOLD_KEY = "accel_scaler_hold"
"""Where a gradient that is held keeps its :class:`GradientHold`."""

_consume: Callable[[Iterable[Any]], None] = deque[Any](maxlen=0).extend
_grad_of = attrgetter("grad")
_CLASS: Any = object.__dict__["__class__"]
"""Reads and sets the real class, whatever the class says of itself."""

_ATTRIBUTES = (
    *("grad", "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "_version"),
    *(
        "ndim",
        "grad_fn",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_meta",
        "is_quantized",
        "retains_grad",
    ),
    *("is_mkldnn", "is_nested", "is_xpu", "is_mps", "output_nr", "_backward_hooks", "itemsize"),
    *("nbytes", "name", "grad_dtype", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "register_hook", "requires_grad_"),
    *("register_post_accumulate_grad_hook", "storage_offset", "is_signed", "type", "__len__"),
)


def _passive() -> frozenset[Any]:
    """What reads or sets no element, so need not wait: ``zero_grad`` above all."""
    found: set[Any] = set()
    for name in _ATTRIBUTES:
        slot = getattr(Tensor, name, None)
        for kind in ("__get__", "__set__", "__delete__"):
            if hasattr(slot, kind):
                found.add(getattr(slot, kind))
    found.update(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name))
    found.discard(Tensor.type)
    return frozenset(found)


_PASSIVE = _passive()
_UNRECORDED = frozenset((cast(Any, Tensor.data).__get__, Tensor.detach))
"""What autograd never keeps for a backward."""


class _Settled(nn.Parameter):
    """What a pending parameter, once it is settled, says that it was. Made, it is a parameter."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return nn.Parameter(*args, **kwargs)


class _SettledGradient(Tensor):
    """The same of a gradient. Made, it is a tensor."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return Tensor(*args, **kwargs)


class _PendingMeta(type(nn.Parameter)):  # type: ignore[misc]
    """Of a class that has the memory layout of a tensor but does not count as one by itself."""

    is_made = False

    def mro(cls) -> list[type]:
        order: list[type] = super().mro()
        return [c for c in order if c not in (Tensor, nn.Parameter)] if cls.is_made else order


def _wait_for_dict(self: Any) -> Any:
    _settle(self)
    return self.__dict__


def _names_of(classes: Sequence[type], settled: type) -> dict[str, Any]:
    """All that these have, for a class that has ``Tensor`` not among its bases."""

    def class_of(self: Any) -> Any:
        _settle(self)
        # Not the real class: that is what the question began with, and the answer would be no.
        return settled

    found: dict[str, Any] = {}
    for cls in classes:
        found.update(vars(cls))
    for name in ("__weakref__", "__doc__", "__module__"):
        found.pop(name, None)
    found["__dict__"] = property(_wait_for_dict)
    found["__class__"] = property(class_of, _set_class)
    return {**found, **_WAITING}


def _set_class(self: Any, cls: Any) -> None:
    _settle(self)
    _CLASS.__set__(self, cls)


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Wait for the operands that are pending, then do ``func``."""
    kwargs = kwargs or {}
    if func in _PASSIVE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is Tensor.detach and type(args[0]) is PendingParameter and _is_made_parameter(args[0]):
        _settle(args[0])
        return Tensor._make_subclass(nn.Parameter, args[0].detach())
    settled = list(_pending_in((args, kwargs)))
    is_recorded = torch.is_grad_enabled() and func not in _UNRECORDED
    try:
        for t in settled:
            _settle(t, everywhere=False, is_recorded=is_recorded)
        return func(*args, **kwargs)
    finally:
        _take_back(settled)


def _waiting(name: str) -> Any:
    """Of what does not ask ``__torch_function__``, or copies the class along."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _settle(self)
        return getattr(self, name)(*args, **kwargs)

    return method


def _deepcopy(self: Any, memo: Any) -> Any:
    _settle(self)
    return copy.deepcopy(self, memo)


_WAITING = {
    "__torch_function__": classmethod(_torch_function),
    "__deepcopy__": _deepcopy,
    **{name: _waiting(name) for name in ("as_subclass", "set_", "__reduce_ex__")},
}


class PendingParameter(nn.Parameter, metaclass=_PendingMeta):
    """An ``nn.Parameter`` whose update may still be running on the optimizer thread.

    To C code and to ``isinstance`` it is a tensor only because its ``__class__`` says so, which is
    asked for where the bases of its type do not settle the question. So whoever takes it for a
    tensor, seen by ``__torch_function__`` or not, waits there.
    """

    locals().update(_names_of([Tensor, nn.Parameter], _Settled))


class PendingGradient(Tensor, metaclass=_PendingMeta):
    """A gradient that the optimizer thread may still be reading; otherwise the same."""

    locals().update(_names_of([Tensor], _SettledGradient))


_PENDING: Any = (PendingParameter, PendingGradient)
for _class in _PENDING:
    _class.is_made = True
    _class.__bases__ = _class.__bases__  # asks for the order of bases anew


def _is_made_parameter(p: Tensor) -> bool:
    """Whether ``nn.Parameter(p)`` asks: it compares the class of what it gets with that of p."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame is not None and frame.f_code is _NEW and frame.f_locals.get("data") is p


_NEW = nn.Parameter.__new__.__code__


def _pending_in(value: Any) -> Iterator[Any]:
    if type(value) in _PENDING:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _pending_in(item)


def _settle(p: Any, everywhere: bool = True, is_recorded: bool = False) -> None:
    """Wait until no update of ``p`` is due, or reads it. Any thread.

    ``everywhere``: on whatever stream. Else on the present one, and ``p`` is to be taken back.
    ``is_recorded``: a backward may need what is read.
    """
    if type(p) is PendingGradient:
        _settle_gradient(p, everywhere)
    asked: list[ParameterHold] = []
    while type(p) is PendingParameter:
        order = None
        with _lock:
            hold = next((each for each in _holding(p) if each not in asked), None)
            if hold is None:
                order = _orphans.get(id(p))
                _restore(p)
        if hold is not None:
            asked.append(hold)
            hold.settle(p, everywhere, is_recorded)
        elif order is not None:
            order.follow()
            if order.is_past(wait=everywhere):
                _orphans.pop(id(p), None)


def _take_back(tensors: Iterable[Any]) -> None:
    """Those of ``tensors`` that are due on other streams are pending again."""
    with _lock:
        for t in tensors:
            if type(t) is Tensor and hasattr(t, HOLD_KEY):
                _CLASS.__set__(t, PendingGradient)
            elif type(t) is nn.Parameter and (id(t) in _orphans or any(_holding(t))):
                _CLASS.__set__(t, PendingParameter)


def _holding(p: Any) -> Iterator[ParameterHold]:
    """The holds for which ``p`` waits. Under the lock."""
    for ref in _holders.get(id(p), ()):
        hold = ref()
        if hold is not None and hold.holds(p):
            yield hold


def _forget(left: set[int], order: PartEvents | None, ref: weakref.ref[ParameterHold]) -> None:
    """A hold has gone with its optimizer: its parameters may be gone, and their ids new.

    The garbage collector runs this, on any thread, so it asks nothing of the device.
    """
    with _lock:
        for key in left:
            if order is not None:
                _orphans[key] = order
            rest = tuple(each for each in _holders.get(key, ()) if each is not ref)
            if rest:
                _holders[key] = rest
            else:
                _holders.pop(key, None)


def _set_classes(params: Iterable[Any], cls: type) -> None:
    # No loop of Python's: there may be thousands, twice a step.
    _consume(map(_CLASS.__set__, params, repeat(cls)))


def _restore(p: Any) -> None:
    if type(p) is PendingParameter:
        _CLASS.__set__(p, nn.Parameter)


def outside_transforms() -> AbstractContextManager[Any]:
    """Within the block no transform of ``torch.func`` is active: in one, none of the parameters
    that it does not know could be written to."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def settle_pending(params: Iterable[Tensor]) -> None:
    """Wait for those of ``params`` that are pending."""
    for p in params:
        if type(p) is PendingParameter:
            _settle(p)


def any_pending() -> bool:
    """Whether any parameter in this process may be pending."""
    return bool(_holds or _orphans)


def can_hold_parameters(params: Iterable[Tensor]) -> bool:
    """Whether uses can be seen: plain parameters, no subclass with a life of its own."""
    return set(map(type, params)) <= {nn.Parameter, PendingParameter}


class ParameterHold:
    """Parameters that wait for the parts of one task.

    Several may hold a parameter: of two optimizers, or of an earlier step that a slow reader on
    another thread still settles. Its class comes back with the last of them.

    Args:
        params: in the order of their parts.
        ends: for each part, how many of ``params`` are ready when it is done.
        part_of: ``id(parameter)`` -> parts that must be done for it.
        wait: called with a number of parts, on the thread that uses a parameter; returns how many
            are done (at least that many), or raises ``StepError``.
        one_by_one: keep the others pending even if they are ready, to see the order of use.
        order: where what ``wait`` has waited for is ordered on the present stream only. None: it is
            done.
        fence: called before, by whoever uses one of them, on any thread, until it is set to None.
            Told whether a backward may need what is read; returns whether all is done by now. Else
            the use waits for its part, and the parameter stays pending.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        ends: Sequence[int],
        part_of: dict[int, int],
        wait: Callable[[int], int],
        one_by_one: bool = False,
        order: PartEvents | None = None,
        fence: Callable[[bool], bool] | None = None,
    ) -> None:
        self.params, self.ends, self.part_of, self._wait = params, ends, part_of, wait
        self._one_by_one, self._order, self.fence = one_by_one, order, fence
        self._left = set(part_of)
        """``id`` of those not released yet."""
        self._passed = 0
        """So many of ``params`` are released, from the first on."""
        self._thread = threading.get_ident()
        self.was_traced = False
        """A compiled function has met one of the parameters while it was pending."""
        self.seen: list[Tensor] = []
        """Parameters in the order in which the thread that trains first used them."""
        self._ref = mine = weakref.ref(self, partial(_forget, self._left, order))
        try:
            with _lock:
                done = [order for order in set(_orphans.values()) if order.is_past()]
                for key in [key for key, each in _orphans.items() if each in done]:
                    del _orphans[key]
                _holds.add(self)
                for key in self._left:
                    others = _holders.get(key)
                    _holders[key] = (mine,) if others is None else (*others, mine)
                _set_classes(params, PendingParameter)
        except BaseException:  # Ctrl-C, with some of them held
            self.release()
            raise

    def holds(self, p: Tensor) -> bool:
        """Whether ``p`` waits for this task. Under the lock."""
        return id(p) in self._left

    def settle(self, p: Tensor, everywhere: bool = True, is_recorded: bool = False) -> None:
        """Wait for ``p``, and give every parameter that is ready its class back.

        ``everywhere``: on whatever stream it is going to be used. ``is_recorded``: for a backward.
        """
        with outside_transforms():
            self._settle(p, everywhere, is_recorded)

    def _settle(self, p: Tensor, everywhere: bool, is_recorded: bool) -> None:
        fence, part = self.fence, self.part_of[id(p)]
        if is_in_compiled_call():
            # It was compiled for plain parameters: each that is pending costs a compile, and from
            # some number on dynamo runs the function uncompiled. So one is to be the last.
            self.was_traced = everywhere = True
            part = len(self.ends)
        if fence is not None and fence(is_recorded):
            return
        if threading.get_ident() == self._thread:
            self.seen.append(p)
        try:
            done = self._wait(part)
        except StepError:
            self.release()
            raise
        if fence is not None:
            return
        if self._order is not None and not self._order.is_past(part, wait=everywhere):
            return
        if self._one_by_one and not self.was_traced:
            with _lock:
                self._give_back([p])
        else:
            self.release(done)

    def release(self, parts: int | None = None) -> None:
        """Give the parameters of the first ``parts`` (default: all) their class back."""
        ready = len(self.ends) if parts is None else min(parts, len(self.ends))
        end = self.ends[ready - 1] if ready else 0
        with _lock:
            self._give_back(self.params[self._passed : end])
            self._passed = max(self._passed, end)

    def _give_back(self, params: Iterable[Tensor]) -> None:
        left, alone = self._left, (self._ref,)
        found = {id(p): p for p in params if id(p) in left}
        keys, mine = list(found), list(found.values())
        left.difference_update(keys)
        if all(map(eq, map(_holders.get, keys), repeat(alone))):
            _consume(map(_holders.pop, keys))
            _set_classes(mine, nn.Parameter)
        else:
            for p, key in zip(mine, keys, strict=True):
                others = tuple(hold._ref for hold in _holding(p))
                if others:
                    _holders[key] = others
                else:
                    _holders.pop(key, None)
                    _restore(p)
        if not left:
            _holds.discard(self)


class GradientHold:
    """Gradients that the optimizer thread reads until a part of its task is done.

    Kept by each of them, so that nothing keeps a gradient that its owner has dropped.

    Args:
        wait: called on the thread that uses one; raises ``StepError`` where the step was lost.
        order, part: where what ``wait`` has waited for is ordered on the present stream only.
    """

    __slots__ = ("order", "part", "wait")

    def __init__(
        self, wait: Callable[[], object], order: PartEvents | None = None, part: int = 1
    ) -> None:
        self.wait, self.order, self.part = wait, order, part


def hold_gradients(gradients: Sequence[Any], hold: GradientHold) -> None:
    """``gradients``, plain tensors, wait for ``hold`` from now on; read them through others."""
    with _lock:
        _consume(map(setattr, gradients, repeat(HOLD_KEY), repeat(hold)))
        _set_classes(gradients, PendingGradient)


def release_gradients(gradients: Iterable[Any], hold: GradientHold) -> None:
    """Those of ``gradients`` that wait for ``hold`` do not any more."""
    with _lock:
        mine = [grad for grad in gradients if is_held(grad) and getattr(grad, HOLD_KEY) is hold]
        _consume(map(delattr, mine, repeat(HOLD_KEY)))
        _set_classes(mine, Tensor)


def is_held(grad: Any) -> bool:
    """Whether the optimizer thread may be reading ``grad``, or has lost it."""
    return type(grad) is PendingGradient


@untraced
def settle_gradients(params: Iterable[Tensor]) -> None:
    """Wait until nobody reads ``.grad`` of ``params``; the present stream may write to it then.

    Raises:
        StepError: the step that had one of them failed.
    """
    grads: list[Any] = list(map(_grad_of, params))
    if PendingGradient in set(map(type, grads)):
        for grad in filter(is_held, grads):
            _settle_gradient(grad, everywhere=None)


def _settle_gradient(grad: Any, everywhere: bool | None) -> None:
    """See :func:`_settle`. None: on the present stream, which is to write to it."""
    hold = getattr(grad, HOLD_KEY, None)
    is_over = True
    if hold is not None:  # else another thread has just settled it
        hold.wait()
        if hold.order is not None and everywhere is not None:
            is_over = hold.order.is_past(hold.part, wait=everywhere)
    with _lock:
        if is_held(grad) and getattr(grad, HOLD_KEY) is hold:
            if is_over:
                delattr(grad, HOLD_KEY)
            _CLASS.__set__(grad, Tensor)
