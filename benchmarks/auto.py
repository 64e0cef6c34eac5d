"""What choosing costs: ``step_mode="auto"`` beside ``sync`` and ``overlap``, over whole runs.

    python benchmarks/auto.py             # hours on two cores, and 15 GB of memory
    python benchmarks/auto.py --windows 60 --case "2000 x 1000" --work "runs Python"

The cases are those of ``overlap.py``: two lists of parameters, fused AdamW with clipping; between
two steps the training thread waits for a device (it sleeps), runs small eager operations, or runs
Python, half as long again as an update takes; with ``both cores taken`` another process computes on
each core meanwhile. Then each parameter is used, as by a forward. Each mode trains the same number
of windows in processes of its own, since what one frees decides where the next one's memory lies.
They take turns: a few windows of each, then the next, so that a noisy machine is noisy for all.

The rows: seconds of the whole run of each mode, gradients filled in apart, means over its
processes; ``auto`` over the better of the other two (the aim is at most 1.02 over 500 windows); the
fastest and the slowest process in ``sync`` over their mean (what a ratio of 1 may come to); of each
``auto``, how many windows ran in ``overlap`` and after which one it had decided.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from boundary import CASES
from overlap import Bench, Work, operations, python, repeated, rounds_in

from accel_scaler import detach
from accel_scaler.async_optimizer import async_stepper
from accel_scaler.optimizer_step import stepper_of

Shapes = list[tuple[int, ...]]
MODES = ("sync", "overlap", "auto")
SLICE = 4
"""Windows of one mode, before another one's turn: as many as ``auto`` tries one mode for."""
BUSY = "both cores taken"
WORK: dict[str, Work | None] = {
    "waits for a device": None,
    "small eager operations": operations,
    "runs Python": python,
    BUSY: operations,
}


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

    def __init__(self, shapes: Shapes, mode: str) -> None:
        torch.manual_seed(0)
        self.bench = Bench(shapes, mode, "auto")
        self.clock = Clock()
        self.seconds: list[float] = []
        self.beside = 0
        self.decided: int | None = None

    def window(self, work: Callable[[], None]) -> None:
        """Work beside the update before, a use of each parameter, then a boundary."""
        bench, clock = self.bench, self.clock
        stepper: Any = stepper_of(bench.optimizer)
        async_stepper.clock = clock
        clock.go_on()
        start = clock()
        bench.model()
        work()
        for p in bench.params:  # as a forward does, which waits for the update
            p.detach()
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
            if choice.means is not None and self.decided is None:
                self.decided = len(self.seconds)


def update_seconds(shapes: Shapes) -> float:
    """Of a step in ``sync``, after the first ones."""
    run = Run(shapes, "sync")
    for _ in range(8):
        run.window(lambda: None)
    detach(run.bench.accelerator)
    return statistics.median(run.seconds[3:])


def serve(pipe: Connection, shapes: Shapes, mode: str, name: str, busy: float, rounds: int) -> None:
    """In a process of its own: run as many windows as is asked for, until it is 0."""
    # As in training, where autograd and loaders have threads: malloc is faster where there is one.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    run, unit = Run(shapes, mode), WORK[name]
    work = partial(time.sleep, busy) if unit is None else repeated(unit, rounds)
    while count := pipe.recv():
        for _ in range(count):
            run.window(work)
        stepper: Any = stepper_of(run.bench.optimizer)
        stepper.wait()  # not beside the next one
        pipe.send((sum(run.seconds), run.beside, run.decided))


def row(shapes: Shapes, name: str, busy: float, windows: int, each: int) -> None:
    unit, modes = WORK[name], MODES * each
    rounds = 0 if unit is None else rounds_in(unit, busy)  # the same for all
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for mode in modes:
        pipe, there = context.Pipe()
        pipes.append(pipe)
        processes.append(
            context.Process(target=serve, args=(there, shapes, mode, name, busy, rounds))
        )
        processes[-1].start()
    found: list[tuple[float, int, int | None]] = []
    with cores_taken(name == BUSY):
        for done in range(0, windows, SLICE):
            found.clear()
            for pipe in pipes:
                pipe.send(min(SLICE, windows - done))
                found.append(pipe.recv())
    for pipe in pipes:
        pipe.send(0)
    for process in processes:
        process.join()
    seconds = {mode: [s for s, _, _ in found[i :: len(MODES)]] for i, mode in enumerate(MODES)}
    sync, overlap, auto = (statistics.fmean(seconds[mode]) for mode in MODES)
    chosen = [f"{beside}, {decided or '-'}" for _, beside, decided in found[2 :: len(MODES)]]
    spread = f"{min(seconds['sync']) / sync:.2f} to {max(seconds['sync']) / sync:.2f}"
    print(
        f"{name:<24}{sync:>9.2f}{overlap:>11.2f}{auto:>9.2f}{auto / min(sync, overlap):>15.3f}"
        f"{spread:>15}  {'; '.join(chosen)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=500, help="of each run (default: 500)")
    parser.add_argument("--processes", type=int, default=3, help="for each mode (default: 3)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--work", choices=WORK, help="only this kind of work")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{args.windows} windows of each mode")
    for case in [args.case] if args.case else CASES:
        busy = 1.5 * update_seconds(CASES[case])
        print(f"\n{case}: {busy * 1e3:.1f} ms of work between two steps")
        print(f"{'the training thread':<24}{'sync s':>9}{'overlap s':>11}{'auto s':>9}", end="")
        print(f"{'auto / better':>15}{'sync':>15}  in overlap, decided at")
        for name in [args.work] if args.work else WORK:
            row(CASES[case], name, busy, args.windows, args.processes)


if __name__ == "__main__":
    main()
