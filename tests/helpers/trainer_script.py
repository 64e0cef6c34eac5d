"""Two ranks under DDP in a Trainer, stock and attached. Not a test: ``test_ddp.py`` launches it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import use_torchs_products, weights
from torch.nn.parallel import DistributedDataParallel
from trainer_support import CONFIG, as_stock, logs, make, train

from accel_scaler import attach


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    use_torchs_products()
    rank = int(os.environ["RANK"])
    # The first micro-batch of step 1, on rank 1 only.
    overflows = (4,) if rank == 1 else ()
    results = {}
    for name in ("stock", "attached"):
        trainer, recorder = make(
            folder / name, overflows, max_steps=4, ddp_backend="gloo", ddp_timeout=60
        )
        assert trainer.accelerator.num_processes == 2, "launched as lone processes"
        train(as_stock(trainer) if name == "stock" else attach(trainer, CONFIG))
        wrapped: Any = trainer.model_wrapped
        assert isinstance(wrapped, DistributedDataParallel)
        results[name] = {
            "weights": weights(trainer.model),
            "logs": logs(trainer),
            "skipped": recorder.skipped,
            "scales": recorder.scales,
            "scaler": type(trainer.accelerator.scaler).__module__,
        }
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
