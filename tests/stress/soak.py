"""Random histories for an hour, in one process: no failure, and nothing that grows.

    python tests/stress/soak.py --minutes 60 [--seed S] [--every 60]

The kinds of ``test_histories.py`` take turns. Exit status 1 after a failure, with the seed and the
operations, or where threads, file descriptors, our objects or memory grow. Ctrl-C ends it with the
verdict so far.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# This tree, whatever is installed.
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import history_operations
import history_scaler
import psutil
import torch
from histories import Found, Kind, run

HANG_S = 600.0
"""A turn takes a second; after this time every thread's stack is printed and the process ended."""

MOST_MIB = 4.0
"""What memory may rise by from the middle third of a run to the last; in the first, caches fill,
kernels run for the first time and malloc finds its arenas. An hour on one slow core is some 50,000
histories, so a leak of 250 bytes a history, far less than a tensor, is more."""


@dataclass(frozen=True)
class Sample:
    """One line."""

    seconds: float
    memory_mib: float
    threads: int
    fds: int
    objects: int


@dataclass
class Failure:
    """What went wrong, so that it can be run again."""

    seed: str
    what: str
    error: str


def memory(process: psutil.Process) -> int:
    """Bytes that are this process's own: pages of files come and go with the system's need."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return int(process.memory_full_info().uss)


def measure(start: float) -> Sample:
    """What the process holds, once garbage and the allocator's own reserve are given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    process = psutil.Process()
    ours = sum(str(type(o).__module__).startswith("accel_scaler") for o in gc.get_objects())
    return Sample(
        seconds=time.monotonic() - start,
        memory_mib=memory(process) / 2**20,
        threads=threading.active_count(),
        fds=process.num_fds(),
        objects=ours,
    )


KINDS: dict[str, tuple[Kind, int]] = {
    "training": (history_operations.KIND, 8),
    "scaler": (history_scaler.KIND, 12),
}
"""And how many of each in a turn."""


def turn(kind: str, number: int, seed: int, seen: Counter[str]) -> Failure | None:
    """Several of one kind, each with random numbers of its own."""
    play, times = KINDS[kind]
    for n in range(times):
        own = f"{seed}/{kind}/{number}/{n}"
        try:
            run(play, own, seen)
        except Found as error:
            text = "".join(traceback.format_exception(error.__cause__ or error))
            return Failure(own, str(error), text)
    return None


# The verdict.


def grown(first: Sample, samples: Sequence[Sample]) -> list[str]:
    """What has grown, a sentence each. ``first``: after one turn of each kind."""
    third = max(1, len(samples) // 3)
    middle, last = samples[-2 * third : -third] or [first], samples[-third:]
    found = []
    for name in ("threads", "fds", "objects"):
        least = min(getattr(s, name) for s in last)
        if least > getattr(first, name):
            found.append(f"{name}: {getattr(first, name)} at the start, {least} or more at the end")
    before, after = (statistics.median(s.memory_mib for s in part) for part in (middle, last))
    rise = after - before
    if len(samples) >= 6 and rise > MOST_MIB:
        found.append(f"memory: {rise:.1f} MiB; {MOST_MIB:g} is taken for noise")
    return found


def line(sample: Sample, seen: Counter[str]) -> str:
    restored = seen["go_back"] + seen["go_on_in_a_fresh_pair"]
    windows = seen["stepped"] + seen["skipped"]
    return (
        f"{sample.seconds / 60:6.1f} min  {seen['histories']:,} histories  "
        f"{seen['operations']:,} operations  {windows:,} windows  {seen['skipped']:,} skips"
        f"  {restored:,} restored  {sample.memory_mib:.1f} MiB  {sample.threads} threads  "
        f"{sample.fds} fds  {sample.objects} objects"
    )


def say(text: str) -> None:
    print(text, flush=True)


def soak(minutes: float, seed: int, every: float) -> int:
    """Run; returns the exit status."""
    seen: Counter[str] = Counter()
    failure, samples = None, list[Sample]()
    for kind in KINDS:  # imports, first kernels: what a process has for good
        failure = failure or turn(kind, -1, seed, seen)
    start = time.monotonic()
    first = measure(start)
    say(line(first, seen))
    due, end = every, 60 * minutes
    with contextlib.suppress(KeyboardInterrupt):
        for number, kind in enumerate(itertools.cycle(KINDS)):
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
            failure = failure or turn(kind, number, seed, seen)
            now = time.monotonic() - start
            if now >= min(due, end) or failure is not None:
                samples.append(measure(start))
                say(line(samples[-1], seen))
                due = now + every
            if now >= end or failure is not None:
                break
    faulthandler.cancel_dump_traceback_later()
    return verdict(first, samples or [first], failure, seed)


def verdict(first: Sample, samples: Sequence[Sample], failure: Failure | None, seed: int) -> int:
    """Say it; returns the exit status."""
    if failure is not None:
        say(f"FAILED, seed {failure.seed}\n{failure.error}\n{failure.what}")
        return 1
    found = grown(first, samples)
    for sentence in found:
        say(f"GREW: {sentence}")
    say(f"{'FAILED' if found else 'passed'}, seed {seed}, {samples[-1].seconds / 60:.1f} min")
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two lines")
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = int(time.time())
    torch.set_num_threads(1)
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)
    package = Path(sys.modules["accel_scaler"].__file__ or "").parent
    say(f"soak of {package}, seed {arguments.seed}, {arguments.minutes:g} min, pid {os.getpid()}")
    warnings.simplefilter("ignore")
    return soak(arguments.minutes, arguments.seed, arguments.every)


if __name__ == "__main__":
    sys.exit(main())
