"""float16 products on a processor without float16 instructions: in float32, rounded once.

There torch has no kernel for the products that float16 autocast casts on a CPU, and falls back to
one slow thread. :func:`emulate_float16` computes them as tensor cores do: float16 operands, the
product in float32, the result rounded to float16, where more than 65504 becomes inf.

# Note [Below autograd and autocast]
The mode replaces kernels below both, so graph, casts, their cache and saved tensors stay torch's. A
product outside of the block (a backward by hand, another thread), or of an operator outside of
``PRODUCTS``, has the same meaning at torch's speed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("convolution", "convolution_backward"),
)
"""Operators in which linear, matmul, einsum and the layers of ``torch.nn`` end."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

EMULATES = "_accel_scaler_emulates"
"""Attribute of a function that :func:`emulating_float16` has made."""

_this_thread = threading.local()


def has_float16_kernels() -> bool:
    """Whether torch has kernels for float16 products on this processor."""
    asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return asks is None or bool(asks())


@contextmanager
def emulate_float16() -> Iterator[None]:
    """Compute this thread's float16 products on the CPU in float32, rounded to float16; do nothing
    in an inner block, or where the processor has kernels."""
    if getattr(_this_thread, "inside", False) or has_float16_kernels():
        yield
        return
    _this_thread.inside = True
    try:
        with _Float32Kernels():  # type: ignore[no-untyped-call]
            yield
    finally:
        _this_thread.inside = False


def emulating_float16(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a mode cannot be part of a graph
            return function(*args, **kwargs)
        with emulate_float16():
            return function(*args, **kwargs)

    setattr(call, EMULATES, True)
    return call


class _Float32Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compile as without the mode, which sees the products once compiled code runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper class, whose inner tensors are dispatched later
        kwargs, name = kwargs or {}, _products().get(func)
        # The sixth argument of attention's backward is the logsumexp, in float32.
        operands = args[:5] if name == f"{ATTENTION}_backward" else args
        if name is None or not _are_float16(operands):
            return func(*args, **kwargs)
        results = func(*map(_widen, args), **{key: _widen(kwargs[key]) for key in kwargs})
        if name == ATTENTION:
            return _narrow(results[0]), *results[1:]  # the logsumexp stays float32
        return _narrow(results) if isinstance(results, Tensor) else tuple(map(_narrow, results))


@functools.cache
def _products() -> dict[Any, str]:
    """The operators that this release of torch has, with their names."""
    names = (*PRODUCTS, ATTENTION, f"{ATTENTION}_backward")
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    return {packet.default: name for name, packet in packets.items() if packet is not None}


def _are_float16(args: Any) -> bool:
    """Whether all operands are float16, dense and on the CPU; torch refuses a mixture."""
    found = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    is_dense = all(a.is_cpu and a.layout is torch.strided for a in found)
    return is_dense and {a.dtype for a in found} == {torch.float16}


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float16 else value


def _narrow(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
