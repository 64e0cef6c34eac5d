"""The scaler on several threads: windows keep their scale, errors keep their reader."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import nn

from accel_scaler import ConfigError, GradScaler, OrderError

T = TypeVar("T")
LIMIT_S = 60.0


def elsewhere(fn: Callable[[], T]) -> T:
    """Run ``fn`` on a thread of its own to the end; its result or its exception."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(fn).result(LIMIT_S)


def one() -> tuple[nn.Parameter, torch.optim.SGD]:
    p = nn.Parameter(torch.zeros(3))
    return p, torch.optim.SGD([p], lr=1.0)


def backward(scaler: GradScaler, p: nn.Parameter, slope: float = 0.25) -> None:
    scaler.scale((p * slope).sum()).backward()


def hand_over(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Give the gradient to the optimizer's own parameter, as a detached step does."""
    (own,) = optimizer.param_groups[0]["params"]
    own.grad, p.grad = p.grad, None


def shadow(p: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(p.detach())], lr=1.0)


def filled(p: torch.Tensor, value: float) -> bool:
    return torch.equal(p.detach(), torch.full((3,), value))


def test_a_step_after_a_manual_update_divides_by_the_scale_of_its_window() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)
    scaler.update(8.0)
    elsewhere(lambda: scaler.step(optimizer))
    assert scaler.get_scale() == 8.0
    assert filled(p, -0.25)
    optimizer.zero_grad()
    backward(scaler, p)
    assert p.grad is not None
    assert filled(p.grad, 0.25 * 8.0)
    elsewhere(lambda: scaler.unscale_(optimizer))
    assert filled(p.grad, 0.25)


def test_two_windows_at_once_are_each_unscaled_by_their_own_scale() -> None:
    p, _ = one()
    first, second = shadow(p), shadow(p)
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)
    hand_over(p, first)
    job = scaler.bind(lambda: (scaler.step(first), scaler.get_scale()), first)
    scaler.update(8.0)
    backward(scaler, p)
    hand_over(p, second)
    late = scaler.bind(lambda: (scaler.step(second), scaler.get_scale()), second)
    scaler.update(2.0)
    assert elsewhere(late) == (None, 8.0)
    assert filled(p, -0.25)
    assert elsewhere(job) == (None, 1024.0)
    assert filled(p, -0.5)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_bound_window_has_its_verdict_before_the_job_runs(unscale_first: bool) -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p, float("nan"))
    if unscale_first:
        scaler.unscale_(optimizer)
    job = scaler.bind(lambda: (scaler.get_overflow_flag(), scaler.step(optimizer)), optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert elsewhere(job) == (True, None)
    assert filled(p, 0.0)


def test_update_and_backoff_belong_to_the_training_thread() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)
    scaler.step(optimizer)
    for call in (scaler.update, lambda: scaler.update(4.0), scaler.backoff):
        with pytest.raises(OrderError, match="on thread 'other_0'"):
            elsewhere(call)
    with pytest.raises(OrderError, match=r"update\(\) was called"):
        scaler.bind(scaler.update, optimizer)()  # on whatever thread
    assert scaler.get_scale() == 1024.0
    scaler.update()
    assert scaler._get_growth_tracker() == 1


def test_training_moves_to_another_thread_between_windows() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)

    def iteration() -> None:
        backward(scaler, p)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    iteration()
    elsewhere(iteration)
    iteration()
    assert filled(p, -0.75)
    assert scaler._get_growth_tracker() == 3


@pytest.mark.parametrize("what", ["growth_factor", "backoff_factor", "growth_interval"])
def test_an_up_to_date_getter_waits_for_the_bound_job(what: str) -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)
    go, events, started = threading.Event(), [], threading.Event()

    def job() -> None:
        started.set()
        assert go.wait(LIMIT_S)
        scaler.step(optimizer)
        getattr(scaler, f"set_{what}")(1 if what != "backoff_factor" else 0.75)
        events.append("job")

    bound = scaler.bind(job, optimizer)
    scaler.update()
    getter = getattr(scaler, f"get_{what}")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bound)
        assert started.wait(LIMIT_S)
        stale = getter()
        events.append("stale")
        go.set()
        fresh = getter(up_to_date=True)
        events.append("fresh")
    assert events == ["stale", "job", "fresh"]
    assert stale != fresh == (1 if what != "backoff_factor" else 0.75)
    assert filled(p, -0.25)


