"""float16 autocast on a model that was prepared without it, its products, and the way back."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from accelerate.utils.modeling import get_mixed_precision_context_manager

from ..errors import UnsupportedError
from . import cpu_float16

__all__ = ["add_autocast", "add_emulation", "remove_autocast", "remove_emulation"]


def add_autocast(accelerator: Any, models: list[torch.nn.Module]) -> None:
    """Wrap each prepared model's forward as ``prepare_model`` does when autocast is on.

    Raises:
        UnsupportedError: a compiled model, whose forward can no longer be wrapped; before any
            model is changed.
    """
    for model in models:
        if is_compiled_module(model):
            raise UnsupportedError(
                "attach: the model was prepared and compiled without autocast. Call "
                "attach(accelerator) before accelerator.prepare(model)."
            )
    for model in models:
        inner: Any = accelerator.unwrap_model(model)
        if "_original_forward" in inner.__dict__:
            continue
        context = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        original = inner.forward
        inner._original_forward = original
        plain = getattr(original, "__func__", None)
        if plain is None:
            inner.forward = convert_outputs_to_fp32(context(original))
        else:
            wrapped = MethodType(context(plain), inner)
            inner.forward = MethodType(convert_outputs_to_fp32(wrapped.__func__), inner)
        add_emulation(accelerator, model)


def remove_autocast(accelerator: Any, model: torch.nn.Module) -> None:
    """Give the model its own forward back."""
    # A compiled model keeps its own forward, but hands this attribute on to what it compiled.
    holder: Any = accelerator.unwrap_model(model)
    inner: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    original = inner.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(holder).forward:
        del holder.__dict__["forward"]
    else:
        holder.forward = original


def add_emulation(accelerator: Any, model: torch.nn.Module) -> None:
    """Around the prepared model's forward, autocast and all: :func:`products.emulate_float16`.

    Does nothing off the CPU, or where the processor has kernels for them.
    """
    if accelerator.device.type != "cpu" or cpu_float16.has_float16_kernels():
        return
    holder: Any = accelerator.unwrap_model(model)
    plain = getattr(holder.forward, "__func__", None)
    wrapped: Any = cpu_float16.emulating_float16(plain or holder.forward)
    wrapped._accel_scaler_emulation = wrapped  # itself: whoever wraps it copies its attributes
    holder.forward = wrapped if plain is None else MethodType(wrapped, holder)


def remove_emulation(accelerator: Any, model: torch.nn.Module) -> None:
    """Give the model back the forward that :func:`add_emulation` found."""
    holder: Any = accelerator.unwrap_model(model)
    forward: Any = holder.forward
    bound = hasattr(forward, "__func__")
    plain: Any = forward.__func__ if bound else forward
    mark: Any = getattr(plain, "_accel_scaler_emulation", None)
    if mark is plain:
        inner = mark.__wrapped__
        holder.forward = MethodType(inner, holder) if bound else inner
