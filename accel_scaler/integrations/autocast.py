"""float16 autocast and products for models that were prepared without them."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from accelerate.utils.modeling import get_mixed_precision_context_manager

from ..errors import UnsupportedError
from . import cpu_float16


def add_autocast(accelerator: Any, models: list[torch.nn.Module]) -> None:
    """Wrap each prepared model's forward in autocast as ``prepare_model`` does, once.

    Raises:
        UnsupportedError: a compiled model, whose forward can no longer be wrapped; no model was
            changed.
    """
    # A compiled model has the attributes of the model inside.
    plain = [m for m in models if not hasattr(accelerator.unwrap_model(m), "_original_forward")]
    if any(map(is_compiled_module, plain)):
        raise UnsupportedError(
            "attach: the model was prepared and compiled without autocast. Call "
            "attach(accelerator) before accelerator.prepare(model)."
        )
    for model in plain:
        inner: Any = accelerator.unwrap_model(model)
        context = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        inner._original_forward = inner.forward
        _replace_forward(inner, convert_outputs_to_fp32(context(_function_of(inner))))
        add_emulation(accelerator, model)


def remove_autocast(accelerator: Any, model: torch.nn.Module) -> None:
    """Give the model its own forward back."""
    # A compiled model keeps its own forward; add_autocast has changed the model inside.
    holder: Any = accelerator.unwrap_model(model)
    inner: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    original = inner.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(holder).forward:
        holder.__dict__.pop("forward", None)
    else:
        holder.forward = original


def add_emulation(accelerator: Any, model: torch.nn.Module) -> None:
    """Run the prepared model's forward in :func:`cpu_float16.emulate_float16`, outside of autocast,
    where a CPU lacks the kernels. Idempotent."""
    if accelerator.device.type != "cpu" or cpu_float16.has_float16_kernels():
        return
    holder: Any = accelerator.unwrap_model(model)
    function = _function_of(holder)
    if getattr(function, "_accel_scaler_emulation", None) is function:
        return
    wrapped: Any = cpu_float16.emulating_float16(function)
    wrapped._accel_scaler_emulation = wrapped  # a wrapper of it copies its attributes
    _replace_forward(holder, wrapped)


def remove_emulation(accelerator: Any, model: torch.nn.Module) -> None:
    holder: Any = accelerator.unwrap_model(model)
    plain = _function_of(holder)
    mark: Any = getattr(plain, "_accel_scaler_emulation", None)
    if mark is plain:
        _replace_forward(holder, mark.__wrapped__)


def _function_of(module: Any) -> Any:
    """The module's forward, unbound."""
    return getattr(module.forward, "__func__", module.forward)


def _replace_forward(module: Any, function: Any) -> None:
    """Make ``function`` the forward, bound to the module if the old forward was."""
    is_bound = hasattr(module.forward, "__func__")
    module.forward = MethodType(function, module) if is_bound else function
