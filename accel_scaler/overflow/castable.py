"""What cannot run in float32, by name and with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedError

CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

QUANTISED = (
    *("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized"),
    *("torch.nn.quantized", "torch.nn.intrinsic.quantized", "torchao", "quanto", "optimum.quanto"),
    *("hqq", "awq", "auto_gptq", "gptqmodel", "aqlm", "eetq", "fbgemm_gpu"),
)
"""Where modules are defined that compute with packed integers, or in fp8."""


def refuse_uncastable(module: Module, name: str) -> None:
    """Raise ``UnsupportedError`` where a module, or one in it, cannot run in float32.

    Args:
        name: the module's, for the error.
    """
    for inner, each in module.named_modules():
        why = _why_not(each)
        if why is not None:
            whole = ".".join(filter(None, (name, inner)))
            raise refused(name or type(module).__name__, f"{shown_name(whole, each)} {why}")


def shown_name(name: str, module: Module) -> str:
    """``'h.3.mlp' (MLP)``; the model itself by its class."""
    kind = type(module).__name__
    return f"{name!r} ({kind})" if name else kind


def refused(name: str, why: str) -> UnsupportedError:
    """It says that ``name`` cannot be in fp32_modules."""
    return UnsupportedError(
        f"fp32_modules: {name!r} cannot run in float32: {why}. Name the modules beside it, or "
        "leave it out."
    )


def _why_not(module: Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, which casts by itself; leave it unscripted while it trains"
    for cls in type(module).__mro__:
        if _is_of(cls.__module__, ("transformer_engine",)):
            return "is a module of transformer_engine, which computes in fp8 by itself"
        if _is_of(cls.__module__, QUANTISED):
            return "is quantised"
    for own, tensor in (*module._parameters.items(), *module._buffers.items()):
        why = None if tensor is None else _why_not_tensor(tensor, own in module._parameters)
        if why is not None:
            return f"has {own!r}, {why}"
    if enters_autocast(module):
        return (
            "has a forward that is decorated with autocast, which turns it on again; decorate it "
            "with enabled=False, or not at all"
        )
    return None


def _why_not_tensor(tensor: Tensor, is_parameter: bool) -> str | None:
    sharded: Any = tensor
    kind: Any = type(sharded.to_local() if hasattr(tensor, "to_local") else tensor)
    if tensor.is_quantized:
        return "which is quantised"
    if _is_of(kind.__module__, ("bitsandbytes", *QUANTISED)):
        return f"which is quantised ({kind.__name__})"
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, which computes by itself"
    if is_parameter and tensor.dtype not in CASTABLE and not tensor.is_complex():
        return f"a parameter of {str(tensor.dtype).removeprefix('torch.')}"
    return None


def _is_of(place: str, packages: tuple[str, ...]) -> bool:
    return any(place == each or place.startswith(f"{each}.") for each in packages)


def enters_autocast(module: Module) -> bool:
    """Whether its forward is decorated with autocast, switched on."""
    return any(
        isinstance(cell, torch.autocast) and cell._enabled
        for function in _unwrapped(own_forward(module))
        for cell in _closure(function)
    )


def own_forward(module: Module) -> Any:
    """Its forward, within the autocast of who has prepared it (Accelerate keeps it there)."""
    return vars(module).get("_original_forward", module.forward)


def _unwrapped(function: Any) -> Iterator[Any]:
    seen: list[Any] = []
    while function is not None and not any(function is each for each in seen):
        seen.append(function)
        yield function
        function = getattr(function, "__func__", getattr(function, "__wrapped__", None))


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty one
            continue


class SeesAutocast(TorchFunctionMode):
    """Within it an operation under autocast raises: the module's own code has turned it on.

    Args:
        kinds: of the devices that are asked for.

    Raises (within it):
        UnsupportedError: naming the module.
    """

    def __init__(self, name: str, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self._name, self._kinds = name, kinds

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(torch.is_autocast_enabled, self._kinds)):
            raise refused(
                self._name,
                "its forward, or one in it, enters autocast itself, which turns float16 on again; "
                "write torch.autocast(..., enabled=False) there, or nothing",
            )
        return func(*args, **(kwargs or {}))
