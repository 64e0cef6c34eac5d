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


@pytest.mark.parametrize("unscaled", ["", "before", "in the job"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_job_has_the_verdict_of_every_rank(
    unscaled: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank's gradients are finite; ``bad``: another rank's are not."""
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    monkeypatch.setattr(scaler.ranks, "agree_on_overflow", lambda found, *_: found or bad)
    backward(scaler, p)
    if unscaled == "before":
        scaler.unscale_(optimizer)

    def job() -> None:
        if unscaled == "in the job":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    bound = scaler.bind(job, optimizer)
    scaler.update()
    elsewhere(bound)
    assert filled(p, 0.0 if bad else -0.25)
    assert scaler.get_scale() == (512.0 if bad else 1024.0)


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


@pytest.mark.parametrize("what", ["growth_factor", "backoff_factor", "growth_interval"])
def test_an_up_to_date_getter_waits_for_the_bound_job(what: str) -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p)
    go, new = threading.Event(), 7
    getter = getattr(scaler, f"get_{what}")

    def job() -> None:
        assert go.wait(LIMIT_S)
        scaler.step(optimizer)
        getattr(scaler, f"set_{what}")(new)

    bound = scaler.bind(job, optimizer)
    scaler.update()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bound)
        assert getter() != new, "it does not wait"
        go.set()
        assert getter(up_to_date=True) == new
    assert filled(p, -0.25)


def test_a_job_that_runs_too_long_or_never_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_scaler.scaling.thread_windows.WAIT_LIMIT_S", 0.01)
    p, optimizer = one()
    scaler = GradScaler("cpu")
    backward(scaler, p)
    job = scaler.bind(lambda: scaler.get_backoff_factor(up_to_date=True), optimizer)
    with pytest.raises(OrderError, match="bound to step 0"):
        scaler.get_backoff_factor(up_to_date=True)
    assert elsewhere(job) == 0.5, "it does not wait for itself"
    scaler.bind(lambda: None, optimizer)
    assert scaler.get_backoff_factor(up_to_date=True) == 0.5, "nor anybody for one that is gone"


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
    with pytest.raises(OrderError, match="no loss was scaled"):
        scaler.bind(lambda: None, optimizer)
