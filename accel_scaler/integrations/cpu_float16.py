"""float16 products on a processor without float16 instructions: in float32, rounded once.

There torch has no kernel for the products that float16 autocast casts on a CPU, and falls back to
one slow thread. In :func:`emulate_float16` they are computed as tensor cores do: float16 operands,
the product in float32, the result rounded to float16, where more than 65504 becomes inf.

# Note [Below autograd and autocast]
The mode replaces kernels below both, so graph, casts, their cache and saved tensors stay torch's. A
product outside of the block (a backward by hand, another thread) or of an operator that is not
listed here has the same meaning, at torch's speed.

Layer and group norms with bfloat16 weights, which autocast on a GPU runs in float32 and a CPU's
kernels refuse beside float16 and float32, get these weights in float32, on any processor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("convolution", "convolution_backward"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
)
"""Operators in which linear, matmul, einsum and the layers of ``torch.nn`` end."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
NORMS = {
    **{"native_layer_norm": 0, "native_layer_norm_backward": 1},
    **{"native_group_norm": 0, "native_group_norm_backward": 1},
}
"""Each norm, and the position of its input among the arguments."""

_this_thread = threading.local()


def has_float16_kernels() -> bool:
    """Whether torch has kernels for float16 products on this processor."""
    asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return asks is None or bool(asks())


def needs_norms(model: Module) -> bool:
    """Whether a weight is bfloat16, as those of norms may be."""
    return any(p.dtype is torch.bfloat16 for p in model.parameters())


@contextmanager
def emulate_float16(norms: bool = False) -> Iterator[None]:
    """Compute this thread's float16 products on the CPU in float32, rounded to float16.

    Does nothing inside another one, or where the processor has kernels; there ``norms`` with
    bfloat16 weights still get them in float32.
    """
    if getattr(_this_thread, "inside", False) or (has_float16_kernels() and not norms):
        yield
        return
    _this_thread.inside = True
    try:
        with _Float32Kernels():  # type: ignore[no-untyped-call]
            yield
    finally:
        _this_thread.inside = False


def emulating_float16(function: Callable[..., Any], norms: bool = False) -> Callable[..., Any]:
    """``function``, called in :func:`emulate_float16`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a mode cannot be part of a graph
            return function(*args, **kwargs)
        with emulate_float16(norms):
            return function(*args, **kwargs)

    return call


class _Float32Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile as without it; the products that compiled code calls are seen when it runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper class, whose inner tensors are dispatched later
        kernel = _kernels(has_float16_kernels()).get(func, func)
        return kernel(*args, **(kwargs or {}))


@functools.cache
def _kernels(only_norms: bool) -> dict[Any, Callable[..., Any]]:
    """Operators, and what is called in their place."""
    kernels: dict[str, Callable[..., Any]] = {name: _norm(at) for name, at in NORMS.items()}
    if not only_norms:
        kernels |= dict.fromkeys((*PRODUCTS, ATTENTION), _product())
        # Its sixth tensor is the logsumexp, in float32.
        kernels[f"{ATTENTION}_backward"] = _product(operands=5)
    found: dict[Any, Callable[..., Any]] = {}
    for name, kernel in kernels.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:  # no release of torch has all of them
            found[packet.default] = functools.partial(kernel, packet.default)
    return found


def _product(operands: int | None = None) -> Callable[..., Any]:
    """A product whose first ``operands`` arguments are float16, by default all tensors."""

    def kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
        if not _are_float16(args[:operands]):
            return func(*args, **kwargs)
        results = func(*map(_widen, args), **{k: _widen(v) for k, v in kwargs.items()})
        if func is getattr(torch.ops.aten, ATTENTION).default:
            return _narrow(results[0]), *results[1:]  # the logsumexp stays float32
        return _narrow(results) if isinstance(results, Tensor) else tuple(map(_narrow, results))

    return kernel


def _norm(position: int) -> Callable[..., Any]:
    """A norm whose input is at ``position``, and whose weights may be bfloat16."""

    def kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
        input = args[position]
        if input.is_cpu and input.dtype in (torch.float16, torch.float32):
            args = tuple(map(_from_bfloat16, args))  # autograd casts their gradients back
        return func(*args, **kwargs)

    return kernel


def _from_bfloat16(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def _are_float16(args: Any) -> bool:
    """Whether all operands are, dense and on the CPU; torch refuses a mixture."""
    found = False
    for a in args:
        if isinstance(a, Tensor) and a.is_floating_point():
            if a.dtype is not torch.float16 or not a.is_cpu or a.layout is not torch.strided:
                return False
            found = True
    return found


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float16 else value


def _narrow(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
