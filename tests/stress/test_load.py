"""Long runs and many tensors, without a clock: memory, objects, threads and calls do not grow.

``make bench-load`` measures the time. LOAD_WINDOWS sets the length of a run (default 1,400).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from accel_scaler.telemetry import history as history_module
from accel_scaler.telemetry import writer as writer_module

WINDOWS = max(1_400, int(os.environ.get("LOAD_WINDOWS", "0")) // 50 * 50)
SETTLED = 1_000
"""Windows after which what torch and Python keep for themselves is there."""
PERIOD = 50
"""The runs repeat themselves: one skip and one growth of the scale in so many windows."""
LEAK = 24
"""Bytes: a number a window, kept in a list, is 32; torch and Python themselves stay below 10."""
FOLDER = str(ROOT / "benchmarks")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """The benchmark as a module: its runs are the ones tested here."""
    sys.path.insert(0, FOLDER)
    try:
        import load as module
    finally:
        sys.path.remove(FOLDER)
    yield module
    sys.modules.pop("load", None)


@pytest.fixture
def short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that is full long before the first look, and a queue that is empty several times
    in a period, whatever runs beside; how long they are, is tested apart."""
    monkeypatch.setattr(history_module, "KEPT_RECORDS", 64)
    monkeypatch.setattr(writer_module, "MAX_WAIT_S", 0.0)


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python and C functions on this thread."""
    count = 0

    def watch(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would call what others have registered
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def ours() -> int:
    """Objects of this package's classes that are alive."""
    gc.collect()
    return sum(str(type(each).__module__).startswith("accel_scaler") for each in gc.get_objects())


def forget_names() -> None:
    """Empty the interpreter's cache of attributes: a string for each of its 4,096 places.

    torch makes the names that it asks for anew each time, so it fills for thousands of windows.
    """
    getattr(sys, "_clear_internal_caches", getattr(sys, "_clear_type_cache", gc.collect))()


def least_memory(window: Callable[[int], None], first: int) -> int:
    """Bytes that Python objects take, at least, in one period: a file is written in batches."""
    gc.collect()
    sizes = []
    for number in range(first, first + PERIOD):
        window(number)
        forget_names()
        sizes.append(tracemalloc.get_traced_memory()[0] - sys.getsizeof(sizes))
    return min(sizes)


def growth(window: Callable[[int], None], first: int, end: int) -> float:
    """Bytes a window, from once all is there that torch and Python keep for themselves."""
    tracemalloc.start()
    try:
        for number in range(first, SETTLED):
            window(number)
        before = least_memory(window, SETTLED)
        for number in range(SETTLED + PERIOD, end - PERIOD):
            window(number)
        after = least_memory(window, end - PERIOD)
    finally:
        tracemalloc.stop()
    assert after > 0, "nothing was traced"
    return (after - before) / (end - PERIOD - SETTLED)


def leak(window: Callable[[int], None], first: int, end: int) -> float:
    """The least :func:`growth` of five: a leak rises each time, what waits have left does not."""
    found = growth(window, first, end)
    for again in range(1, 5):
        if found < LEAK:
            break
        shift = again * (end - SETTLED)
        found = min(found, growth(lambda n, s=shift: window(n + s), SETTLED, end))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("variant", ["plain", "overlap+file"])
def test_a_long_run_is_at_its_end_what_it_was_at_its_beginning(
    variant: str, load: Any, tmp_path: Path, short_history: None
) -> None:
    window, close = load.long_run(variant, tmp_path)
    end = WINDOWS - PERIOD
    try:
        for number in range(2 * PERIOD):
            window(number)
        early = ours(), threading.active_count()
        assert leak(window, 2 * PERIOD, end) < LEAK, "memory grows"
        late = ours(), threading.active_count()
    finally:
        close()
    assert late[0] <= early[0] + 16, "objects of the package pile up"
    assert late[1] == early[1]


def costs(load: Any, variant: str, what: Any, folder: Path, overflow: bool) -> int:
    """Calls of one boundary, the fewest of some: a wait that looks again calls more."""
    torch.manual_seed(0)
    bench = load.Bench(what, (variant,), folder)
    counts = []
    for turn in range(7):
        bench.fill(variant, overflow and turn >= 2)
        count = calls_of(bench.boundaries[variant])
        counts += [count] * (turn >= 2)
    return min(counts)


def is_straight(low: int, middle: int, high: int) -> bool:
    """Of n, 2n and 4n: the last step costs twice the one before; four times if it were a square."""
    return high - middle <= 2.6 * (middle - low) + 100


@pytest.mark.parametrize("overflow", [False, True], ids=["step", "skip"])
@pytest.mark.parametrize("variant", ["plain", "sync+file", "overlap"])
def test_calls_grow_with_the_number_of_tensors_and_no_faster(
    variant: str, overflow: bool, load: Any, tmp_path: Path
) -> None:
    found = [costs(load, variant, load.Load(n), tmp_path, overflow) for n in (200, 400, 800)]
    assert is_straight(*found), found
