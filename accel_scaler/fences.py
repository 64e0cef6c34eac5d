"""Where somebody outside the training step looks: the newest parameters and state first.

Hooks of torch's own on one optimizer and on models; removed by ``close``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .engine import Engine
from .slots import Slot

__all__ = ["Fences"]

MASTER = "master"
"""Key of a float32 master in a parameter's state entry, where the parameter itself is rounded."""


class Fences:
    """The hooks of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._handles: list[Any] = []
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._others: weakref.WeakSet[Module] = weakref.WeakSet()
        """Models without any of the optimizer's parameters, as of ``_slots``."""
        self._slots: list[Slot] = []
        self._compiled: list[tuple[weakref.ref[Module], Any, Any]] = []
        self._loading: Any = None
        optimizer = engine.optimizer
        self._handles += [
            optimizer.register_state_dict_pre_hook(self._before_saving),
            optimizer.register_state_dict_post_hook(self._after_saving),
            optimizer.register_load_state_dict_pre_hook(self._before_loading),
            optimizer.register_load_state_dict_post_hook(self._after_loading),
        ]

    def __reduce__(self) -> Any:
        # A model is copied and pickled along with its hooks; no engine steps the copy.
        return _of_nobody, (type(self), "_engine")

    def close(self) -> None:
        """Finish the engine's step, remove every hook, leave the optimizer as torch has it.

        Raises:
            StepError: the step in hand failed; everything is removed all the same.
        """
        engine = self._engine()
        try:
            if engine is not None:
                engine.close()
                self._give_state_back(engine)
        finally:
            self._remove()

    def _give_state_back(self, engine: Engine) -> None:
        """State that lives with masters goes to the parameters' device and dtype."""
        optimizer = engine.optimizer
        if not engine.shadow.slots:
            return  # nothing was ever stepped or loaded; asked for state it would begin now
        if not (engine.shadow.masters or engine.keeps_scaled):
            return
        saved = optimizer.state_dict()
        state: dict[Any, Any] = {}
        for index, entry in saved["state"].items():
            if isinstance(entry, dict):
                entry = {key: value for key, value in entry.items() if key != MASTER}
            if entry or not isinstance(index, int):
                state[index] = entry
        self._remove()
        optimizer.load_state_dict({**saved, "state": state})

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for ref, own, wrapper in self._compiled:
            module = ref()
            if module is not None and module._compiled_call_impl is wrapper:
                module._compiled_call_impl = own
        self._compiled.clear()

    # On the optimizer.

    def _before_saving(self, optimizer: Optimizer) -> None:
        engine = self._engine()
        if engine is not None:
            engine.synchronize()
            engine.refresh()  # a model that was loaded after its masters

    def _after_saving(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine()
        if engine is None:
            return state_dict
        slots = {id(slot.param): slot for slot in engine.shadow.slots}
        packed = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        state: dict[Any, Any] = dict(state_dict["state"])
        for saved, group in packed:
            for index, p in zip(saved["params"], group["params"], strict=True):
                slot, entry = slots.get(id(p)), state.get(index)
                if slot is None:
                    continue
                if entry:
                    entry = {key: _export(slot, value) for key, value in entry.items()}
                if slot.is_rounded and (engine.steps or slot.loaded is not None):
                    entry = {**(entry or {}), MASTER: _export(slot, slot.twin.data)}
                if entry:
                    state[index] = entry
                else:
                    state.pop(index, None)  # made for sharing, never filled
        return {**state_dict, "state": state}

    def _before_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine()
        if engine is None:
            return state_dict
        engine.forgive()
        engine.synchronize()
        engine.refresh()
        self._loading = state_dict
        # torch casts to the parameter's dtype and device, which is not where state lives here.
        return (
            {**state_dict, "state": {}}
            if engine.shadow.masters or engine.keeps_scaled
            else state_dict
        )

    def _after_loading(self, optimizer: Optimizer) -> None:
        engine, loaded, self._loading = self._engine(), self._loading, None
        if engine is not None and loaded is not None:
            engine.load(loaded, MASTER)

    # On models.

    def watch(self, models: Iterable[Module]) -> None:
        """Put hooks on models that hold some of the optimizer's parameters; once each."""
        engine = self._engine()
        if engine is None:
            return
        if not engine.shadow.slots:
            engine.refresh()  # an accelerator's, before its first step
        if self._slots is not engine.shadow.slots:
            self._slots, self._others = engine.shadow.slots, weakref.WeakSet()
        for model in models:
            if model in self._models or model in self._others:
                continue
            mine = {id(slot.param) for slot in self._slots}
            if mine.isdisjoint(map(id, Module.parameters(model))):
                self._others.add(model)
                continue
            self._models.add(model)
            engine.know(model)
            self._watch(model, engine, mine)
        self._watch_compiled(engine)

    def _watch(self, model: Module, engine: Engine, mine: set[int]) -> None:
        module: Any
        for module in model.modules():
            if any(id(p) in mine for p in Module.parameters(module, recurse=False)):
                self._handles += [
                    module.register_state_dict_pre_hook(self._synchronize),
                    module.register_load_state_dict_pre_hook(self._synchronize),
                ]
                if not type(module).__module__.startswith("torch.nn."):
                    # Its forward may hand a parameter to code that torch does not see.
                    self._handles.append(
                        module.register_forward_pre_hook(self._before_owner, prepend=True)
                    )
        for root in _roots(model):
            # A sharded one waits before each gather; asked for here, since the hook may be traced.
            hook = self._before_evaluation if _is_fsdp2(root) else self._before_forward
            self._handles.append(root.register_forward_pre_hook(hook, prepend=True))
        sharded = [module for module in model.modules() if _is_fsdp2(module)]
        if sharded or isinstance(model, torch.nn.DataParallel):
            engine.waits_at_root = True  # their reads of parameters cannot be seen
        for module in sharded:
            self._handles.append(
                module.register_forward_pre_hook(_BeforeGather(self._engine), prepend=True)
            )

    def _watch_compiled(self, engine: Engine) -> None:
        """Compiled code checks the class of its parameters: its forward waits for all first."""
        for model in list(self._models):
            for module in model.modules():
                own = module._compiled_call_impl
                if isinstance(module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
                    engine.waits_at_root = True
                if own is None or any(own is wrapper for _, _, wrapper in self._compiled):
                    continue
                engine.waits_at_root = True
                wrapper = _WaitFirst(self._engine, own)
                module._compiled_call_impl = wrapper
                self._compiled.append((weakref.ref(module), own, wrapper))

    def _synchronize(self, *_: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.synchronize()

    def _before_owner(self, module: Module, _: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.settle(Module.parameters(module, recurse=False))

    def _before_forward(self, module: Module, _: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        if not torch.is_grad_enabled() or not module.training:
            engine.synchronize()  # an evaluation sees the newest parameters
        elif engine.waits_at_root or _is_transformed():
            engine.finish_model()

    def _before_evaluation(self, module: Module, _: Any) -> None:
        engine = self._engine()
        if engine is not None and (not torch.is_grad_enabled() or not module.training):
            engine.synchronize()


def _nobody() -> None:
    return None


def _of_nobody(cls: type[Any], reference: str) -> Any:
    """A copy of something with hooks on a model, that waits for nothing."""
    made = object.__new__(cls)
    setattr(made, reference, _nobody)
    return made


class _WaitFirst:
    """A compiled call that waits for the optimizer thread before it starts."""

    def __init__(self, engine: weakref.ref[Engine], call: Any) -> None:
        self._engine, self._call = engine, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is not None:
            engine.finish_model()
        return self._call(*args, **kwargs)


class _BeforeGather:
    """Before FSDP2 gathers a group's parameters: wait for their updates."""

    def __init__(self, engine: weakref.ref[Engine]) -> None:
        self._engine = engine

    def __reduce__(self) -> Any:
        return _of_nobody, (type(self), "_engine")

    def __call__(self, module: Module, _: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        group: Any = module  # FSDP2 does not say in public what it gathers, and what ahead of time
        state = group._get_fsdp_state()
        together = getattr(state, "_modules", None)  # fully_shard([a, b]) gathers both at a
        if together is None or getattr(state, "_states_to_forward_prefetch", True):
            engine.finish_model()
        else:
            engine.settle_parts(p for each in together for p in _own_parameters(each))
        engine.wait_for_device()  # it gathers on streams that wait for ours at the root only


def _is_fsdp2(module: Module) -> bool:
    # To import it takes a second; who has such a module has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_transformed() -> bool:
    """Inside ``torch.func.grad``, ``vmap`` or the like, which wrap parameters unseen."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _own_parameters(module: Module) -> Iterator[Tensor]:
    """The parameters that FSDP2 gathers together with this module."""
    yield from Module.parameters(module, recurse=False)
    for child in module.children():
        if not _is_fsdp2(child):
            yield from _own_parameters(child)


def _roots(model: Module) -> list[Module]:
    """The model and what DDP and the like wrap; not what is compiled, whose hooks are traced."""
    found = [model]
    while isinstance(inner := getattr(found[-1], "module", None), Module):
        found.append(inner)
    return found


def _export(slot: Slot, value: Any) -> Any:
    """As torch writes it: a shard of a sharded parameter is a DTensor."""
    p: Any = slot.param
    if not (
        hasattr(p, "to_local") and isinstance(value, Tensor) and value.shape == slot.target.shape
    ):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