def test_a_job_that_runs_too_long_or_never_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_scaler.scaling.thread_windows.WAIT_LIMIT_S", 0.01)
    p, optimizer = one()
    scaler = GradScaler("cpu")
    backward(scaler, p)
    go, started = threading.Event(), threading.Event()
    job = scaler.bind(lambda: (started.set(), go.wait(LIMIT_S)), optimizer)
    with pytest.raises(OrderError, match="bound to window 0"):
        scaler.get_backoff_factor(up_to_date=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job)
        assert started.wait(LIMIT_S)
        with pytest.raises(OrderError, match="bound to window 0"):
            scaler.get_backoff_factor(up_to_date=True)
        go.set()
    again = scaler.bind(lambda: scaler.get_backoff_factor(up_to_date=True), optimizer)
    assert elsewhere(again) == 0.5, "it does not wait for itself"
    scaler.bind(lambda: None, optimizer)
    assert scaler.get_backoff_factor(up_to_date=True) == 0.5, "nor anybody for one that is gone"


def test_a_dead_thread_is_an_error_and_no_hang() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu")
    backward(scaler, p)
    job = scaler.bind(lambda: None, optimizer)
    dead = threading.Thread(target=lambda: None, name="gone")
    dead.start()
    dead.join(LIMIT_S)
    job._thread = dead  # as if the interpreter had taken the thread down inside the job
    with pytest.raises(OrderError, match="'gone' died"):
        scaler.get_growth_interval(up_to_date=True)


def test_a_job_runs_once() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu")
    backward(scaler, p)
    job = scaler.bind(lambda: scaler.step(optimizer), optimizer)
    elsewhere(job)
    with pytest.raises(OrderError, match="runs once"):
        elsewhere(job)
    with pytest.raises(OrderError, match="runs once"):
        job()
    assert filled(p, -0.25)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_an_optimizer_that_was_not_bound_is_refused(call: str) -> None:
    p, optimizer = one()
    q, stranger = one()
    scaler = GradScaler("cpu")
    backward(scaler, p)
    q.grad = torch.ones(3)
    job = scaler.bind(lambda: getattr(scaler, call)(stranger), optimizer)
    with pytest.raises(OrderError, match=r"not given to GradScaler\.bind"):
        elsewhere(job)
    assert filled(q, 0.0)
    assert filled(q.grad, 1.0)


def test_what_bind_needs() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu")
    with pytest.raises(ConfigError, match="got no optimizer"):
        scaler.bind(lambda: None)
    with pytest.raises(AssertionError, match="bind"):
        scaler.bind(lambda: None, optimizer)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(OrderError, match="no window is open"):
        scaler.bind(lambda: None, optimizer)


def test_an_exception_in_a_job_reaches_its_caller_and_ends_the_wait() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)

    def job() -> None:
        raise ZeroDivisionError("mine")

    bound = scaler.bind(job, optimizer)
    scaler.update(4.0)
    with pytest.raises(ZeroDivisionError, match="mine"):
        bound()
    assert scaler.get_growth_factor(up_to_date=True) == 2.0
    assert scaler.get_scale() == 4.0, "this thread is back in the open window"
    assert scaler._windows.bound is None


def test_a_job_of_a_disabled_scaler_is_the_plain_function() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", enabled=False)
    backward(scaler, p)
    job = scaler.bind(lambda: scaler.step(optimizer), optimizer)
    scaler.update()
    elsewhere(job)
    assert filled(p, -0.25)
    with pytest.raises(OrderError, match="runs once"):
        job()


def test_two_optimizers_in_one_job_share_one_verdict() -> None:
    p, optimizer = one()
    q, second = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * float("inf")).sum() + q.sum()).backward()
    job = scaler.bind(
        lambda: (scaler.unscale_(second), scaler.step(optimizer), scaler.step(second)),
        optimizer,
        second,
    )
    scaler.update()
    assert scaler.get_scale() == 512.0, "one window, one back-off"
    elsewhere(job)
    assert filled(p, 0.0)
    assert filled(q, -1.0), "torch skips optimizer by optimizer"


def test_a_job_asks_for_the_overflow_of_its_own_optimizers() -> None:
    (p, optimizer), (q, other) = one(), one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum() + (q * float("inf")).sum()).backward()
    scaler.unscale_(other)
    job = scaler.bind(scaler.get_overflow_flag, optimizer)
    assert scaler.get_overflow_flag() is True
    assert elsewhere(job) is False
