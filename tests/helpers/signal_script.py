"""Runs that a signal reaches while the update is being made, each ended by Python's own exit.

Not a test: ``test_signals.py`` starts it and reads ``<folder>/<case>/`` and ``statuses.json``. Each
case is a fork, so that the imports are paid for once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from children import fork, many
from fault_run import MODES, Run

from accel_scaler.async_optimizer.replica import Replica

LIMIT_S = 60
WINDOW = 4
SLOW_S = 0.3
"""How long the update that is interrupted still takes on the optimizer thread."""
ENDINGS = ("ctrl-c", "ctrl-c, saved", "sigterm", "sigterm, saved")
# An exit of Python with torch takes a second; FAULT_MOMENTS above 1 has them all.
ENDED = list(MODES) if many(1) > 1 else ["sync", "overlap"]
CASES = [(ending, mode) for mode in ENDED for ending in ENDINGS]


def name_of(ending: str, mode: str) -> str:
    return f"{ending}, {mode}"


def raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run_case(ending: str, mode: str, folder: Path) -> None:
    """The process meets the signal in window ``WINDOW``, in the midst of its update."""
    number = signal.SIGINT if ending.startswith("ctrl-c") else signal.SIGTERM
    saved = ending.endswith("saved")
    if saved:
        signal.signal(signal.SIGTERM, raise_exit)
    run = Run(mode, telemetry=str(folder / "run.jsonl"))
    updates = 0

    def send() -> None:
        nonlocal updates
        updates += 1
        # Windows 2, 6 and 7 overflow: the fourth update is that of window 4.
        if updates == WINDOW:
            (folder / "sent").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), number)
            time.sleep(SLOW_S)

    step, step_part = torch.optim.SGD.step, Replica.step_part

    def inline(self: Any, closure: Any = None) -> Any:
        send()
        return step(self, closure)

    def on_worker(self: Replica, *args: Any) -> None:
        send()
        step_part(self, *args)

    patched: Any = Replica
    if mode == "sync":
        run.optimizer.optimizer.step = inline.__get__(run.optimizer.optimizer)
    else:
        patched.step_part = on_worker
    try:
        run.train()
    finally:
        if saved:
            run.accelerator.save_state(str(folder / "saved"))


def main(folder: Path) -> tuple[str, str] | None:
    """In a child: its case. In the parent None, once all have ended and been written down."""
    warm = Run("sync").train(1)  # what is imported on first use, too
    warm.accelerator.save_state(str(folder / "warm"))
    warm.close()
    ends: dict[str, tuple[int, float]] = {}
    for ending, mode in CASES:
        name = name_of(ending, mode)
        (folder / name).mkdir()
        pid = fork(folder / name / "output.txt", LIMIT_S)
        if pid == 0:
            return ending, mode
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sent = folder / name / "sent"
        after = time.monotonic() - float(sent.read_text()) if sent.exists() else float("nan")
        ends[name] = (status, after)
    (folder / "statuses.json").write_text(json.dumps(ends))
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    case = main(Path(sys.argv[1]))
    if case is not None:
        run_case(*case, Path(sys.argv[1]) / name_of(*case))
