"""Two ranks under DDP: several runs, each rank's results in ``<folder>/rank<n>.pt``.

Not a test: ``test_ddp.py`` launches it and reads the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from support import mlp, stock, use_torchs_products, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_scaler import attach

RANKS = 2
ACCUMULATION = 2
WINDOWS = 8
OVERFLOW = 3
"""The window that overflows, on rank 1 only, in its first micro-batch."""
SCALER = {"init_scale": 1024.0, "growth_interval": 3}


def batch(window: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks see together; rank r takes the rows r, r + 2, ..."""
    seeded = torch.Generator().manual_seed(100 * window + index)
    return torch.randn(8, 8, generator=seeded), torch.randn(8, 1, generator=seeded)


def optimizer_of(kind: str, model: nn.Module) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused")


def train(
    accelerator: Any, kind: str, *, late: bool = False, clip: float | None = 0.5
) -> dict[str, Any]:
    """``WINDOWS`` windows on this rank's rows; ``late``: attach only after ``prepare``."""
    layers = mlp()
    model, optimizer = accelerator.prepare(layers, optimizer_of(kind, layers))
    # Accelerate steps a schedule once for each rank.
    pace = 10 * accelerator.num_processes
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / pace))
    if late:
        attach(accelerator)
    schedule = accelerator.prepare(schedule)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    result: dict[str, Any] = {"skipped": [], "scales": [], "norms": [], "synced": [], "rates": []}
    for window in range(WINDOWS):
        for index in range(ACCUMULATION):
            x, y = batch(window, index)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x[rank::ranks]), y[rank::ranks])
                if (window, index, rank) == (OVERFLOW, 0, ranks - 1):
                    loss = loss * float("inf")
                if isinstance(model, DistributedDataParallel):
                    result["synced"].append(model.require_backward_grad_sync)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    result["norms"].append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        result["skipped"].append(optimizer.step_was_skipped)
        result["scales"].append(accelerator.scaler.get_scale())
        result["rates"].append(schedule.get_last_lr()[0])
    if hasattr(accelerator, "scaler_history"):
        result["recorded"] = [record.skipped for record in accelerator.scaler_history.records]
    result["weights"] = weights(accelerator.unwrap_model(model))
    result["scaler"] = accelerator.scaler.state_dict()
    result["wrapped"] = isinstance(model, DistributedDataParallel)
    return result


def settings() -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": ACCUMULATION,
        "kwargs_handlers": [GradScalerKwargs(**SCALER)],
    }


def plain() -> Any:
    return Accelerator(cpu=True, mixed_precision="fp16", **settings())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    use_torchs_products()
    results = {}
    for kind in ("sgd", "adamw"):
        results[f"stock {kind}"] = train(stock(**settings()), kind)
        results[f"attached {kind}"] = train(attach(plain()), kind)
        results[f"late {kind}"] = train(plain(), kind, late=True)
        results[f"unclipped {kind}"] = train(attach(plain()), kind, clip=None)
        results[f"stock unclipped {kind}"] = train(stock(**settings()), kind, clip=None)
    results["attached fused"] = train(attach(plain()), "fused")
    accelerator = attach(plain())
    assert accelerator.num_processes == RANKS, "launched as lone processes, not as two ranks"
    torch.save(results, folder / f"rank{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
