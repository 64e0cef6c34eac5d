"""One module in float32 within a model in float16: its forward, changed and given back.

The module's own ``forward`` is set on the instance: hooks, class and state dict stay, and a
compiler that has traced it before notices. What stands there runs the forward that was found with
autocast off, on float32 copies of the float16 and bfloat16 tensors that come in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.nn import Module

from .castable import SeesAutocast, own_forward, refuse_uncastable
from .casts import FULL, LOW, first_dtype, lowered, raised
from .names import has_forward, with_forward
from .raised_parameters import is_gathered, needs_parts, raise_parameters, restore


class Fp32Module:
    """Puts one module on float32, and takes it off again; any time between two forwards.

    Under autocast its forward runs without it, as torch's float32 operators do: float16 and
    bfloat16 tensors among its inputs, in containers too, are cast up, float32 ones are passed as
    they are, and what it returns stays float32. What was cast up, and a list or mapping that holds
    it, is a copy: what the module writes into that nobody sees. A layer that reads what it returns
    and takes no mixture of dtypes (of float16 parameters: batch norm, on a CPU layer norm) belongs
    on the list as well.

    float16 and bfloat16 parameters and buffers are cast up for the call. The gradients that reach
    them are cast down again, as autograd does; what is written to a buffer in place is kept.

    Without autocast, in a model that is itself in float16 or bfloat16, what it returns in float32
    is cast to the dtype that its inputs had (its parameters, where it has no such input): finite
    values are clamped to that dtype's range first, an inf or NaN stays one. A clamped element's
    gradient is 0.

    Nesting is fine, also twice on one module, in whatever order they are taken off. A copy, or a
    pickle, of a module that is put on is a plain one. A ``copy.copy``, as ``nn.DataParallel`` makes
    them, is not: its forward is that of the original. float16 parameters are replaced while the
    call lasts, so other threads may not use the module then.

    Args:
        module: in place; it is held weakly.
        name: for errors.

    Raises:
        UnsupportedError: it cannot be cast: quantised, fp8 or integer parameters, a ScriptModule,
            a forward that is decorated with autocast. Nothing was changed.
    """

    def __init__(self, module: Module, name: str) -> None:
        refuse_uncastable(module, name)
        self.name = name
        self._module = weakref.ref(module)
        self._forwards: list[weakref.ref[_Forward]] = []  # the module keeps them

    @property
    def module(self) -> Module | None:
        """None: it is gone."""
        return self._module()

    @property
    def is_on(self) -> bool:
        """Between :meth:`put_on` and :meth:`take_off`."""
        return bool(self._forwards)

    @property
    def has_run(self) -> bool:
        """A forward was in float32 since :meth:`put_on`; what compiled code runs is not seen."""
        return any((forward := ref()) is not None and forward.has_run for ref in self._forwards)

    def put_on(self) -> None:
        """In float32 from the next forward on; does nothing where it is on.

        In its first forward, one in training and one in evaluation, the module is watched, where
        nothing in it is compiled. A list of modules has no forward: those in it are put on.

        Raises (in that forward):
            UnsupportedError: it, or a module in it, enters autocast itself.
        """
        module = self._module()
        if module is None or self._forwards:
            return
        for each in with_forward(module):
            forward = _Forward(each, self.name)
            self._forwards.append(weakref.ref(forward))
            forward.set()

    def take_off(self) -> None:
        """As it was before :meth:`put_on`; does nothing where it is off.

        A forward that was wrapped by others meanwhile stays, and runs what it ran before.
        """
        for ref in reversed(self._forwards):
            forward = ref()
            if forward is not None:
                forward.unset()
        self._forwards = []


class _Replaced:
    """Stands on a module in the place of its forward, and can be called as that.

    A copy, or a pickle, of the module gets the forward that was found there.
    """

    def __init__(self, module: Module) -> None:
        self.module, self.found = module, module.forward
        self.had_own = "forward" in vars(module)
        self.is_on = False

    def __reduce__(self) -> Any:
        if self.had_own:
            return itemgetter(0), ((self.found,),)
        return getattr, (self.module, "forward")  # at this point the copy has that of its class

    @property
    def __wrapped__(self) -> Any:
        """For ``inspect.signature``."""
        return self.found

    def set(self) -> None:
        self.is_on = True
        self.module.forward = self

    def unset(self) -> None:
        """Give the module back what was found. Where others have wrapped this, it passes on."""
        self.is_on = False
        now: Any = vars(self.module).get("forward")
        above: Any = None
        while isinstance(now, _Replaced) and now is not self:
            above, now = now, now.found
        if now is not self:
            return
        if above is not None:
            above.found, above.had_own = self.found, self.had_own
        elif self.had_own:
            self.module.forward = self.found
        else:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.found(*args, **kwargs)
        return self.call(args, kwargs)

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """The forward while this is on."""
        raise NotImplementedError


class _Forward(_Replaced):
    """Of the module that is to run in float32."""

    def __init__(self, module: Module, name: str) -> None:
        super().__init__(module)
        self.name, self.kinds = name, _autocast_kinds()
        self.watched: list[bool] = []
        """``training`` in the forwards that were watched."""
        self.parts: list[weakref.ref[_Part]] = []
        self.has_run = False

    def set(self) -> None:
        super().set()
        self._watch_parts()

    def unset(self) -> None:
        for ref in reversed(self.parts):
            part = ref()
            if part is not None:
                part.unset()
        super().unset()

    def _watch_parts(self) -> None:
        """FSDP2 may shard the module when this is on, or somebody may call ``half()``."""
        if not self.parts and self.module._modules and needs_parts(self.module):
            for each in self.module.modules():
                if each is not self.module and has_forward(each):
                    part = _Part(each)
                    self.parts.append(weakref.ref(part))
                    part.set()

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        module = self.module
        # Where the model was prepared its forward turns autocast on, and what comes out of it is
        # float32; what is to run is the forward within.
        is_prepared = "_original_forward" in vars(module)
        forward = own_forward(module) if is_prepared else self.found
        kinds = [kind for kind in self.kinds if torch.is_autocast_enabled(kind)]
        if not torch.compiler.is_compiling():
            self.has_run = True
            self._watch_parts()
        given = first_dtype((args, kwargs), LOW)
        is_wide = given is None and self._is_wide(args, kwargs)
        changes = raise_parameters(module)
        if given is not None:
            args, kwargs = raised((args, kwargs))
        try:
            if not torch.compiler.is_compiling() and module.training not in self.watched:
                result = self._watched(kinds, forward, args, kwargs)
            else:
                result = _without_autocast(kinds, forward, args, kwargs)
        finally:
            restore(changes)
        if is_prepared:
            return raised(result)
        if kinds:
            return result
        if given is None and changes and not is_wide:
            given = changes[0].tensor.dtype
        return result if given is None else lowered(result, given)

    def _is_wide(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """What comes in is in float32, so what goes out stays so."""
        return first_dtype((args, kwargs), FULL) is not None or self._is_part()

    def _is_part(self) -> bool:
        """Another one that is on has this module in it, and this is called by a backward."""
        below: Any = self.found
        while isinstance(below, _Forward):
            below = below.found
        return isinstance(below, _Part) and below.is_on and _is_recomputed()

    def _watched(self, kinds: list[str], forward: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_compiled(self.module, self.found):
            return _without_autocast(kinds, forward, args, kwargs)
        with SeesAutocast(self.name or type(self.module).__name__, self.kinds):
            result = _without_autocast(kinds, forward, args, kwargs)
        self.watched.append(self.module.training)
        return result


class _Part(_Replaced):
    """Of a module in it whose parameters are in float16 where it is called by itself.

    FSDP2 gathers them for that call alone, and casts what goes in; a checkpoint calls it again in
    the backward, when those around it have their float16 parameters back.
    """

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        module, forward = self.module, self.found
        is_meant = (
            is_gathered(module)
            or first_dtype((args, kwargs), FULL) is not None
            or (_is_recomputed() and first_dtype((args, kwargs), LOW) is None)
        )
        if not is_meant or any(map(torch.is_autocast_enabled, _autocast_kinds())):
            return forward(*args, **kwargs)
        changes = raise_parameters(module)
        args, kwargs = raised((args, kwargs))
        try:
            return forward(*args, **kwargs)
        finally:
            restore(changes)


def is_compiled(module: Module, forward: Any = None) -> bool:
    """It, or a module in it, is: a mode would be part of what its graph asks for."""
    return hasattr(forward, "_torchdynamo_orig_callable") or any(
        isinstance(each, torch._dynamo.OptimizedModule)
        or each._compiled_call_impl is not None
        or hasattr(vars(each).get("forward"), "_torchdynamo_orig_callable")
        for each in module.modules()
    )


def _is_recomputed() -> bool:
    """A backward is running: it calls what a checkpoint has not kept."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _autocast_kinds() -> tuple[str, ...]:
    """Of the devices that a forward may run on here."""
    present = torch.accelerator.current_accelerator()
    return ("cpu",) if present is None else ("cpu", present.type)


def _without_autocast(
    kinds: list[str], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Off for these kinds of devices; a compiler does not know a stack of contexts."""
    if not kinds:
        return forward(*args, **kwargs)
    with torch.autocast(kinds[0], enabled=False):
        return _without_autocast(kinds[1:], forward, args, kwargs)
