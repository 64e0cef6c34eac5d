"""Two ranks of plain torch FSDP2 on a CPU mesh, with our GradScaler and with torch's.

Not a test: ``test_fsdp2.py`` launches it and reads ``<folder>/rank<n>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import GradScaler
from accel_scaler.optimizer_step.boundary import Boundary
from accel_scaler.scaling.collectives import agree_on_overflow

STEPS = 6
OVERFLOW = 2
"""The step in which one element of rank 1's shard becomes inf."""
CPU = torch.device("cpu")


def sharded() -> nn.Module:
    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def optimizer_of(kind: str, model: nn.Module) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused")


def full_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).clone()


def backward(model: nn.Module, scaler: Any, step: int) -> None:
    """One scaled backward on this rank's rows; then the overflow, after the reduce-scatter."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeded = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 8, generator=seeded), torch.randn(8, 1, generator=seeded)
    loss = nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])
    scaler.scale(loss).backward()
    if step == OVERFLOW and rank == 1:
        grad: Any = next(model.parameters()).grad
        grad.to_local().view(-1)[0] = float("inf")


def plain_loop(scaler: Any, kind: str) -> dict[str, Any]:
    """torch's loop: scale, step, update."""
    model = sharded()
    optimizer = optimizer_of(kind, model)
    result: dict[str, Any] = {"moved": [], "scales": []}
    for step in range(STEPS):
        backward(model, scaler, step)
        before = full_weights(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result["moved"].append(not torch.equal(full_weights(model), before))
        result["scales"].append(scaler.get_scale())
    return result | {"weights": full_weights(model), "scaler": scaler.state_dict()}


def boundary_loop(kind: str) -> dict[str, Any]:
    """The Accelerate layer's boundary, told that ranks hold different gradients."""
    model = sharded()
    optimizer = optimizer_of(kind, model)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    boundary = Boundary(scaler, CPU)
    boundary.add(optimizer)
    result: dict[str, Any] = {"moved": [], "scales": []}
    for step in range(STEPS):
        backward(model, scaler, step)
        result["moved"].append(boundary.step(optimizer))
        optimizer.zero_grad()
        result["scales"].append(scaler.get_scale())
    return result | {"weights": full_weights(model), "scaler": scaler.state_dict()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2, "launched as a lone process"
    rank = dist.get_rank()
    results: dict[str, Any] = {
        "agreed": agree_on_overflow(rank == 1, CPU, True),
        "not sharded": agree_on_overflow(rank == 1, CPU, False),
        "none": agree_on_overflow(False, CPU, True),
    }
    make = {"init_scale": 1024.0, "growth_interval": 2}
    for kind in ("sgd", "adamw", "fused"):
        if kind != "fused":  # torch's own CPU fused step is not the reference
            results[f"torch {kind}"] = plain_loop(torch.amp.GradScaler("cpu", **make), kind)
        results[f"ours {kind}"] = plain_loop(GradScaler("cpu", **make), kind)
        results[f"boundary {kind}"] = boundary_loop(kind)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
