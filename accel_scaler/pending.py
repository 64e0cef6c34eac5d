"""Parameters whose update is still running: the first use of one, wherever it is, waits.

While its update is due, a parameter's class is :class:`PendingParameter`; torch then hands every
operation on it to ``__torch_function__``, which waits, gives the class back, and goes on. So a
tied weight, a parameter used outside its module, an edit in place or a copy are all right,
and a parameter that is ready costs nothing.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .config import StepError

__all__ = ["Hold", "PendingParameter", "any_pending", "can_be_held", "settle_pending"]

_holds: weakref.WeakSet[Hold] = weakref.WeakSet()
"""Weak: an optimizer that nobody uses any more must not keep its model."""

_lock = threading.Lock()

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


class PendingParameter(nn.Parameter):
    """An ``nn.Parameter`` whose update may still be running on the optimizer thread."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the operands that are pending, then do ``func``."""
        kwargs = kwargs or {}
        if func in _PASSIVE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for p in _pending_in((args, kwargs)):
            _settle(p)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        _settle(self)
        return self.__reduce_ex__(proto)


def _pending_in(value: Any) -> Iterator[PendingParameter]:
    if isinstance(value, Tensor):
        if type(value) is PendingParameter:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _pending_in(item)


def _settle(p: Any) -> None:
    for hold in list(_holds):
        if id(p) in hold.part_of:
            hold.settle(p)
    _restore(p)  # where its hold is gone, nothing is due


def _restore(p: Any) -> None:
    if type(p) is PendingParameter:
        cast(Any, p).__class__ = nn.Parameter


def settle_pending(params: Iterable[Tensor]) -> None:
    """Wait for those of ``params`` that are pending."""
    for p in params:
        if type(p) is PendingParameter:
            _settle(p)


def any_pending() -> bool:
    """Whether any parameter in this process may be pending."""
    return bool(_holds)


def can_be_held(params: Iterable[Tensor]) -> bool:
    """Whether uses can be seen: plain parameters, no subclass with a life of its own."""
    return set(map(type, params)) <= {nn.Parameter, PendingParameter}


class Hold:
    """Parameters that wait for the parts of one task.

    Args:
        params: in the order of their parts.
        ends: for each part, how many of ``params`` are ready when it is done.
        part_of: ``id(parameter)`` -> parts that must be done for it.
        wait: called with a number of parts, on the thread that uses a parameter; returns how many
            are done (at least that many), or raises ``StepError``.
        one_by_one: keep the others pending even if they are ready, to see the order of use.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        ends: Sequence[int],
        part_of: dict[int, int],
        wait: Callable[[int], int],
        one_by_one: bool = False,
    ) -> None:
        self.params, self.ends, self.part_of, self._wait = params, ends, part_of, wait
        self._one_by_one = one_by_one
        self._released = 0
        """Parameters given their class back."""
        self.seen: list[Tensor] = []
        """Parameters in the order in which they were first used."""
        with _lock:
            _holds.add(self)
        for p in params:
            p.__class__ = PendingParameter

    def settle(self, p: Tensor) -> None:
        """Wait for ``p``, and give every parameter that is ready its class back."""
        self.seen.append(p)
        try:
            done = self._wait(self.part_of[id(p)])
        except StepError:
            self.release()
            raise
        if self._one_by_one:
            _restore(p)
        else:
            self.release(done)

    def release(self, parts: int | None = None) -> None:
        """Give the parameters of the first ``parts`` (default: all) their class back."""
        ready = len(self.ends) if parts is None else min(parts, len(self.ends))
        end = self.ends[ready - 1] if ready else 0
        for p in self.params[self._released : end]:
            p.__class__ = nn.Parameter
        self._released = max(self._released, end)
        if self._released == len(self.params):
            with _lock:
                _holds.discard(self)
