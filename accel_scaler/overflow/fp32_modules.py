"""Modules that run in float32 within a model that trains in float16.

``Fp32Module`` is set as ``forward`` on the instance. Hooks, class and state dict stay as they are,
and a compiler that has traced the module notices. It runs the forward that it found, without
autocast, on float32 casts of float16 and bfloat16 inputs, parameters and buffers.

Note [Parts of a module in float32]
The casts of float16 parameters are there while the module runs. A checkpoint runs modules in it
again, in the backward. So each of them has such a forward too, a *part*, which casts where its
inputs are in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from glob import escape
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from ..devices import present_type
from ..errors import UnsupportedError
from ..models import is_fsdp2
from .hooks import map_tensors, tensors_in
from .module_names import has_forward, match, modules_by_name, refuse_unmatched

LOW = (torch.float16, torch.bfloat16)
_Change = tuple[dict[str, Any], str, Tensor, Tensor]
"""A tensor that is replaced for a call: where, its name, the tensor, and the cast of it."""
CASTABLE = (*LOW, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Fp32Modules:
    """The modules of one run that run in float32, chosen by globs on their names (see ``match``).
    Models are held weakly."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self.added: list[str] = []
        """Names that :meth:`add` was given."""
        self._unchecked = self.patterns
        self._enabled: weakref.WeakSet[Fp32Module] = weakref.WeakSet()

    @property
    def modules(self) -> list[Module]:
        """The modules that run in float32."""
        return [each.module for each in self._enabled]

    def add(self, names: Iterable[str], models: Iterable[Module]) -> None:
        """Run the modules of these names in float32 too, in these models and in later ones. Raises
        ``UnsupportedError`` if one cannot; nothing is changed then."""
        names, models = list(names), list(models)
        patterns = tuple(dict.fromkeys((*self.patterns, *map(escape, names))))
        for model in models:
            self._found_in(model, patterns)
        self.patterns = patterns
        self.added += [name for name in names if name not in self.added]
        for model in models:
            self.enable(model)

    def refuse_uncastable(self, model: Module) -> None:
        """Raise ``UnsupportedError`` if a chosen module cannot run in float32."""
        self._found_in(model, self.patterns)

    def enable(self, model: Module) -> None:
        """Run the model's chosen modules in float32 from the next forward on; to be called again
        after modules were added to it. Raises as :meth:`refuse_uncastable`, and changes nothing."""
        for each in self._found_in(model, self.patterns):
            each.enable()
            self._enabled.add(each)

    def disable(self) -> None:
        """Give their forwards back to the modules."""
        for each in self._enabled:
            each.disable()
        self._enabled.clear()

    def refuse_unmatched(self, models: Sequence[Module]) -> None:
        """Raise ``ConfigError`` if a glob matches nothing in any model; looks until none does."""
        refuse_unmatched(models, self._unchecked)
        self._unchecked = ()

    def _found_in(self, model: Module, patterns: tuple[str, ...]) -> list[Fp32Module]:
        if not patterns:
            return []
        modules, enabled = modules_by_name(model), set(map(id, self.modules))
        names = [name for name in match(model, patterns) if id(modules[name]) not in enabled]
        if names and any(isinstance(each, nn.DataParallel) for each in model.modules()):
            raise UnsupportedError(
                "fp32_modules: the model is within nn.DataParallel, which copies it for each "
                "forward. Use DistributedDataParallel (accelerate launch --multi_gpu)."
            )
        return [Fp32Module(modules[name], name) for name in names]


