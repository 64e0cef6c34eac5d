"""Mistakes of a script that stock passes over: named once, in the log and in the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from boundary_support import models, one, ours
from support import Linear, reset

from accel_scaler import ScalerConfig, detach
from accel_scaler.optimizer_step.boundary import MAX_IDLE_WINDOWS
from accel_scaler.report.reader import read_run
from accel_scaler.telemetry import verdict


def named(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The verdict of a run that is dropped may come later, at any time."""
    return [each for each in caplog.messages if text in each and each.endswith("(Logged once.)")]


LEFT = "none of its parameters is the prepared model's"


def test_an_optimizer_of_replaced_parameters_is_named_in_its_first_window(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Where it has never had a gradient, as after a resume; else after ten, since it may wait."""
    for trained, idle in ((0, 0), (3, MAX_IDLE_WINDOWS - 1)):
        path = tmp_path / f"{trained}.jsonl"
        a = ours(ScalerConfig(telemetry=str(path)))
        model, optimizer = one(a)
        for window in range(trained + idle + 3):
            if window == trained:
                model.load_state_dict({"w": torch.ones(4)}, assign=True)
            a.backward(model(1.0))
            optimizer.step()
            optimizer.zero_grad()
            assert len(named(caplog, LEFT)) == (window >= trained + idle)
        assert "accelerator.prepare(SGD(model.parameters(), ...))" in named(caplog, LEFT)[0]
        assert LEFT in a.scaler_history.summary()
        a.scaler.abandon_window()
        detach(a)
        assert LEFT in verdict(read_run(path))
        assert model.w.tolist() == [1.0] * 4
        caplog.clear()
        reset()


def test_a_turn_that_has_not_come_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Models that are prepared or not, frozen or not, whose optimizer waits (GANs, adapters)."""
    for is_prepared in (True, False):
        for is_frozen in (True, False):
            a = ours()
            (model, turn), (optimizer, second) = models(a, 2)
            if not is_prepared:
                turn = Linear()
                second = a.prepare(torch.optim.SGD(turn.parameters(), lr=0.1))
            for number in range(9):
                turn.requires_grad_(not is_frozen or number > 4)
                a.backward(model(1.0) + turn(1.0) if number > 4 else model(1.0))
                for each in (optimizer, second):
                    each.step()
                    each.zero_grad()
            reset()
    assert named(caplog, LEFT) == named(caplog, "never had a gradient") == []
