"""State dicts of an optimizer that is stepped through a replica: torch's own, with masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import dlpack

from ..errors import UnsupportedError
from .masters import MASTER, ParameterPair, is_ours, keys_of, without_master

if TYPE_CHECKING:
    from .replica_stepper import ReplicaStepper


class StateDictHooks:
    """torch's hooks around ``state_dict`` and ``load_state_dict`` of one stepper's optimizer."""

    def __init__(self, stepper: ReplicaStepper) -> None:
        self._stepper = stepper
        self._handles: list[Any] = []
        self._loading: Any = None
        """The state dict that is being loaded."""
        optimizer, add = stepper.optimizer, self._handles.append
        try:
            add(optimizer.register_state_dict_pre_hook(self._before_saving))
            add(optimizer.register_state_dict_post_hook(self._after_saving))
            self._loads = optimizer.register_load_state_dict_pre_hook(self._before_loading)
            add(self._loads)
            # Before the user's, which see the state.
            after = self._after_loading
            add(optimizer.register_load_state_dict_post_hook(after, prepend=True))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def give_state_back(self) -> None:
        """Move state of masters to the parameters' device and dtype, make DTensors of shards."""
        optimizer = self._stepper.optimizer
        for pair in self._stepper.replica.pairs:
            entry: dict[str, Any] = optimizer.state.get(pair.param) or {}
            for key, value in entry.items() if is_ours(pair) or _is_shard(pair) else ():
                if isinstance(value, Tensor) and key != "step" and value.is_floating_point():
                    value = value.to(pair.target)
                entry[key] = _export(pair, value)

    def _before_saving(self, optimizer: Optimizer) -> None:
        self._stepper.synchronize()
        self._stepper.refresh()  # a model that was loaded after its masters
        self._stepper.take_edits()
        self._stepper.replica.rest()

    def _after_saving(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state: dict[Any, Any] = dict(state_dict["state"])
        for index, pair in zip(keys_of(state_dict), self._stepper.replica.pairs, strict=False):
            entry = state.get(index)
            # Else it is the optimizer's own, as in torch, and an edit of it counts.
            is_placed = is_ours(pair) or _is_shard(pair)
            # A plain optimizer may have loaded a master.
            if isinstance(entry, dict) and (is_placed or MASTER in entry):
                own = without_master(entry)
                entry = {key: _export(pair, value) for key, value in own.items()}
            # Torch's optimizers want all of their state in an entry that is not empty.
            master = pair.stepped.data
            if pair.is_master and (entry or not torch.equal(master, pair.target.to(master))):
                entry = {**(entry or {}), MASTER: _export(pair, master)}
            if entry is not None:
                state[index] = entry
        return {**state_dict, "state": state}

    def _before_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._stepper.begin_loading(state_dict)
        self._loading = state_dict
        keyed = zip(keys_of(state_dict), self._stepper.replica.pairs, strict=False)
        # torch would cast to the parameter's dtype and device, which is not where it lives here.
        ours = {key for key, pair in keyed if is_ours(pair)}
        hooks = optimizer._optimizer_load_state_dict_pre_hooks
        if ours and next(reversed(hooks)) != self._loads.id:
            raise UnsupportedError(
                "load_state_dict: a pre-hook was registered after prepare() or AsyncOptimizer(), "
                "and would not see the state, which goes into float32 copies (masters). Register "
                "it before, or change the state dict before it is loaded."
            )
        entries = state_dict["state"].items()
        rest = {key: without_master(entry) for key, entry in entries if key not in ours}
        return {**state_dict, "state": rest}

    def _after_loading(self, optimizer: Optimizer) -> None:
        loaded, self._loading = self._loading, None
        if loaded is not None:
            self._stepper.load(loaded)


def _is_shard(pair: ParameterPair) -> bool:
    return hasattr(pair.param, "to_local")


def _export(pair: ParameterPair, value: Any) -> Any:
    """``value`` as torch has it: the same memory, in a storage that ends with the tensor, since
    ``torch.save`` writes whole storages; a shard of a sharded parameter is a DTensor."""
    p: Any = pair.param
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        if value.device.type == "mps":  # which older releases of torch do not export
            value = value.clone()
        else:
            value = dlpack.from_dlpack(dlpack.to_dlpack(value.detach()))  # type: ignore[attr-defined]
    is_plain = isinstance(value, Tensor) and not hasattr(value, "to_local")
    if not (_is_shard(pair) and is_plain and value.shape == pair.target.shape):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
