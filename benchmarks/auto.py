"""What choosing costs: ``step_mode="auto"`` beside ``sync`` and ``overlap``, over whole runs.

    python benchmarks/auto.py             # about an hour on two cores, 6 GB of memory
    python benchmarks/auto.py --windows 60 --case "2000 x 1000" --work "runs Python"

The cases are those of ``overlap.py``: two lists of parameters, fused AdamW with clipping; between
two steps the training thread waits for a device (it sleeps), runs small eager operations, or runs
Python, half as long again as an update takes; with ``both cores taken`` another process computes on
each core meanwhile. Each of the three modes trains the same number of windows, in turn: a few of
each, then the next, so that a noisy machine is noisy for all, but every run goes on where it was.

The rows: seconds of the whole run of each mode, gradients filled in apart, ``auto`` over the
better of the other two (the aim is at most 1.02 over 500 windows), how many of its windows ran in
``overlap``, and after which window it had decided.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from boundary import CASES
from overlap import Bench, amount, operations, python

from accel_scaler import detach
from accel_scaler.async_optimizer import async_stepper
from accel_scaler.optimizer_step import stepper_of

MODES = ("sync", "overlap", "auto")
SLICE = 4
"""Windows of one mode, before another one's turn: as many as ``auto`` tries one mode for."""
BUSY = "both cores taken"
WORK = ("waits for a device", "small eager operations", "runs Python", BUSY)


@contextmanager
def cores_taken(are_taken: bool) -> Iterator[None]:
    """A process on each core that computes until the end of the block."""
    command = [sys.executable, "-c", "while True: sum(range(1000))"]
    count = (os.cpu_count() or 1) if are_taken else 0
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Clock:
    """What ``auto`` measures by here: it stands still while gradients are filled in, and while the
    other modes have their turns."""

    def __init__(self) -> None:
        self.now, self._since = 0.0, time.perf_counter()

    def __call__(self) -> float:
        return self.now + time.perf_counter() - self._since

    def stop(self) -> None:
        self.now = self()

    def go_on(self) -> None:
        self._since = time.perf_counter()


class Run:
    """One mode's run of windows."""

    def __init__(self, shapes: list[tuple[int, ...]], mode: str) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()
        torch.manual_seed(0)
        self.bench = Bench(shapes, mode, "auto")
        self.clock = Clock()
        self.seconds: list[float] = []
        self.beside = 0
        self.decided: int | None = None

    def window(self, work: Callable[[], None]) -> None:
        """Work beside the update before, the wait for that one, then a boundary."""
        bench, clock = self.bench, self.clock
        stepper: Any = stepper_of(bench.optimizer)
        async_stepper.clock = clock
        clock.go_on()
        start = clock()
        bench.model()
        work()
        stepper.wait()
        clock.stop()
        for p, value in zip(bench.params, bench.template, strict=True):
            p.grad = value.clone()
        clock.go_on()
        bench.accelerator.scaler.scale(torch.ones(()))
        bench.accelerator.clip_grad_norm_(bench.params, 1.0)
        bench.optimizer.step()
        clock.stop()
        self.seconds.append(clock.now - start)
        choice = getattr(stepper, "choice", None)
        if choice is not None:
            self.beside += stepper.timing.step_mode == "overlap"
            if choice.medians is not None and self.decided is None:
                self.decided = len(self.seconds)


def update_seconds(shapes: list[tuple[int, ...]]) -> float:
    """Of a step in ``sync``, after the first ones."""
    run = Run(shapes, "sync")
    for _ in range(8):
        run.window(lambda: None)
    detach(run.bench.accelerator)
    return statistics.median(run.seconds[3:])


def works(seconds: float) -> dict[str, Callable[[], None]]:
    eager = amount(operations, seconds)
    return {
        "waits for a device": lambda: time.sleep(seconds),
        "small eager operations": eager,
        "runs Python": amount(python, seconds),
        BUSY: eager,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=500, help="of each run (default: 500)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--work", choices=WORK, help="only this kind of work")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{args.windows} windows of each mode")
    for case in [args.case] if args.case else CASES:
        busy = 1.5 * update_seconds(CASES[case])
        print(f"\n{case}: {busy * 1e3:.1f} ms of work between two steps")
        print(f"{'the training thread':<24}{'sync s':>9}{'overlap s':>11}{'auto s':>9}", end="")
        print(f"{'auto / better':>15}{'in overlap':>12}{'decided at':>12}")
        for name, work in works(busy).items():
            if args.work not in (None, name):
                continue
            runs = {mode: Run(CASES[case], mode) for mode in MODES}
            for run in runs.values():  # half a gigabyte each
                run.bench.template = runs["sync"].bench.template
            with cores_taken(name == BUSY):
                while len(runs["auto"].seconds) < args.windows:
                    for run in runs.values():
                        for _ in range(min(SLICE, args.windows - len(run.seconds))):
                            run.window(work)
                        stepper_of(run.bench.optimizer).wait()  # not beside the next one
            total = {mode: sum(run.seconds) for mode, run in runs.items()}
            auto, better = runs["auto"], min(total["sync"], total["overlap"])
            print(
                f"{name:<24}{total['sync']:>9.2f}{total['overlap']:>11.2f}{total['auto']:>9.2f}"
                f"{total['auto'] / better:>15.3f}{auto.beside:>12}{auto.decided or '-':>12}",
                flush=True,
            )
            for run in runs.values():
                detach(run.bench.accelerator)


if __name__ == "__main__":
    main()
