"""Modules that run in float32 within a model that trains in float16.

``Fp32Module`` sets a ``forward`` on the instance. Hooks, class and state dict stay as they are, and
a compiler that has traced the module notices. That forward runs the one that it found, without
autocast, on float32 casts of float16 and bfloat16 inputs, parameters and buffers.

Note [Parts of a module in float32]
The casts of float16 parameters are there while the module runs. Two things call a module inside it
at another time, or with other parameters: a checkpoint, which runs it again in the backward, and
FSDP2, which gathers its parameters, and casts its inputs down, for that call alone. So where
parameters are in float16 or sharded, each module inside has such a forward too, a *part*. It casts
if its inputs show that the module around it runs in float32, and leaves its output in float32.
Modules inside are enabled before those around them, so that a part lies over the forward of a
module that is chosen by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from glob import escape
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from ..errors import UnsupportedError
from ..models import is_fsdp2, is_in_backward
from .containers import map_tensors, tensors_in
from .module_names import has_forward, match, modules_by_name, refuse_unmatched

LOW = (torch.float16, torch.bfloat16)
CASTABLE = (*LOW, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Fp32Modules:
    """The modules of one run that run in float32, chosen by globs. Models are held weakly.

    Args:
        patterns: globs on module names; see ``match``.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self.added: list[str] = []
        """Names that :meth:`add` was given."""
        self._unmatched = list(self.patterns)
        self._enabled: list[Fp32Module] = []

    @property
    def modules(self) -> list[Module]:
        """Those that run in float32."""
        return [module for each in self._enabled if (module := each.module) is not None]

    def add(self, names: Iterable[str], models: Iterable[Module]) -> None:
        """Run the modules of these names in float32 too, in these models and in later ones.

        Raises:
            UnsupportedError: a module cannot run in float32; nothing is changed.
        """
        names, before = list(names), self.patterns
        self.patterns = tuple(dict.fromkeys((*before, *map(escape, names))))
        try:
            for model in models:
                self.refuse_uncastable(model)
        except UnsupportedError:
            self.patterns = before
            raise
        self.added += [name for name in names if name not in self.added]
        for model in models:
            self.enable(model)

    def refuse_uncastable(self, model: Module) -> None:
        """Raise where :meth:`enable` would.

        Raises:
            UnsupportedError: a chosen module cannot run in float32, or ``nn.DataParallel`` copies
                the model for each forward.
        """
        self._found_in(model)

    def enable(self, model: Module) -> None:
        """Run the model's chosen modules in float32 from the next forward on.

        To be called again after modules were added to the model, or after it was sharded.

        Raises:
            UnsupportedError: as :meth:`refuse_uncastable`; nothing is changed.
        """
        self._enabled += reversed(self._found_in(model))  # See Note [Parts of a module in float32]
        for each in self._enabled:
            each.enable()
        self._unmatched = [glob for glob in self._unmatched if not match(model, [glob])]

    def disable(self) -> None:
        """Give their forwards back to the modules."""
        for each in reversed(self._enabled):
            each.disable()
        self._enabled.clear()

    def refuse_unmatched(self, models: Iterable[Module]) -> None:
        """Raise ``ConfigError`` if a glob has matched nothing in any model so far."""
        if self._unmatched:
            refuse_unmatched(list(models), self._unmatched)
            self._unmatched = []

    def _found_in(self, model: Module) -> list[Fp32Module]:
        if not self.patterns:
            return []
        modules, enabled = modules_by_name(model), set(map(id, self.modules))
        names = [name for name in match(model, self.patterns) if id(modules[name]) not in enabled]
        if names and any(isinstance(each, nn.DataParallel) for each in model.modules()):
            raise UnsupportedError(
                "fp32_modules: the model is within nn.DataParallel, which copies it for each "
                "forward. Use DistributedDataParallel (accelerate launch --multi_gpu)."
            )
        return [Fp32Module(modules[name], name) for name in names]


