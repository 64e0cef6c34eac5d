"""float16 autocast and products for models on a CPU, where Accelerate gives them none."""

from __future__ import annotations

from types import MethodType
from typing import Any

from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch.nn import Module

from ..errors import UnsupportedError
from .cpu_float16 import EMULATES, emulating_float16


def add_autocast(accelerator: Any, model: Module) -> None:
    """Wrap a prepared model's forward in autocast as ``prepare_model`` does on a device, unless it
    was, and in :func:`emulating_float16`.

    Raises:
        UnsupportedError: a compiled model, whose forward can no longer be wrapped.
    """
    inner: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not hasattr(inner, "_original_forward"):
        if is_compiled_module(model):
            raise UnsupportedError(
                "attach: the model was prepared and compiled without autocast. Call "
                "attach(accelerator) before accelerator.prepare(model)."
            )
        inner._original_forward = inner.forward
        context = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        _wrap_forward(inner, context)
        _wrap_forward(inner, convert_outputs_to_fp32)
    if not hasattr(inner.forward, EMULATES):  # else another accelerator has prepared it
        _wrap_forward(inner, emulating_float16)


def restore_forward(accelerator: Any, model: Module) -> None:
    """Give the model its own forward back."""
    for keeps in (True, False):  # compiled before it was prepared, or after
        module = accelerator.unwrap_model(model, keep_torch_compile=keeps)
        held = vars(module)
        if (own := held.pop("_original_forward", None)) is not None:
            held["forward"] = own
            if getattr(own, "__func__", None) is type(module).forward:
                del held["forward"]


def _wrap_forward(module: Any, wrapper: Any) -> None:
    """Wrap the forward, bound to the module if it was."""
    forward = module.forward
    wrapped = wrapper(getattr(forward, "__func__", forward))
    module.forward = MethodType(wrapped, module) if hasattr(forward, "__func__") else wrapped
