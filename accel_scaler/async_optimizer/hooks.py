"""Hooks that wait for updates before parameters or state are read outside the training step.

They are torch's own, on one optimizer and on models, and are removed by ``close``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import dlpack

from ..errors import UnsupportedError
from ..models import inert, is_fsdp2, is_in_backward, is_replaying
from ..scaling import parameters_of
from .async_stepper import AsyncStepper
from .delayed import without_master
from .inflight_step import WaitAt
from .master_params import MASTER, ParameterPair
from .pending_parameter import outside_transforms
from .replica import is_empty
from .shared_memory import are_tied

logger = logging.getLogger("accel_scaler")


@dataclass(eq=False, repr=False)
class SyncHooks:
    """The hooks of one stepper, which is closed where they cannot be registered."""

    stepper: AsyncStepper
    holder: InitVar[object | None]
    """The object that calls :meth:`close`; None: nothing tells whether it is gone."""
    find_models: Callable[[], Iterable[Module]]
    """Returns the models to watch before state is loaded."""
    owner: weakref.WeakMethod[Callable[[], None]] | None = None
    """Called where another optimizer takes over; it has to call :meth:`close`."""

    def __post_init__(self, holder: object | None) -> None:
        self.stepper.hooks = self
        self._holder = None if holder is None else weakref.ref(holder)
        self._handles: list[Any] = []
        self._models: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        """Whether each model seen holds some of the parameters in ``_ids``."""
        self._ids: list[int] = []
        """``id`` of each of the optimizer's parameters."""
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()
        """All modules that have hooks."""
        self._roots: weakref.WeakSet[Module] = weakref.WeakSet()
        """Modules that wait for the whole model, if it cannot be waited for in pieces."""
        self._loading: Any = None
        optimizer = self.stepper.optimizer
        try:
            add = self._handles.append
            add(optimizer.register_state_dict_pre_hook(self._before_saving))
            add(optimizer.register_state_dict_post_hook(self._after_saving))
            self._loads = optimizer.register_load_state_dict_pre_hook(self._before_loading)
            add(self._loads)
            # Before the user's, which see the state.
            after = self._after_loading
            add(optimizer.register_load_state_dict_post_hook(after, prepend=True))
        except BaseException:
            self.close()
            raise

    @property
    def is_left(self) -> bool:
        """Whether their holder is gone and has not closed them: the optimizer keeps its stepper."""
        return self._holder is not None and self._holder() is None

    def close(self, is_replaced: bool = False) -> None:
        """Finish the stepper's step, remove every hook, leave the optimizer as torch has it.
        ``is_replaced``: nothing steps the optimizer now, so its state stays where it is. Raises
        ``StepError`` where the step in flight failed; everything is removed all the same."""
        stepper = self.stepper
        try:
            stepper.close()
            if not is_replaced:
                self._give_state_back(stepper)
        finally:
            self._remove()
            stepper.hooks = None  # a cycle would keep the masters until it is collected
            stepper.release()

    def _give_state_back(self, stepper: AsyncStepper) -> None:
        """Move state of masters to the parameters' device and dtype, make DTensors of shards."""
        optimizer = stepper.optimizer
        replica = stepper.replica
        # Without pairs nothing was stepped or loaded, and ``keeps_scaled`` would make pairs.
        if not replica.pairs or not (
            replica.masters.every or stepper.keeps_scaled or replica.is_sharded
        ):
            return
        # State of replaced parameters stays; torch's state dict does not take it.
        own, found = set(map(id, parameters_of(optimizer))), optimizer.state
        gone = [key for key in found if isinstance(key, Tensor) and id(key) not in own]
        left = {key: found.pop(key) for key in gone}
        saved = optimizer.state_dict()
        entries = {key: without_master(entry) for key, entry in saved["state"].items()}
        state = {k: e for k, e in entries.items() if not (is_empty(e) and isinstance(k, int))}
        self._remove()
        optimizer.load_state_dict({**saved, "state": state})
        optimizer.state.update(left)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # On the optimizer.

    def _before_saving(self, optimizer: Optimizer) -> None:
        own = set(map(id, parameters_of(optimizer)))
        for key in [k for k, entry in optimizer.state.items() if is_empty(entry)]:
            if isinstance(key, Tensor) and id(key) not in own:
                del optimizer.state[key]  # made for sharing, and its parameter is gone
        self.stepper.synchronize()
        self.stepper.refresh()  # a model that was loaded after its masters
        self.stepper.follow_unseen_edits()

    def _after_saving(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        stepper = self.stepper
        pairs = {id(pair.param): pair for pair in stepper.replica.pairs}
        state: dict[Any, Any] = dict(state_dict["state"])
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            for index, p in zip(saved["params"], group["params"], strict=True):
                pair, entry = pairs.get(id(p)), state.get(index)
                if pair is None:
                    continue
                # Else it is the optimizer's own, as torch's is: what is written to it counts.
                is_ours = pair.is_master or hasattr(p, "to_local") or MASTER in (entry or ())
                if is_ours and isinstance(entry, dict):  # a plain optimizer may have loaded it
                    own = without_master(entry)
                    entry = {key: _export(pair, value) for key, value in own.items()}
                # Torch's optimizers want all of their state in an entry that is not empty.
                master = pair.stepped.data
                if pair.is_rounded and (entry or not torch.equal(master, pair.target.to(master))):
                    entry = {**(entry or {}), MASTER: _export(pair, master)}
                if entry is None or is_empty(entry):
                    state.pop(index, None)  # made for sharing, never filled
                else:
                    state[index] = entry
        return {**state_dict, "state": state}

    def _before_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        stepper = self.stepper
        is_ours = stepper.replica.masters.every or stepper.keeps_scaled
        hooks = optimizer._optimizer_load_state_dict_pre_hooks
        if is_ours and next(reversed(hooks)) != self._loads.id:
            raise UnsupportedError(
                "load_state_dict: a pre-hook was registered after prepare() or AsyncOptimizer(), "
                "and would not see the state, which goes into float32 masters. Register it "
                "before, or change the state dict before it is loaded."
            )
        stepper.begin_loading(state_dict)
        if is_ours:
            state_dict = {**state_dict, "state": stepper.replica.apart(state_dict["state"])}
        self._loading = state_dict
        # torch casts to the parameter's dtype and device, which is not where state lives here.
        return {**state_dict, "state": {}} if is_ours else state_dict

    def _after_loading(self, optimizer: Optimizer) -> None:
        loaded, self._loading = self._loading, None
        if loaded is not None:
            self.watch(self.find_models())
            self.stepper.load(loaded)

    # On models.

    def watch(self, models: Iterable[Module], ddp_models: Mapping[int, Module] = {}) -> None:
        """Put hooks on models that hold some of the optimizer's parameters; once each. Raises
        ``UnsupportedError`` for one whose reads cannot be seen where they would have to be.
        ``ddp_models``: the DDP wrapper of some, by the ``id`` of the wrapped model."""
        stepper = self.stepper
        models, ids = list(models), list(map(id, parameters_of(stepper.optimizer)))
        if not stepper.replica.pairs:
            for model in models:
                if not set(ids).isdisjoint(map(id, Module.parameters(model))):
                    stepper.replica.order_by(Module.parameters(model))
            stepper.refresh()  # an accelerator's, before its first step
        if ids != self._ids:
            self._ids, self._models = ids, weakref.WeakKeyDictionary()
        for model in models:
            if model in self._models:
                continue
            mine = set(ids)
            if mine.isdisjoint(map(id, Module.parameters(model))):
                self._models[model] = False
                continue
            self._watch(model, stepper, mine)
            for root in (*_roots(model), ddp_models.get(id(model))):
                if isinstance(root, DistributedDataParallel):
                    stepper.group = root.process_group
                    stepper.ddp_models.add(root)
            self._wait_for_others(model, stepper, mine)
            stepper.parameter_names.add_module(model)
            stepper.order_by(model)
            self._models[model] = True
            stepper.sees_forwards = True
        self._watch_compiled(stepper)

    def _watch(self, model: Module, stepper: AsyncStepper, mine: set[int]) -> None:
        scripted = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.jit.ScriptModule)
            and not mine.isdisjoint(map(id, module.parameters()))
        ]
        if scripted and stepper.mode == "delayed":
            raise UnsupportedError(
                f"step_mode='delayed': {scripted[0] or type(model).__name__!r} is a ScriptModule, "
                "which takes no hooks: evaluated alone it would be one step old. Use step_mode "
                "'overlap' or 'sync', or leave it unscripted while it trains."
            )
        for module in list[Any](model.modules()):
            if module in self._modules or isinstance(module, torch.jit.ScriptModule):
                continue
            self._modules.add(module)
            if next(Module.parameters(module, recurse=False), None) is not None:
                # Copies are made in this order, and have to call a hook before the parameters.
                vars(module)["_parameters"] = vars(module).pop("_parameters")
                wait = _Hook(stepper, lambda stepper, _: stepper.synchronize())
                self._handles.append(module.register_state_dict_pre_hook(wait))
                self._handles.append(module.register_load_state_dict_pre_hook(wait))
            if is_fsdp2(module):
                gather = _Hook(stepper, _before_gather)
                self._handles.append(module.register_forward_pre_hook(gather, prepend=True))
        for root in _roots(model):
            self._hook_root(root, stepper)
        if scripted:
            stepper.wait_at = WaitAt.STEP
        if isinstance(model, torch.nn.DataParallel) or any(map(is_fsdp2, model.modules())):
            stepper.wait_at = max(stepper.wait_at, WaitAt.FORWARD)  # they read parameters unseen

    def _wait_for_others(self, model: Module, stepper: AsyncStepper, mine: set[int]) -> None:
        """Await steps where other tensors of the model lie in its parameters' memory."""
        if stepper.mode == "sync" or stepper.wait_at is WaitAt.STEP:
            return
        tensors = (*Module.parameters(model), *Module.buffers(model))
        others = [t for t in tensors if id(t) not in mine]
        if are_tied([pair.target for pair in stepper.replica.pairs], others):
            stepper.wait_at = WaitAt.STEP
            logger.warning(
                "%s has tensors in the memory of parameters of %s: step() waits for each update. "
                "Use one Parameter for both.",
                type(model).__name__,
                type(stepper.optimizer).__name__,
            )

    def _hook_root(self, root: Module, stepper: AsyncStepper) -> None:
        if root not in self._roots and not isinstance(root, torch.jit.ScriptModule):
            self._roots.add(root)
            hook = _Hook(stepper, _before_forward)
            self._handles.append(root.register_forward_pre_hook(hook, prepend=True))

    def _watch_compiled(self, stepper: AsyncStepper) -> None:
        """Compiled code checks the class of its parameters: its forward waits for all first."""
        for model in [model for model, is_ours in self._models.items() if is_ours]:
            for module in model.modules():
                if _is_compiled(module):
                    stepper.wait_at = max(stepper.wait_at, WaitAt.FORWARD)
                    self._hook_root(module, stepper)
                calls = _compiled_calls(module)
                if calls and not any(call in self._handles for call in calls):
                    stepper.wait_at = max(stepper.wait_at, WaitAt.FORWARD)
                    self._handles.append(_CompiledCall(stepper, module))


