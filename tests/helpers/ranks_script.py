"""Two gloo ranks, one of which is killed, stopped, slow, overflows alone or has a bad optimizer.

Not a test: ``test_ranks.py`` starts it. For each case it forks two ranks, each ended by Python's
own exit, and leaves their exit statuses and the seconds that rank 0 took to know in
``statuses.json``, their output in ``<case><rank>.txt``, what they computed in ``<case><rank>.pt``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from children import become_rank, fork, free_port, many
from fault_run import MODES, Run
from support import mlp, weights
from torch import nn

from accel_scaler import ScalerConfig, attach
from accel_scaler.async_optimizer.replica import Replica

LIMIT_S = 90
WINDOWS = 8
WINDOW = 4
"""In which it happens, on rank 1."""
TIMES_SLOWER = 20
TIMEOUT_S = 3
"""Of gloo, where a rank is stopped."""

TRIED = ["overlap", "delayed offload"] if many(1) > 1 else ["overlap"]
"""Two processes of torch each: CI has those of one mode (``tests/system/distributed`` has all)."""
CASES = [
    f"{fault}, {mode}"
    for mode in TRIED
    for fault in ("nothing", "killed", "stopped", "slow", "overflow", "raises")
]


def train(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    fault, mode = case.split(", ")
    timeout = timedelta(seconds=TIMEOUT_S if fault == "stopped" else LIMIT_S)
    plain = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timeout)],
    )
    assert plain.num_processes == 2
    config: dict[str, Any] = {**MODES[mode], "init_scale": 1024.0, "optimizer_threads": 1}
    accelerator: Any = attach(plain, ScalerConfig(**config))
    rank, layers = accelerator.process_index, mlp()
    model, optimizer = accelerator.prepare(
        layers, torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    )
    skipped, took = [], []
    step_part, steps = Replica.step_part, itertools.count()  # of one part each

    def disturbed(self: Replica, *args: Any) -> None:
        """On the optimizer thread, at work when the other rank is gone."""
        time.sleep(0.2 if fault == "killed" else 0.0)
        if next(steps) == WINDOW and fault == "raises" and rank == 1:
            raise ArithmeticError("the kernel of rank 1 failed")
        step_part(self, *args)

    patched: Any = Replica
    patched.step_part = disturbed
    for window in range(WINDOWS):
        start = time.monotonic()
        draw = torch.Generator().manual_seed(10 * window + rank)
        x, y = torch.randn(4, 8, generator=draw), torch.randn(4, 1, generator=draw)
        loss = nn.functional.mse_loss(model(x).float(), y)
        if rank == 1 and fault == "overflow" and window == WINDOW:
            loss = loss * float("inf")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if rank == 1 and window == WINDOW and fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        took.append(time.monotonic() - start)
        if rank == 1 and fault == "slow":
            time.sleep(TIMES_SLOWER * min(took))
        print("window", window, flush=True)
    optimizer.synchronize()
    result = {"weights": weights(layers), "skipped": skipped, "took": took}
    result["scale"] = accelerator.scaler.get_scale()
    torch.save(result, folder / f"{case}{rank}.pt")
    accelerator.end_training()


def main(folder: Path) -> str | None:
    """In a rank: its case. None in the parent, once all are over."""
    Run("sync").train(1).close()  # what is imported on first use, too
    ends: dict[str, Any] = {}
    for case in CASES:
        port, pids = free_port(), []
        for rank in range(2):
            pids.append(fork(folder / f"{case}{rank}.txt", LIMIT_S))
            if not pids[-1]:
                become_rank(rank, port)
                return case
        statuses: dict[int, int] = {}
        at: dict[int, float] = {}
        stopped = 0.0
        while len(statuses) < 2:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            rank = pids.index(pid)
            if os.WIFSTOPPED(status):
                stopped = time.monotonic()
                continue
            statuses[rank], at[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
            if stopped and rank == 0:
                os.kill(pids[1], signal.SIGKILL)
        knew = at[0] - (stopped or at[1])
        ends[case] = {"statuses": [statuses[0], statuses[1]], "knew_after_s": knew}
    (folder / "statuses.json").write_text(json.dumps(ends))
    return None


if __name__ == "__main__":
    case = main(Path(sys.argv[1]))
    if case is not None:
        train(case, Path(sys.argv[1]))
