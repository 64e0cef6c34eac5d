"""Two ranks under DDP that write telemetry: one file for both, or one for each.

Not a test: ``test_telemetry_ranks.py`` launches it and reads the files and ``rank<n>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from support import mlp, weights
from torch import nn

from accel_scaler import ScalerConfig, attach, detach

RANKS = 2
WINDOWS = 5
OVERFLOW = 2
"""The window that overflows, on rank 1 only."""
MODES = ("sync", "overlap", "delayed")


def train(telemetry: Path | None, mode: Any, clip: bool) -> dict[str, Any]:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    config = ScalerConfig(
        init_scale=1024.0,
        step_mode=mode,
        optimizer_threads=1,
        telemetry=None if telemetry is None else str(telemetry),
        find_overflow=clip,
        underflow_interval=1,
    )
    attach(accelerator, config)
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rank, norms = accelerator.process_index, []
    for window in range(WINDOWS):
        generator = torch.Generator().manual_seed(10 * window + rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)
        loss = nn.functional.mse_loss(model(x).float(), y)
        if (window, rank) == (OVERFLOW, 1):
            loss = loss * float("inf")
        accelerator.backward(loss)
        if clip:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    scale = accelerator.scaler.get_scale()
    assert accelerator.num_processes == RANKS, "launched as lone processes, not as two ranks"
    detach(accelerator)
    accelerator.wait_for_everyone()
    return {"weights": weights(plain), "norms": norms, "scale": scale}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for mode in MODES:
        results[f"{mode} off"] = train(None, mode, True)
        results[f"{mode} one"] = train(folder / f"{mode}.jsonl", mode, True)
        results[f"{mode} each"] = train(folder / f"{mode}_{{rank}}.jsonl", mode, False)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    torch.save(results, folder / f"rank{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
