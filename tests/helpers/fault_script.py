"""Processes that a signal, or a fault of the other rank, reaches within an update.

Not a test: ``test_processes.py`` starts it. Each case is one fork, or two gloo ranks, ended by
Python's own exit, so that the imports are paid for once. It leaves ``<case><rank>.txt``, what was
printed, and ``ended.json``: exit statuses, and the seconds from the fault to the end of rank 0.
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
from children import RANKS, become_rank, fork, free_port, many
from fault_run import MODES, Run
from support import mlp
from torch import nn

from accel_scaler import ScalerConfig, attach
from accel_scaler.async_optimizer.replica import Replica

LIMIT_S = 90
WINDOW = 4
"""In whose update it happens; on rank 1, where there are two."""
SLOW_S = 0.3
"""How long the update that is interrupted still takes on the optimizer thread."""
TIMEOUT_S = 3
"""Of gloo, where a rank is stopped."""
SIGNALS = ("ctrl-c", "ctrl-c saved", "sigterm saved")
FAULTS = ("killed", "stopped", "raises")
# An exit of Python with torch takes a second; FAULT_MOMENTS above 1 has all modes.
MANY = many(1) > 1
SIGNALLED = list(MODES) if MANY else ["sync", "overlap"]
RANKED = ["overlap", "delayed offload"] if MANY else ["overlap"]
CASES = {f"{fault}, {mode}": 1 for fault in SIGNALS for mode in SIGNALLED}
CASES |= {f"{fault}, {mode}": RANKS for fault in FAULTS for mode in RANKED}


def exit_on_signal(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def meet_signal(case: str, folder: Path) -> None:
    """The process meets the signal in window ``WINDOW``, within its update."""
    ending, mode = case.split(", ")
    signal.signal(signal.SIGTERM, exit_on_signal)
    run = Run(mode, telemetry=str(folder / f"{case}.jsonl"))
    # Windows 2, 6 and 7 overflow, so the fourth update is that of window 4.
    updates = itertools.count(1)

    def send() -> None:
        if next(updates) == WINDOW:
            (folder / f"{case} at").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGINT if ending.startswith("ctrl") else signal.SIGTERM)
            time.sleep(SLOW_S)

    step, step_part = torch.optim.SGD.step, Replica.step_part

    def inline(self: Any, closure: Any = None) -> Any:
        send()
        return step(self, closure)

    def on_worker(self: Replica, *args: Any) -> None:
        send()
        step_part(self, *args)

    if mode == "sync":
        run.optimizer.optimizer.step = inline.__get__(run.optimizer.optimizer)
    else:
        Replica.step_part = on_worker  # type: ignore[method-assign]
    try:
        run.train()
    finally:
        if ending.endswith("saved"):
            run.accelerator.save_state(str(folder / f"{case} saved"))


def train_rank(case: str, rank: int, folder: Path) -> None:
    fault, mode = case.split(", ")
    timeout = timedelta(seconds=TIMEOUT_S if fault == "stopped" else LIMIT_S)
    group = InitProcessGroupKwargs(backend="gloo", timeout=timeout)
    plain = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[group])
    accelerator: Any = attach(
        plain, ScalerConfig(**MODES[mode], init_scale=1024.0, optimizer_threads=1)
    )
    layers = mlp()
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    step_part, steps = Replica.step_part, itertools.count()  # of one part each

    def disturbed(self: Replica, *args: Any) -> None:
        time.sleep(0.2 if fault == "killed" else 0.0)  # at work when the other rank is gone
        if next(steps) == WINDOW and fault == "raises" and rank == 1:
            raise ArithmeticError("the kernel of rank 1 failed")
        step_part(self, *args)

    Replica.step_part = disturbed  # type: ignore[method-assign]
    for window in range(2 * WINDOW):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * window + rank))
        accelerator.backward(nn.functional.mse_loss(model(x).float(), x[:, :1]))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if rank == 1 and window == WINDOW and fault in ("killed", "stopped"):
            (folder / f"{case} at").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        optimizer.zero_grad()
        print("window", window, flush=True)
    accelerator.end_training()


def main(folder: Path) -> tuple[str, int] | None:
    """In a child its case and rank; None in the parent, once all are over."""
    warm = Run("sync").train(1)  # what is imported on first use, too
    warm.accelerator.save_state(str(folder / "warm"))
    warm.close()
    found: dict[str, Any] = {}
    for case, ranks in CASES.items():
        port, pids = free_port(), []
        for rank in range(ranks):
            pids.append(fork(folder / f"{case}{rank}.txt", LIMIT_S))
            if not pids[-1]:
                if ranks > 1:
                    become_rank(rank, port)
                return case, rank
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])]
        at, ended = folder / f"{case} at", time.monotonic()
        if case.startswith("stopped"):
            os.kill(pids[1], signal.SIGKILL)
        statuses += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[1:]]
        after = ended - float(at.read_text()) if at.exists() else None
        found[case] = {"statuses": statuses, "after_s": after}
    (folder / "ended.json").write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    mine = main(where)
    if mine is not None and CASES[mine[0]] == 1:
        meet_signal(mine[0], where)
    elif mine is not None:
        train_rank(*mine, where)
