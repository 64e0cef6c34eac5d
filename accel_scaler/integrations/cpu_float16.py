"""float16 products on a processor without float16 instructions: in float32, rounded once.

There torch has no kernel for the products that float16 autocast casts on a CPU, and falls back to
one slow thread. Within :func:`emulate_float16` they are computed as tensor cores do: operands as
they are in float16, the product in float32, the result rounded to float16, where what is beyond
65504 becomes inf. That happens below autograd and autocast: graph, casts, their cache and what is
saved for the backward stay torch's. So what is called outside of it (a backward by hand, another
thread) is right all the same, at torch's speed.

Layer and group norms with bfloat16 weights, which autocast on a GPU runs in float32 and a CPU's
kernels refuse beside float16 and float32, are given these in float32, on any processor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Module
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

# As they arrive below autograd: linear, matmul, einsum and the layers of torch.nn end in these.
PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("convolution", "convolution_backward", "conv_tbc"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Where the input stands among the arguments.
NORMS = {
    **{"native_layer_norm": 0, "native_layer_norm_backward": 1},
    **{"native_group_norm": 0, "native_group_norm_backward": 1},
}
# Kernels made of products that nobody sees who sees the kernel alone.
MADE_OF_PRODUCTS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")

_this_thread = threading.local()


def has_float16_kernels() -> bool:
    """Whether torch has kernels for float16 products on this processor."""
    asks = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return asks is None or bool(asks())


def needs_norms(model: Module) -> bool:
    """Whether some of its weights are bfloat16, as those of its norms may be."""
    return any(p.dtype is torch.bfloat16 for p in model.parameters())


@contextmanager
def emulate_float16(norms: bool = False) -> Iterator[None]:
    """This thread's float16 products on the CPU: in float32, rounded to float16.

    Does nothing where the processor has kernels for them, unless for ``norms`` with bfloat16
    weights; nor inside another one.
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
    """``function``, called within :func:`emulate_float16`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a mode is no part of a graph
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
            return NotImplemented  # a class that dispatches by itself: what it holds comes by later
        kwargs = kwargs or {}
        kernel = _kernels(has_float16_kernels()).get(func)
        if kernel is not None:
            return kernel(self, func, args, kwargs)
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload):
            with self.inside(func):  # without autograd composite operators arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    @contextmanager
    def inside(self, func: Any) -> Iterator[None]:
        """For the products that ``func`` is made of: this mode, and all as where it was called.

        torch has autocast and conjugate views off where a mode dispatches; within an operator that
        autocast casts it stays off.
        """
        cast = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU")
        no_autocast = torch.autocast("cpu", enabled=False) if cast else nullcontext()
        with enable_reentrant_dispatch(), no_autocast, self:
            yield


Kernel = Callable[[_Float32Kernels, Any, Any, dict[str, Any]], Any]


@functools.cache
def _kernels(only_norms: bool) -> dict[Any, Kernel]:
    """What is called in the place of which operator."""
    found: dict[Any, Kernel] = {}

    def add(name: str, overload: str, kernel: Kernel) -> None:
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if operator is not None:  # no release has all of them
            found[operator] = kernel

    for name, place in NORMS.items():
        add(name, "default", functools.partial(_norm, place=place))
    for name in () if only_norms else PRODUCTS:
        add(name, "default", _product)
        add(name, "out", _into)
        add(f"{name}_", "default", _in_place)
    if not only_norms:
        add(ATTENTION, "default", _attention)
        # The sixth argument is the logsumexp, in float32.
        add(f"{ATTENTION}_backward", "default", functools.partial(_product, operands=5))
    for name in MADE_OF_PRODUCTS:
        add(name, "default", _around)
    return found


def _product(
    mode: Any, func: Any, args: Any, kwargs: dict[str, Any], operands: int | None = None
) -> Any:
    """``operands``: how many of the arguments are in float16; None: all that are no integers."""
    if not _are_float16(args[:operands]):
        return func(*args, **kwargs)
    results = func(*map(_widen, args), **{k: _widen(v) for k, v in kwargs.items()})
    return _narrow(results) if isinstance(results, Tensor) else tuple(map(_narrow, results))


def _into(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    if not _are_float16(args) or not isinstance(out, Tensor) or out.dtype is not torch.float16:
        return func(*args, **kwargs)
    wide = torch.empty_like(out, dtype=torch.float32)
    func(*map(_widen, args), **{**kwargs, "out": wide})  # resizes it, with torch's own warning
    return out.resize_(wide.shape).copy_(wide)


def _in_place(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _are_float16(args):
        return func(*args, **kwargs)
    wide = func(*map(_widen, args), **kwargs)
    return args[0].copy_(wide)


def _attention(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _are_float16(args):
        return func(*args, **kwargs)
    out, logsumexp = func(*map(_widen, args), **{k: _widen(v) for k, v in kwargs.items()})
    return _narrow(out), logsumexp


def _norm(mode: Any, func: Any, args: Any, kwargs: dict[str, Any], place: int) -> Any:
    if args[place].is_cpu and args[place].dtype in (torch.float16, torch.float32):
        args = tuple(_from_bfloat16(a) for a in args)  # autograd casts their gradients back
        kwargs = {k: _from_bfloat16(v) for k, v in kwargs.items()}
    return func(*args, **kwargs)


def _from_bfloat16(value: Any) -> Any:
    is_one = isinstance(value, Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_one else value


def _around(mode: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with mode.inside(func):
        return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _are_float16(args: Any) -> bool:
    """Every operand is, dense and on the CPU; a mixture is for torch to refuse."""
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
