"""A raw Accelerate loop of a few steps. Not a test: tests launch it with each shipped config file.

Prints one JSON line a rank. The ranks share one batch; the loss of the third step is infinite on
the last rank only. With ``CALL_ATTACH`` in the environment the script calls ``attach`` itself.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

STEPS, BAD, BATCH = 5, 2, 8


def train() -> dict[str, Any]:
    """Train a little and say what there was and what came out."""
    torch.manual_seed(3)
    accelerator = Accelerator()
    if "CALL_ATTACH" in os.environ:
        from accel_scaler import attach

        attach(accelerator)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.05))
    seen: list[str] = []
    layers[0].register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    skipped = []
    for step in range(STEPS):
        batch = torch.randn(BATCH, 8)[rank::ranks].to(accelerator.device)
        loss = model(batch).float().pow(2).mean()
        is_bad = step == BAD and rank == ranks - 1
        accelerator.backward(loss * (float("inf") if is_bad else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    scaler = accelerator.scaler
    state = accelerator.unwrap_model(model).state_dict()
    result = {
        "rank": rank,
        "ranks": ranks,
        "kind": accelerator.distributed_type.value,
        "device": accelerator.device.type,
        "precision": accelerator.mixed_precision,
        "computed_in": sorted(set(seen)),
        "accelerator": type(accelerator).__name__,
        "scale": scaler and scaler.get_scale(),
        "skipped": skipped,
        "weights": [value.tolist() for value in state.values()],
        "omp": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "threads": _optimizer_threads(accelerator),
        "settings": {k: v for k, v in os.environ.items() if k.startswith("ACCEL_SCALER_")},
    }
    accelerator.end_training()
    return result


def _optimizer_threads(accelerator: Any) -> int | None:
    attachment = getattr(accelerator, "_attachment", None)
    worker = None if attachment is None else attachment.worker
    return None if worker is None else int(worker.threads)


if __name__ == "__main__":
    print("FACTS " + json.dumps(train()), flush=True)
