"""Shards that are read between a step and the next forward: each way to read sees torch's values.

The worker updates nothing that nobody waits for (``lazy``), so a read that does not wait is stale.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from async_support import lazy
from children import on_two_ranks
from support import same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from two_ranks import batch, whole
from versions import before_torch

from accel_scaler import AsyncOptimizer

pytestmark = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")

STEPS = 3


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def sharded() -> nn.Module:
    model: Any = net()
    fully_shard(model[0])
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def parallel() -> nn.Module:
    """The first layer in columns; the second is on each rank."""
    model, mesh = net(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model[0], mesh, ColwiseParallel(output_layouts=Replicate()))
    return model


@torch.jit.script
def twice(x: Tensor) -> Tensor:
    return x * 2


def average(p: Any) -> Tensor:
    """As people keep an exponential moving average of shards."""
    kept = torch.zeros_like(p)
    torch._foreach_lerp_([kept], [p.detach()], 0.5)
    return whole(kept)


def edited(p: Any) -> Tensor:
    with torch.no_grad():
        p.mul_(0.5)
    return whole(p)


def set_local(p: Any) -> Tensor:
    """Edits the shard where torch keeps it."""
    p.to_local().data.add_(1.0)
    return whole(p)


def resharded(p: Any) -> Tensor:
    return whole(p.redistribute(p.device_mesh, [Replicate()]))


READS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": whole,
    "full_tensor, no gradient": lambda p: p.detach().full_tensor(),
    "to_local": lambda p: p.to_local().detach().clone(),
    "_local_tensor": lambda p: p._local_tensor.detach().clone(),
    "data": lambda p: whole(p.data),
    "norm": lambda p: whole(p.detach().norm()),
    "foreach": lambda p: whole(torch._foreach_norm([p.detach()])[0]),
    "average": average,
    "redistribute": resharded,
    "deepcopy": lambda p: whole(copy.deepcopy(p)),
    "copy": lambda p: whole(copy.copy(p)),
    "pickled": lambda p: whole(pickle.loads(pickle.dumps(p))),
    "tensor": lambda p: whole(torch.tensor(p)),
    "scripted": lambda p: whole(twice(p.detach())),
    "copy_": lambda p: whole(torch.empty_like(p).detach().copy_(p.detach())),
    "repr": str,
    "edited": edited,
    "set_local": set_local,
}
PARALLEL = {"full_tensor", "to_local", "average", "edited"}


def each(read: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: [read(p) for p in model.parameters() if hasattr(p, "to_local")]


def gathered(model: Any) -> list[Tensor]:
    """As FSDP2 gathers outside a forward."""
    model.unshard()
    model[0].unshard()
    found = [p.detach().clone() for p in model.parameters()]
    model.reshard()
    model[0].reshard()
    return found


def trained(make: Callable[[], nn.Module], mode: str | None, read: Callable[[Any], Any]) -> Any:
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer: Any = inner
    if mode is not None:
        settings: Any = {"mode": mode, "delay_warmup_steps": 0, "optimizer_threads": 1}
        optimizer = AsyncOptimizer(inner, model, **settings)
    found = []
    for step in range(STEPS):
        x, _ = batch(step, 0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(read(model))
    if mode is not None:
        optimizer.close()
    return found


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
@pytest.mark.parametrize("make", [sharded, parallel])
def test_a_read_of_shards_between_steps_is_torchs(
    make: Callable[[], nn.Module], mode: str, tmp_path: Path
) -> None:
    def body() -> None:
        for name, read in READS.items():
            if make is parallel and name not in PARALLEL:
                continue
            with lazy():
                mine = trained(make, mode, each(read))
            assert same(mine, trained(make, None, each(read))), name

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_unshard_between_steps_gathers_torchs(mode: str, tmp_path: Path) -> None:
    def body() -> None:
        with lazy():
            mine = trained(sharded, mode, gathered)
        assert same(mine, trained(sharded, None, gathered))

    on_two_ranks(body, tmp_path)