class Fp32Module:
    """Runs one module in float32 while it is enabled.

    Under autocast its forward runs without autocast, as torch's float32 operators do: float16 and
    bfloat16 tensors among its inputs are cast up, and what it returns stays in float32. What was
    cast up is a copy: what the module writes into it is lost.

    float16 and bfloat16 parameters and buffers are cast up for the call. Autograd casts the
    gradients down again; what the module writes to a buffer is kept. Without autocast what it
    returns in float32 is cast to the low dtype of its inputs (of its parameters, where no input is
    a floating point tensor). Finite values are clamped to the range of that dtype first, with a
    gradient of 0.

    A copy or a pickle of an enabled module is a plain one. Float16 parameters are replaced during
    the call, so no other thread may use the module then.

    Args:
        module: held weakly.
        name: for errors.

    Raises:
        UnsupportedError: the module cannot run in float32.
    """

    def __init__(self, module: Module, name: str) -> None:
        refuse_uncastable(module, name)
        self.name = name
        self.is_enabled = self._has_parts = False
        self._module = weakref.ref(module)
        device = torch.accelerator.current_accelerator()
        self.device_types = ("cpu",) if device is None else ("cpu", device.type)

    @property
    def module(self) -> Module | None:
        """None once the model is gone."""
        return self._module()

    def enable(self) -> None:
        """Run in float32 from the next forward on. To be called again after ``fully_shard``."""
        module = self.module
        if module is None:
            return
        if not self.is_enabled:
            self.is_enabled, self._has_parts = True, False
            module.forward = _Fp32Forward(module, self)
        tensors = (*module.parameters(), *module.buffers())
        if not self._has_parts and any(map(_is_low_or_sharded, tensors)):
            self._has_parts = True  # See Note [Parts of a module in float32]
            for part in module.modules():
                if part is not module and has_forward(part):
                    part.forward = _Fp32Forward(part, self, is_part=True)

    def disable(self) -> None:
        """Give the module its forward back.

        A forward that somebody else has wrapped meanwhile stays, and runs what it found.
        """
        self.is_enabled = False
        module = self.module
        for each in () if module is None else module.modules():
            forward = vars(each).get("forward")
            while isinstance(forward, _Fp32Forward) and not forward.owner.is_enabled:
                forward.remove()
                forward = vars(each).get("forward")


class _Fp32Forward:
    """The ``forward`` of a module that runs in float32, or of a part of it.

    Copies and pickles of the module get the forward that was there before.
    """

    def __init__(self, module: Module, owner: Fp32Module, is_part: bool = False) -> None:
        self.module, self.owner, self.is_part = module, owner, is_part
        self.found, self.found_on_instance = module.forward, "forward" in vars(module)

    def __reduce__(self) -> Any:
        if self.found_on_instance:
            return itemgetter(0), ((self.found,),)
        return getattr, (self.module, "forward")  # as the copy has none yet, that of its class

    @property
    def __wrapped__(self) -> Any:
        """For ``inspect.signature``."""
        return self.found

    def remove(self) -> None:
        """Give the module its forward back."""
        if self.found_on_instance:
            self.module.forward = self.found
        else:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.owner.is_enabled:
            return self.found(*args, **kwargs)
        autocasts = [kind for kind in self.owner.device_types if torch.is_autocast_enabled(kind)]
        low = _first_dtype((args, kwargs), LOW)
        is_full = low is None and _first_dtype((args, kwargs), (torch.float32,)) is not None
        if self.is_part:
            is_recomputed = not torch.compiler.is_compiling() and is_in_backward()
            casts = is_fsdp2(self.module) or is_full or (is_recomputed and low is None)
            if autocasts or not casts:
                return self.found(*args, **kwargs)
        changes = _cast_parameters(self.module)
        if low is not None:
            args, kwargs = map_tensors((args, kwargs), _cast_up)
        try:
            result = _without_autocast(autocasts, self.found, args, kwargs)
        finally:
            _restore(changes)
        if autocasts or is_full or self.is_part:
            return result
        if low is None and changes:
            low = changes[0].tensor.dtype
        return result if low is None else cast_down(result, low)


