"""The optimizer thread: order, parts, failures, and every way it can be gone."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from children import in_child

from accel_scaler import StepError
from accel_scaler.async_optimizer import worker as worker_module
from accel_scaler.async_optimizer.worker import Task, Worker, default_threads

LIMIT_S = 20.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    before = sys.getswitchinterval()
    worker = Worker()
    yield worker
    worker.stop(LIMIT_S)
    sys.setswitchinterval(before)


def nothing() -> None:
    pass


def waiting_for(event: threading.Event) -> Callable[[], None]:
    def run() -> None:
        assert event.wait(LIMIT_S)

    return run


def test_tasks_run_in_the_order_of_submission_on_one_thread_of_its_own(worker: Worker) -> None:
    seen: list[tuple[int, int, bool]] = []

    def task(number: int) -> Task:
        def run() -> None:
            time.sleep(0.001 * (7 - number % 7))
            seen.append((number, threading.get_ident(), worker.is_current()))

        return Task(run, 1)

    tasks = [task(number) for number in range(30)]
    for each in tasks:
        worker.submit(each)
    assert tasks[-1].wait(limit_s=LIMIT_S)
    assert worker.thread is not None
    assert seen == [(number, worker.thread.ident, True) for number in range(30)]
    assert not worker.is_current()


def test_a_wait_for_some_parts_ends_while_the_others_still_run(worker: Worker) -> None:
    gates = [threading.Event() for _ in range(3)]

    def run() -> None:
        for gate in gates:
            assert gate.wait(LIMIT_S)
            task.advance()

    task = Task(run, 3)
    worker.submit(task)
    assert task.done == 0
    gates[0].set()
    assert task.wait(1, LIMIT_S)
    assert (task.done, task.finished) == (1, False)
    gates[1].set()
    assert task.wait(2, LIMIT_S)
    assert (task.done, task.finished) == (2, False)
    gates[2].set()
    assert task.wait(None, LIMIT_S)
    assert (task.done, task.finished) == (3, True)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_task_raises_is_kept_and_the_next_task_runs(
    worker: Worker, kind: type[BaseException]
) -> None:
    def run() -> None:
        task.advance()
        raise kind("mine")

    task, following = Task(run, 3), Task(nothing, 0)
    worker.submit(task)
    worker.submit(following)
    assert task.wait(1, LIMIT_S), "this part was done"
    assert not task.wait(2, LIMIT_S)
    assert not task.wait(None, LIMIT_S)
    assert type(task.error) is kind
    assert task.done == 1
    assert task.error.__traceback__ is not None
    assert following.wait(None, LIMIT_S)


def test_a_wait_has_an_end_and_says_how_far_the_step_is(worker: Worker) -> None:
    release = threading.Event()

    def run() -> None:
        task.advance()
        release.wait(LIMIT_S)

    task = Task(run, 4)
    worker.submit(task)
    task.wait(1, LIMIT_S)
    with pytest.raises(StepError, match=r"waited 0\.05 s .* 1 of 4 parts"):
        task.wait(2, 0.05)
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_dead_thread_a_new_one_runs_new_tasks_and_never_the_lost_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    lost, task = (Task(lambda name=name: ran.append(name), 1) for name in ("lost", "new"))  # type: ignore[misc]
    with monkeypatch.context() as patch:
        patch.setattr(Task, "execute", lambda _: sys.exit())
        worker.submit(lost)
        assert worker.thread is not None
        worker.thread.join(LIMIT_S)
    worker.submit(task)
    assert task.wait(limit_s=LIMIT_S)
    with pytest.raises(StepError, match="thread is gone"):
        lost.wait(limit_s=LIMIT_S)
    assert ran == ["new"]


def test_an_abandoned_task_never_runs_and_nobody_waits_for_it(worker: Worker) -> None:
    ran: list[int] = []
    gate = threading.Event()
    worker.submit(Task(waiting_for(gate), 0))
    task = Task(lambda: ran.append(1), 1)
    worker.submit(task)
    error = KeyboardInterrupt()
    task.abandon(error)
    assert not task.wait(limit_s=LIMIT_S)
    assert task.error is error
    gate.set()
    last = Task(nothing, 0)
    worker.submit(last)
    assert last.wait(limit_s=LIMIT_S)
    assert ran == []


@pytest.mark.process
def test_a_child_forked_beside_a_task_does_not_hang_and_can_train(
    worker: Worker, tmp_path: Path
) -> None:
    gate, done, after = threading.Event(), Task(nothing, 0), Task(nothing, 0)
    worker.submit(done)
    assert done.wait(limit_s=LIMIT_S)
    task = Task(waiting_for(gate), 1)
    worker.submit(task)

    def child() -> None:
        assert done.wait(limit_s=LIMIT_S)
        with pytest.raises(StepError, match="before forking"):
            task.wait(limit_s=LIMIT_S)
        worker.submit(after)
        assert after.wait(limit_s=LIMIT_S)
        worker.stop(LIMIT_S)

    try:
        assert in_child(child, tmp_path / "child") == 0, (tmp_path / "child").read_text()
    finally:
        gate.set()


def test_stop_finishes_what_was_submitted_and_a_later_task_starts_another_thread(
    worker: Worker,
) -> None:
    ran: list[int] = []
    for number in range(3):
        worker.submit(Task(lambda n=number: (time.sleep(0.01), ran.append(n)), 0))  # type: ignore[misc]
    first = worker.thread
    worker.stop(LIMIT_S)
    assert ran == [0, 1, 2]
    assert first is not None
    assert not first.is_alive()
    task = Task(lambda: ran.append(3), 0)
    worker.submit(task)
    assert task.wait(limit_s=LIMIT_S)
    assert ran == [0, 1, 2, 3]
    worker.stop(LIMIT_S)
    worker.stop(LIMIT_S)


def test_stop_gives_up_on_a_stuck_task_and_says_so(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    worker.submit(Task(waiting_for(gate), 0))
    thread = worker.thread
    with caplog.at_level(logging.ERROR, "accel_scaler"):
        worker.stop(0.05)
    assert "did not finish its step within 0.05 s" in caplog.text
    gate.set()
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_worker_that_is_dropped_ends_its_thread() -> None:
    worker = Worker()
    task = Task(nothing, 0)
    worker.submit(task)
    assert task.wait(limit_s=LIMIT_S)
    thread, ref = worker.thread, weakref.ref(worker)
    assert thread is not None
    del worker
    gc.collect()
    assert ref() is None, "the thread kept its worker alive"
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def failing() -> None:
    raise ValueError("nobody has asked")


def test_an_error_is_logged_at_once(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.submit(Task(failing, 1))
    worker.stop(LIMIT_S)
    (record,) = caplog.records
    assert record.getMessage().endswith("ValueError: nobody has asked")
    assert "Traceback" not in caplog.text, "a log that is kept would keep the step's tensors"


def test_the_switch_interval_is_short_while_there_is_a_thread_and_then_as_it_was(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_running", {})  # others' threads
    sys.setswitchinterval(0.004)
    own, short = sys.getswitchinterval(), pytest.approx(worker_module.SWITCH_INTERVAL_S)
    other = Worker()
    gates = [threading.Event(), threading.Event()]
    tasks = [Task(waiting_for(gate), 0) for gate in gates]
    for each, task in zip((worker, other), tasks, strict=True):
        each.submit(task)
    assert sys.getswitchinterval() == short
    gates[0].set()
    worker.stop(LIMIT_S)
    assert sys.getswitchinterval() == short
    gates[1].set()
    other.stop(LIMIT_S)
    assert sys.getswitchinterval() == own
    worker.submit(Task(failing, 0))
    worker.stop(LIMIT_S)
    assert sys.getswitchinterval() == own


def test_the_thread_has_its_own_number_of_threads_and_nobody_else_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(worker_module, "default_threads", lambda: 2)
        worker, seen = Worker(), list[int]()
        task = Task(lambda: seen.append(torch.get_num_threads()), 0)
        worker.submit(task)
        task.wait(limit_s=LIMIT_S)
        assert seen == [2]
        assert torch.get_num_threads() == 3
        born_later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        born_later.start()
        born_later.join(LIMIT_S)
        assert seen == [2, 3]
        worker.stop(LIMIT_S)
    finally:
        torch.set_num_threads(own)


@pytest.mark.parametrize(
    ("cores", "allowed", "ranks", "expected"),
    [
        (8, 16, None, 7),
        (8, 16, "2", 3),
        (8, 4, None, 3),
        (8, 16, "8", 1),
        (1, 1, None, 1),
        (8, 16, "32", 1),
        (None, 6, "", 5),
    ],
)
def test_by_default_it_has_the_physical_cores_of_one_rank_less_one_whatever_omp_says(
    monkeypatch: pytest.MonkeyPatch,
    cores: int | None,
    allowed: int,
    ranks: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert default_threads() == expected
