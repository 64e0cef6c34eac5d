"""State dicts of an optimizer that is stepped through a replica: torch's own, with masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import dlpack

from .masters import MASTER, ParameterPair, is_ours, keys_of, without_master


def give_state_back(optimizer: Optimizer, pairs: Iterable[ParameterPair]) -> None:
    """Move state of masters to the parameters' device and dtype, make DTensors of shards."""
    for pair in pairs:
        entry: dict[str, Any] = optimizer.state.get(pair.param) or {}
        for key, value in entry.items() if is_ours(pair) or _is_shard(pair) else ():
            if isinstance(value, Tensor) and key != "step" and value.is_floating_point():
                value = value.to(pair.target)
            entry[key] = _export(pair, value)


def with_masters(state_dict: dict[str, Any], pairs: Iterable[ParameterPair]) -> dict[str, Any]:
    """What torch has saved, as a plain optimizer's, with masters."""
    state: dict[Any, Any] = dict(state_dict["state"])
    for index, pair in zip(keys_of(state_dict), pairs, strict=False):
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
