"""What choosing costs: ``step_mode="auto"`` beside its two ways, over whole runs.

    python benchmarks/auto.py             # hours on two cores, and 6 GB of memory
    python benchmarks/auto.py --windows 60 --case "2000 x 1000" --work "runs Python"

The cases are those of ``overlap.py``: two lists of parameters, fused AdamW with clipping; after a
step the training thread waits for a device (it sleeps), runs small eager operations, or runs
Python, half as long again as an update takes; with ``both cores taken`` another process computes on
each core meanwhile. Then each parameter is used, as by a forward.

Two processes of one mode differ by up to 4 per cent here, since where memory lies differs. So one
process trains one model and optimizer in three ways, a few windows of each in turn: as ``auto``
does in ``sync``, in ``overlap``, and as it chooses; a machine that is noisy is so for all three.
Each way has a clock of its own, which stands still in the turns of the others.

The rows: seconds of all windows of each way, gradients filled in apart, means over the processes;
``auto`` over the better of the other two (the aim is at most 1.02 over 500 windows), the mean and
each process; how many windows of ``auto`` ran in ``overlap`` and after which one it had decided.
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
from collections import deque
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
from accel_scaler.optimizer_step.mode_choice import ModeChoice

Shapes = list[tuple[int, ...]]
SLICE = 4
"""Windows of one way, before another one's turn."""
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
    other ways have their turns."""

    def __init__(self) -> None:
        self.now, self._since = 0.0, time.perf_counter()

    def __call__(self) -> float:
        return self.now + time.perf_counter() - self._since

    def stop(self) -> None:
        self.now = self()

    def go_on(self) -> None:
        self._since = time.perf_counter()


class Always:
    """Instead of a ``ModeChoice``: one way throughout."""

    means = None

    def __init__(self, is_beside: bool) -> None:
        self.is_beside = is_beside

    def note(self, now: float, stepped: bool, agree: object = None) -> bool:
        return False


class Way:
    """How one of the three runs, and what it has taken."""

    def __init__(self, choice: Any) -> None:
        self.choice, self.clock = choice, Clock()
        self.clock.stop()
        self.windows = self.beside = 0
        self.decided: int | None = None


class Run:
    """One model and optimizer, trained in each way in turn."""

    def __init__(self, shapes: Shapes) -> None:
        torch.manual_seed(0)
        self.bench = Bench(shapes, "auto", "auto")
        self.stepper: Any = stepper_of(self.bench.optimizer)

    def windows(self, way: Way, count: int, work: Callable[[], None]) -> None:
        """Boundaries, each with work beside its update, then a use of each parameter."""
        bench, clock, choice = self.bench, way.clock, way.choice
        async_stepper.clock = clock
        self.stepper.choice, self.stepper.is_beside = choice, choice.is_beside
        for _ in range(count):
            for p, value in zip(bench.params, bench.template, strict=True):
                p.grad = value.clone()
            way.beside += choice.is_beside
            clock.go_on()
            bench.accelerator.scaler.scale(torch.ones(()))
            bench.accelerator.clip_grad_norm_(bench.params, 1.0)
            bench.optimizer.step()
            bench.model()
            work()
            for p in bench.params:  # as a forward does, which waits for the update
                p.detach()
            clock.stop()
            way.windows += 1
            if choice.means is not None and way.decided is None:
                way.decided = way.windows


def update_seconds(shapes: Shapes) -> float:
    """Of a boundary in ``sync``, after the first ones."""
    run, seconds = Run(shapes), []
    for _ in range(8):
        way = Way(Always(False))
        run.windows(way, 1, lambda: None)
        seconds.append(way.clock.now)
    detach(run.bench.accelerator)
    return statistics.median(seconds[3:])


def serve(pipe: Connection, shapes: Shapes, name: str, busy: float, windows: int) -> None:
    """In a process of its own: send seconds of each way, and what the one that chooses did."""
    # As in training, where autograd and loaders have threads: malloc is faster where there is one.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    unit, run = WORK[name], Run(shapes)
    work = partial(time.sleep, busy) if unit is None else repeated(unit, rounds_in(unit, busy))
    for is_beside in (False, True):  # the first steps make state
        run.windows(Way(Always(is_beside)), SLICE, work)
    ways = [Way(Always(False)), Way(Always(True)), Way(ModeChoice())]
    turns = deque(ways)
    with cores_taken(name == BUSY):
        for done in range(0, windows, SLICE):
            for way in turns:
                run.windows(way, min(SLICE, windows - done), work)
            turns.rotate()  # no way always comes after the same other one
    pipe.send(([way.clock.now for way in ways], ways[2].beside, ways[2].decided))


def row(shapes: Shapes, name: str, busy: float, windows: int, processes: int) -> None:
    context, found = multiprocessing.get_context("spawn"), []
    for _ in range(processes):
        pipe, there = context.Pipe()
        process = context.Process(target=serve, args=(there, shapes, name, busy, windows))
        process.start()
        there.close()
        found.append(pipe.recv())
        process.join()
    sync, overlap, auto = (statistics.fmean(s) for s in zip(*(s for s, *_ in found), strict=True))
    ratios = [auto / min(sync, overlap) for (sync, overlap, auto), *_ in found]
    chosen = "; ".join(f"{beside}, {decided or '-'}" for _, beside, decided in found)
    print(
        f"{name:<24}{sync:>9.2f}{overlap:>11.2f}{auto:>9.2f}{statistics.fmean(ratios):>15.3f}"
        f"  {' '.join(f'{r:.3f}' for r in ratios):<18}  {chosen}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=500, help="of each run (default: 500)")
    parser.add_argument("--processes", type=int, default=3, help="for each row (default: 3)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--work", choices=WORK, help="only this kind of work")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{args.windows} windows of each way")
    for case in [args.case] if args.case else CASES:
        busy = 1.5 * update_seconds(CASES[case])
        print(f"\n{case}: {busy * 1e3:.1f} ms of work between two steps")
        print(f"{'the training thread':<24}{'sync s':>9}{'overlap s':>11}{'auto s':>9}", end="")
        print(f"{'auto / better':>15}  {'each process':<18}  in overlap, decided at")
        for name in [args.work] if args.work else WORK:
            row(CASES[case], name, busy, args.windows, args.processes)


if __name__ == "__main__":
    main()