class Fp32Module:
    """The ``forward`` of one module that runs in float32 while it is enabled.

    Under autocast it runs without autocast, as torch's float32 operators do: float16 and bfloat16
    tensors among its inputs are cast up, and its results stay in float32. The module gets copies of
    these inputs, so whatever it writes into them is lost.

    float16 and bfloat16 parameters and buffers are cast up for the call. Autograd casts the
    gradients down again; a change of a buffer is kept. Without autocast whatever it
    returns in float32 is cast to the low dtype of its inputs (of its parameters, where no input is
    a floating point tensor). Finite values are clamped to the range of that dtype first, with a
    gradient of 0.

    A copy or a pickle of an enabled module is a plain one. Float16 parameters are replaced during
    the call, so no other thread may use the module then.

    Args:
        name: for errors; None: a part.

    Raises:
        UnsupportedError: the module cannot run in float32.
    """

    def __init__(self, module: Module, name: str | None) -> None:
        for inner, each in module.named_modules() if name is not None else ():
            if (why := _why_uncastable(each, is_inner=bool(inner))) is not None:
                label = f"{name}.{inner}".strip(".")
                raise UnsupportedError(
                    f"fp32_modules: {name or type(module).__name__!r} cannot run in float32: "
                    f"{label!r} ({type(each).__name__}) {why}. Name modules without it, or leave "
                    "it out."
                )
        self.module, self.is_enabled, self.is_part = module, False, name is None
        self.parts: list[Fp32Module] = []
        self.kind = present_type()

    def enable(self) -> None:
        """Run in float32 from the next forward on."""
        self.is_enabled = True
        self.found, self.found_on_instance = self.module.forward, "forward" in vars(self.module)
        self.__wrapped__ = self.found  # for ``inspect.signature``
        self.module.forward = self
        tensors = (*self.module.parameters(), *self.module.buffers())
        if not self.is_part and any(tensor.dtype in LOW for tensor in tensors):
            inner = [each for each in self.module.modules() if has_forward(each)]
            self.parts = [Fp32Module(each, None) for each in inner if each is not self.module]
        for part in self.parts:
            part.enable()

    def disable(self) -> None:
        """Give the module its forward back.

        A forward that somebody else has wrapped meanwhile stays, and runs what it found.
        """
        self.is_enabled = False
        for part in self.parts:
            part.disable()
        forward: Any = vars(self.module).get("forward")
        while isinstance(forward, Fp32Module) and not forward.is_enabled:
            if forward.found_on_instance:
                self.module.forward = forward.found
            else:
                del self.module.forward
            forward = vars(self.module).get("forward")

    def __reduce__(self) -> Any:
        if self.found_on_instance:
            return itemgetter(0), ((self.found,),)
        return getattr, (self.module, "forward")  # the class's, as the copy has none yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled:
            return self.found(*args, **kwargs)
        is_amp = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(self.kind)
        dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs))]
        low = (*[dtype for dtype in dtypes if dtype in LOW], None)[0]  # 2.6 compiles no next()
        is_full = low is None and torch.float32 in dtypes
        if self.is_part and (is_amp or not is_full):
            return self.found(*args, **kwargs)
        changes = _cast_parameters(self.module)
        if low is not None:
            args, kwargs = map_tensors((args, kwargs), lambda t: t.float() if t.dtype in LOW else t)
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast(self.kind, enabled=False):
                result = self.found(*args, **kwargs)
        finally:
            _restore(changes)
        if low is None and changes:
            low = changes[0][2].dtype
        return result if is_amp or is_full or low is None else cast_down(result, low)


def _cast_parameters(module: Module) -> list[_Change]:
    """Put float32 casts in the place of float16 and bfloat16 parameters and buffers.

    Autograd sees the casts. A tensor that two modules have is cast once.
    """
    places: list[dict[str, Any]] = []
    for owner in module.modules():
        places += [owner._parameters, owner._buffers]
    found = [(where, *item) for where in places for item in where.items()]
    low = {id(t): t for _, _, t in found if t is not None and t.dtype in LOW}
    casts = {key: tensor.to(torch.float32) for key, tensor in low.items()}
    changes = [(where, name, t, casts[id(t)]) for where, name, t in found if id(t) in casts]
    for where, name, _, cast in changes:
        where[name] = cast
    return changes


def _restore(changes: list[_Change]) -> None:
    """Put the tensors back, with the changes that the call has made to buffers."""
    for where, name, tensor, cast in changes:
        now = where.get(name)
        if now is cast:
            if not isinstance(tensor, nn.Parameter):
                with torch.no_grad():
                    # Through .data, as a backward that has saved the buffer would refuse a change.
                    (tensor if torch.compiler.is_compiling() else tensor.data).copy_(cast)
            where[name] = tensor
        elif isinstance(now, Tensor) and now.dtype is torch.float32:  # assigned in the call
            where[name] = now.to(tensor.dtype)


def cast_down(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its float32 tensors in ``dtype``. Finite elements are clamped to its range,
    with a gradient of 0; inf and NaN stay."""
    most = torch.finfo(dtype).max

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(dtype)

    return map_tensors(value, cast)


def _why_uncastable(module: Module, is_inner: bool) -> str | None:
    if is_inner and is_fsdp2(module):
        return "is sharded by itself, and gathered in the dtype of its own policy"
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
    return None if is_inner or has_forward(module) else "has no forward"
