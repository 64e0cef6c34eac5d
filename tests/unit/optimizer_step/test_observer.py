"""The events of a boundary, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import GradScaler, OverflowStreakError
from accel_scaler.optimizer_step import Boundary, Observer


class EventLog(Observer):
    wants_each_norm = True

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def before_backward(self, loss: Tensor) -> None:
        self.events.append(("backward", float(loss)))

    def before_update(self, optimizer: Any, window: Any) -> None:
        self.events.append(("before", window.index, window.found_inf, window.closed))

    def optimizer_stepped(self, optimizer: Any, window: Any, timing: Any) -> None:
        norm = window.grad_norms.total
        each = [m.each is not None for m in window.grad_norms]
        self.events.append(("stepped", window.index, norm, each, timing is not None))

    def run_ended(self, error: str) -> None:
        self.events.append(("ended", error.split(":")[0]))


def train(observer: Observer | None, factors: tuple[float, ...], skips: int | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=8.0, max_consecutive_skips=skips)
    boundary = Boundary(scaler, torch.device("cpu"), observer)
    for factor in factors:
        loss = model(torch.ones(1, 2)).sum() * 0 + model.bias.sum() * factor
        boundary.before_backward(torch.tensor(factor))
        scaler.scale(loss).backward()
        boundary.add(optimizer)
        boundary.clipping.clip_norm(list(model.parameters()), 0.5)
        boundary.step(optimizer)
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], scaler.state_dict()


def test_events_and_their_order() -> None:
    log = EventLog()
    train(log, (3.0, float("inf"), 4.0))
    assert log.events == [
        ("backward", 3.0),
        ("before", 0, False, True),
        ("stepped", 0, 3.0, [True], True),
        ("backward", float("inf")),
        ("before", 1, True, True),
        ("stepped", 1, None, [], False),
        ("backward", 4.0),
        ("before", 2, False, True),
        ("stepped", 2, 4.0, [True], True),
    ]


def test_the_end_of_a_run_is_an_event_before_it_is_raised() -> None:
    log = EventLog()
    with pytest.raises(OverflowStreakError):
        train(log, (float("inf"),) * 2, skips=1)
    assert log.events[-1] == ("ended", "OverflowStreakError")