class _Change(NamedTuple):
    """A tensor of a module that is replaced for a call."""

    where: dict[str, Any]
    name: str
    tensor: Tensor
    cast: Tensor
    is_parameter: bool


def _cast_parameters(module: Module) -> list[_Change]:
    """Put float32 casts in the place of float16 and bfloat16 parameters and buffers.

    Autograd sees the casts. A tensor that two modules have is cast once. Modules that FSDP2 gathers
    by themselves are left out: see Note [Parts of a module in float32].
    """
    owners = [module]
    for owner in owners:
        owners += [m for m in owner._modules.values() if m is not None and not is_fsdp2(m)]
    changes: list[_Change] = []
    casts: dict[int, Tensor] = {}
    for owner in owners:
        places: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        if not torch.compiler.is_compiling():
            places.append(vars(owner))  # where weight norm and FSDP1 leave a tensor
        for where in places:
            is_attribute = where is not owner._parameters and where is not owner._buffers
            for name, tensor in where.items():
                if tensor is None or (is_attribute and type(tensor) is not Tensor):
                    continue
                if tensor.dtype in LOW:
                    if id(tensor) not in casts:
                        casts[id(tensor)] = tensor.to(torch.float32)
                    cast, is_parameter = casts[id(tensor)], where is owner._parameters
                    changes.append(_Change(where, name, tensor, cast, is_parameter))
    for change in changes:
        change.where[change.name] = change.cast
    return changes


def _restore(changes: list[_Change]) -> None:
    """Put the tensors back, with what the call has written to buffers."""
    for where, name, tensor, cast, is_parameter in changes:
        now = where.get(name)
        if now is cast:
            if not (is_parameter or cast.requires_grad or 0 in tensor.stride()):
                with torch.no_grad():
                    # Through .data: who saved the buffer for a backward is not to find it changed.
                    (tensor if torch.compiler.is_compiling() else tensor.data).copy_(cast)
            where[name] = tensor
        elif isinstance(now, Tensor) and now.dtype is torch.float32:  # assigned in the call
            where[name] = now.to(tensor.dtype)


def _without_autocast(
    kinds: list[str], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Recursive since torch.compile does not trace an ``ExitStack``."""
    if not kinds:
        return forward(*args, **kwargs)
    with torch.autocast(kinds[0], enabled=False):
        return _without_autocast(kinds[1:], forward, args, kwargs)


def _first_dtype(value: Any, wanted: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """The dtype of the first tensor in ``value`` that has one of these."""
    for tensor in tensors_in(value):
        if tensor.dtype in wanted:
            return tensor.dtype
    return None


def _cast_up(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype in LOW else tensor


def cast_down(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its float32 tensors in ``dtype``. Finite elements are clamped to its range,
    with a gradient of 0; inf and NaN stay."""
    most = torch.finfo(dtype).max

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(dtype)

    return map_tensors(value, cast)


def _is_low_or_sharded(tensor: Tensor) -> bool:
    return tensor.dtype in LOW or hasattr(tensor, "to_local")


def refuse_uncastable(module: Module, name: str) -> None:
    """Raise ``UnsupportedError`` if the module, or one in it, cannot run in float32."""
    for inner, each in module.named_modules():
        why = _why_uncastable(each)
        if why is None and not inner and not has_forward(module):
            why = "has no forward"
        if why is not None:
            label = f"{name}.{inner}".strip(".")
            raise UnsupportedError(
                f"fp32_modules: {name or type(module).__name__!r} cannot run in float32: {label!r} "
                f"({type(each).__name__}) {why}. Name modules without it, or leave it out."
            )


def _why_uncastable(module: Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, which casts by itself"
    if "_original_forward" in vars(module):
        return "was prepared by itself, so that its forward enters autocast again"
    for name, p in module._parameters.items():
        if p is None:
            continue
        if p.dtype not in CASTABLE:
            return f"has the parameter {name!r} of {str(p.dtype).removeprefix('torch.')}"
        kind: Any = type(p.to_local() if hasattr(p, "to_local") else p)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"has the parameter {name!r}, a {kind.__name__}"
    return None
