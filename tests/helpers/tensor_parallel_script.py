"""Two ranks share out one model (tensor and sequence parallelism): beside one process, alone.

Not a test: ``test_tensor_parallel.py`` launches it and reads ``<folder>/rank<n>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach

STEPS = 6
OVERFLOW = 2
"""The window in which one element of rank 1's shard becomes inf."""
SCALE = 1024.0
WAYS = [
    ("sync", "none"),
    ("sync", "cpu"),
    ("overlap", "none"),
    ("overlap", "cpu"),
    ("delayed", "none"),
    ("delayed", "cpu"),
]


class Net(nn.Module):
    """``norm`` is replicated, and under sequence parallelism its gradient a partial sum."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(5)
        norm, out = torch.rand(8, generator=seeded) + 0.5, torch.randn(8, 4, generator=seeded)
        self.mesh = mesh
        if mesh is not None:
            norm = distribute_tensor(norm, mesh, [Replicate()])
            out = distribute_tensor(out, mesh, [Shard(1)])
        self.norm, self.out = nn.Parameter(norm), nn.Parameter(out)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return ((x * self.norm) @ self.out).square().mean()
        rows: Any = distribute_tensor(x, self.mesh, [Shard(0)])
        hidden = (rows * self.norm).redistribute(self.mesh, [Replicate()])
        loss: Any = (hidden @ self.out).square().mean()
        whole: Tensor = loss.full_tensor()
        return whole


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def weights(model: nn.Module) -> Tensor:
    params: list[Any] = [p.detach() for p in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return torch.cat([p.flatten() for p in whole]).clone()


def alone(clip: bool) -> dict[str, Any]:
    """One process, plain torch."""
    model = Net(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    norms = []
    for step in range(STEPS):
        scaler.scale(model(batch(step))).backward()
        if step == OVERFLOW:
            model.out.grad[0, -1] = float("inf")  # type: ignore[index]
        if clip:
            scaler.unscale_(optimizer)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"weights": weights(model), "scale": scaler.get_scale(), "norms": norms}


def shared_out(mesh: DeviceMesh, mode: str, offload: str, clip: bool, attached: bool) -> Any:
    model: Any = Net(mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    norms, partial, settings = [], [], {"delay_warmup_steps": 99, "optimizer_threads": 1}
    accelerator: Any = None
    optimizer: Any
    if attached:
        accelerator = attach(
            Accelerator(cpu=True, mixed_precision="fp16"),
            ScalerConfig(init_scale=SCALE, step_mode=mode, offload=offload, **settings),  # type: ignore[arg-type]
        )
        accelerator.native_amp = False
        optimizer, scaler = accelerator.prepare(inner), accelerator.scaler
    else:
        scaler = GradScaler("cpu", init_scale=SCALE)
        optimizer = AsyncOptimizer(
            inner,
            model,
            scaler=scaler,
            mode=mode,
            offload=offload,
            **settings,  # type: ignore[arg-type]
        )
    for step in range(STEPS):
        scaler.scale(model(batch(step))).backward()
        partial.append(any(placement.is_partial() for placement in model.norm.grad.placements))
        if step == OVERFLOW and dist.get_rank() == 1:
            model.out.grad.to_local()[0, -1] = float("inf")
        if clip and attached:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        elif clip:
            norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    local = torch.cat([p.to_local().detach().flatten().clone() for p in model.parameters()][:1])
    result = {"weights": weights(model), "scale": scaler.get_scale(), "norms": norms}
    if attached:
        detach(accelerator)
    else:
        optimizer.close()
    return result | {"replicated": local, "partial": partial}


def hand_sharded(said: bool) -> dict[str, Any]:
    """Each rank holds parameters of its own, plain tensors: only the user knows."""
    p = nn.Parameter(torch.ones(3))
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = torch.optim.SGD([p], lr=0.125)
    with AsyncOptimizer(inner, scaler=scaler, mode="sync", sharded=said) as optimizer:
        scaler.scale((p * (float("inf") if dist.get_rank() == 1 else 1.0)).sum()).backward()
        optimizer.step()
        return {"skipped": optimizer.step_was_skipped, "scale": scaler.get_scale()}


def beside_a_plain_one(mesh: DeviceMesh) -> dict[str, Any]:
    """A plain parameter overflows on one rank; that others are DTensors tells that it may."""
    model, plain = Net(mesh), nn.Parameter(torch.ones(3))
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = torch.optim.SGD([*model.parameters(), plain], lr=0.125)
    with AsyncOptimizer(inner, model, scaler=scaler, mode="sync") as optimizer:
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        scaler.scale(model(batch(0)) + (plain * factor).sum()).backward()
        optimizer.step()
        return {"skipped": optimizer.step_was_skipped, "scale": scaler.get_scale()}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results: dict[str, Any] = {}
    for clip in (False, True):
        results[f"alone {clip}"] = alone(clip)
        for mode, offload in WAYS:
            for attached in (False, True):
                name = f"{mode} {offload} {clip} {attached}"
                results[name] = shared_out(mesh, mode, offload, clip, attached)
    results["said"], results["not said"] = hand_sharded(True), hand_sharded(False)
    results["beside"] = beside_a_plain_one(mesh)
    torch.save(results, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
