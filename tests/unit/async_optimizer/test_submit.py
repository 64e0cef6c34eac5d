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


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Keeps the optimizer thread inside a submitted function until it is set."""
    made = threading.Event()
    yield made
    made.set()


def test_the_gradients_are_those_of_the_call(gate: threading.Event) -> None:
    """What the training thread does to its gradients and its learning rate later is too late."""
    w = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([w], lr=0.125)
    with AsyncOptimizer(inner) as optimizer:
        w.grad = torch.full((1,), 2.0)
        optimizer.submit(lambda: (gate.wait(LIMIT_S), optimizer.step()))
        optimizer.zero_grad()
        inner.param_groups[0]["lr"] = 100.0
        w.grad = torch.full((1,), 77.0)
        gate.set()
        optimizer.synchronize()
        assert w.item() == 0.75
        assert w.grad.item() == 77.0


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_wrapped_optimizer_means_this_one(mode: StepMode, scaled: bool) -> None:
    """RoundPipe's users have no other; one window overflows."""

    def run(is_ours: bool) -> list[Any]:
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        kind = GradScaler if is_ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=INIT_SCALE, enabled=scaled)
        given = {"scaler": scaler} if scaled else {}
        wrapped = AsyncOptimizer(inner, model, step_mode=mode, **given) if is_ours else None

        def update() -> None:
            if window % 2:
                scaler.unscale_(inner)
            scaler.step(inner)
            inner.zero_grad()

        for window in range(6):
            scaler.scale(loss_of(model, window, overflow=scaled and window == 3)).backward()
            if wrapped is None:
                update()
            else:
                wrapped.submit(update)
                wrapped.synchronize()
            scaler.update()
        if wrapped is not None:
            wrapped.close()
        assert "zero_grad" not in vars(inner)
        return [scaler.get_scale(), list(model.parameters()), inner.state_dict()]

    assert same(run(is_ours=True), run(is_ours=False))


def test_submit_without_a_window_is_refused_and_takes_nothing() -> None:
    w, scaler = nn.Parameter(torch.ones(1)), GradScaler("cpu", init_scale=INIT_SCALE)
    with AsyncOptimizer(torch.optim.SGD([w], lr=0.125), scaler=scaler) as optimizer:
        scaler.scale(w.sum()).backward()
        optimizer.submit(lambda: scaler.step(optimizer))
        scaler.update()
        w.grad = torch.ones(1)
        with pytest.raises(OrderError, match="no loss was scaled"):
            optimizer.submit(lambda: scaler.step(optimizer))
        assert w.grad is not None
