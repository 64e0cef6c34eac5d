"""float16 autocast and products for models that were prepared without them."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from accelerate.utils.modeling import get_mixed_precision_context_manager

from ..errors import UnsupportedError
from . import cpu_float16

_ATTRIBUTES = ("forward", "_original_forward")
_BEFORE = "_accel_scaler_forward"
"""Where a module keeps the attributes that it had before its forward was wrapped."""


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
        note_forward(accelerator, model)
        inner: Any = accelerator.unwrap_model(model)
        inner._original_forward = inner.forward
        context = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        _wrap_forward(inner, context)
        _wrap_forward(inner, convert_outputs_to_fp32)


def add_emulation(accelerator: Any, model: torch.nn.Module) -> None:
    """Run the prepared model's forward in :func:`cpu_float16.emulate_float16`, outside of autocast,
    where a CPU lacks the kernels."""
    if accelerator.device.type == "cpu" and not cpu_float16.has_float16_kernels():
        note_forward(accelerator, model)
        _wrap_forward(accelerator.unwrap_model(model), cpu_float16.emulating_float16)


def note_forward(accelerator: Any, model: torch.nn.Module) -> None:
    """The forward that the model has now is its own: see :func:`restore_forward`."""
    for keeps in (True, False):
        held = vars(accelerator.unwrap_model(model, keep_torch_compile=keeps))
        held.setdefault(_BEFORE, {name: held[name] for name in _ATTRIBUTES if name in held})


def restore_forward(accelerator: Any, model: torch.nn.Module) -> None:
    """Give the model its own forward back, if one was noted."""
    for keeps in (True, False):
        held = vars(accelerator.unwrap_model(model, keep_torch_compile=keeps))
        if _BEFORE in held:
            for name in _ATTRIBUTES:
                held.pop(name, None)
            held.update(held.pop(_BEFORE))


def _wrap_forward(module: Any, wrapper: Any) -> None:
    """Wrap the forward, bound to the module if it was."""
    forward = module.forward
    wrapped = wrapper(getattr(forward, "__func__", forward))
    module.forward = MethodType(wrapped, module) if hasattr(forward, "__func__") else wrapped
