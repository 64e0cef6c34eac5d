"""``AsyncOptimizer.submit``: a user's own step function on the optimizer thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import INIT_SCALE, loss_of
from support import mlp, same
from torch import nn

from accel_scaler import AsyncOptimizer, GradScaler, OrderError
from accel_scaler.config import StepMode

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_S = 30.0
MODES: tuple[StepMode, ...] = ("overlap", "sync")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Keeps the optimizer thread inside a submitted function until it is set."""
    made = threading.Event()
    yield made
    made.set()


class Single:
    """One weight at 1, slope as the caller likes, SGD with learning rate 0.125."""

    def __init__(self, mode: StepMode, with_scaler: bool = True, **settings: Any) -> None:
        self.w = nn.Parameter(torch.ones(1))
        self.scaler = GradScaler("cpu", init_scale=INIT_SCALE, **settings) if with_scaler else None
        self.inner = torch.optim.SGD([self.w], lr=0.125)
        self.optimizer = AsyncOptimizer(self.inner, scaler=self.scaler, step_mode=mode)

    def backward(self, slope: float = 1.0) -> None:
        loss = (self.w * slope).sum()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)  # type: ignore[union-attr]
        self.optimizer.zero_grad()

    def __enter__(self) -> Single:
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()


@pytest.mark.parametrize("mode", MODES)
def test_functions_and_steps_run_in_the_order_of_their_calls(mode: StepMode) -> None:
    """A function doubles what it finds, a step subtracts: the result tells the order."""
    with Single(mode, with_scaler=False) as run:
        seen: list[tuple[str, str]] = []

        def double() -> None:
            (own,) = run.optimizer.param_groups[0]["params"]
            seen.append(("double", threading.current_thread().name))
            own.data.mul_(2.0)

        expected = 1.0
        for _ in range(3):
            run.backward()
            run.optimizer.step()
            expected -= 0.125
            run.backward()
            run.optimizer.submit(double)
            run.optimizer.zero_grad()
            expected *= 2
        run.optimizer.synchronize()
        assert run.w.item() == expected
        assert [name for name, _ in seen] == ["double"] * 3
        assert all("accel_scaler" in thread for _, thread in seen)


def test_the_gradients_are_those_of_the_call(gate: threading.Event) -> None:
    """What the training thread does to its gradients and its learning rate later is too late."""
    with Single("overlap", with_scaler=False) as run:
        run.backward(2.0)
        run.optimizer.submit(lambda: (gate.wait(LIMIT_S), run.optimizer.step()))
        run.optimizer.zero_grad()
        run.inner.param_groups[0]["lr"] = 100.0
        run.w.grad = torch.full((1,), 77.0)
        gate.set()
        run.optimizer.synchronize()
        assert run.w.item() == 0.75
        assert run.w.grad.item() == 77.0


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_wrapped_optimizer_means_this_one(mode: StepMode, scaled: bool, gate: Any) -> None:
    """RoundPipe's users have no other; one window overflows, and a schedule moves the rate."""

    gate.set()

    def run(is_ours: bool) -> list[Any]:
        model = mlp()
        *_, bias = model.parameters()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        kind = GradScaler if is_ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=INIT_SCALE, enabled=scaled)
        given = {"scaler": scaler} if scaled else {}
        wrapped = AsyncOptimizer(inner, model, step_mode=mode, **given) if is_ours else None

        def update() -> None:
            if wrapped is not None:
                gate.wait(LIMIT_S)
            if window % 2:
                scaler.unscale_(inner)
            scaler.step(inner)
            inner.zero_grad()

        for window in range(6):
            scaler.scale(loss_of(model, window, overflow=scaled and window == 3)).backward()
            if wrapped is None:
                update()
            else:
                if mode != "sync":  # which waits for the function
                    gate.clear()
                wrapped.submit(update)
            if window == 4:  # a gradient of the next window
                bias.grad = torch.ones(bias.shape)
            scaler.update()
            schedule.step()
            gate.set()
            if wrapped is not None:
                wrapped.synchronize()
        if wrapped is not None:
            wrapped.close()
        assert "zero_grad" not in vars(inner)
        return [scaler.get_scale(), list(model.parameters()), inner.state_dict()]

    assert same(run(is_ours=True), run(is_ours=False))


def test_submit_without_a_window_is_refused_and_takes_nothing() -> None:
    with Single("overlap") as run:
        assert run.scaler is not None
        run.backward()
        run.optimizer.submit(run.update)
        run.scaler.update()
        run.w.grad = torch.ones(1)
        with pytest.raises(OrderError, match="no window is open"):
            run.optimizer.submit(run.update)
        assert run.w.grad is not None