class _Hook:
    """A hook on a module: calls ``run`` before the module is used. It refers to the stepper weakly,
    and is left out of compiled code."""

    def __init__(self, stepper: AsyncStepper, run: Callable[[AsyncStepper, Any], object]) -> None:
        self._stepper, self._streams, self._run = weakref.ref(stepper), stepper.streams, run

    def __reduce__(self) -> Any:
        # The module is copied or pickled, its layers after its hooks.
        if (stepper := self._stepper()) is not None:
            stepper.synchronize()
        return inert()

    def __call__(self, module: Module, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return  # traced to nothing, a hook does not break the graph of a compiled model
        if (stepper := self._stepper()) is None:  # dropped, perhaps with an update on its way
            self._streams.follow_last(on_host=True)
            return
        with outside_transforms():
            self._run(stepper, module)


def _before_forward(stepper: AsyncStepper, module: Module) -> None:
    """Before the forward of a whole model, or of a compiled module in it."""
    # A replay has the window's own parameters; a backward computes a forward anew.
    if not is_replaying() and not is_in_backward():
        if not (torch.is_grad_enabled() and module.training):
            stepper.synchronize()  # an evaluation sees the newest parameters
            return
        stepper.begin_forward()
    # FSDP2 waits at its gathers, unless the hooks there are traced.
    waits_later = is_fsdp2(module) and module._compiled_call_impl is None
    if stepper.wait_at >= WaitAt.FORWARD and not waits_later:
        stepper.finish_model()


def _before_gather(stepper: AsyncStepper, module: Any) -> None:
    """Before FSDP2 gathers a group's parameters: wait for their updates."""
    # FSDP2 does not say in public what it gathers, and what ahead of time.
    state = module._get_fsdp_state()
    together = getattr(state, "_modules", None)  # fully_shard([a, b]) gathers both at a
    if together is None or getattr(state, "_states_to_forward_prefetch", True):
        stepper.finish_model()
    else:
        stepper.finish_parameters(p for each in together for p in _own_parameters(each))
    stepper.streams.wait_on_host(stepper.streams.followed)  # it gathers on streams of its own


class _CompiledCall:
    """Replaces the call of a module compiled in place: waits, then makes the call that was there,
    perhaps another stepper's."""

    def __init__(self, stepper: AsyncStepper, module: Module) -> None:
        self._wait, self._module = _Hook(stepper, _before_forward), weakref.ref(module)
        self._compiled_call_impl: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (module := self._module()) is not None:
            self._wait(module)
        return self._compiled_call_impl(*args, **kwargs)

    def remove(self) -> None:
        module = self._module()
        for at in [module, *_compiled_calls(module)]:
            if getattr(at, "_compiled_call_impl", None) is self:
                at._compiled_call_impl = self._compiled_call_impl


def _compiled_calls(module: Any) -> list[Any]:
    """What a call of ``module`` goes through, if it was compiled in place; else []."""
    inner = getattr(module, "_compiled_call_impl", None)
    return [] if inner is None else [inner, *_compiled_calls(inner)]


def _is_compiled(module: Module) -> bool:
    """Whether the call of this module runs hooks, and then compiled code."""
    own = module.__dict__.get("forward")
    is_wrapper = isinstance(module, torch._dynamo.OptimizedModule)
    return is_wrapper or hasattr(own, "_torchdynamo_orig_callable")


def _own_parameters(module: Module) -> Iterator[Tensor]:
    """The parameters that FSDP2 gathers together with this module."""
    yield from Module.parameters(module, recurse=False)
    for child in module.children():
        if not is_fsdp2(child):
            yield from _own_parameters(child)


def _roots(model: Module) -> list[Module]:
    """The model and what DDP and the like wrap; not what is compiled, whose hooks are traced."""
    found = [model]
    while isinstance(inner := getattr(found[-1], "module", None), Module) and inner not in found:
        found.append(inner)
    return found


def _export(pair: ParameterPair, value: Any) -> Any:
    """``value`` as torch has it: the same memory, in a storage that ends with the tensor, since
    ``torch.save`` writes whole storages; a shard of a sharded parameter is a DTensor."""
    p: Any = pair.param
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        if value.device.type == "mps":  # which older releases of torch do not export
            value = value.clone()
        else:
            value = dlpack.from_dlpack(dlpack.to_dlpack(value.detach()))  # type: ignore[attr-defined]
    is_shard = isinstance(value, Tensor) and not hasattr(value, "to_local")
    if not (hasattr(p, "to_local") and is_shard and value.shape == pair.target.shape):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
