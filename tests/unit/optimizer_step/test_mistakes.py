"""Mistakes of a script that stock passes over: named once, in the log and in the verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from attached import prepared
from boundary_support import models, one, ours
from support import Linear, reset, same, stock, weights
from telemetry_runs import loss_of
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.optimizer_step.mistakes import SAME, TRIES
from accel_scaler.report.reader import read_run
from accel_scaler.telemetry import verdict

INSTEAD = "accelerator.clip_grad_norm_(model.parameters(), "
SCALE = 2.0**12
Edit = Callable[[Any, list[nn.Parameter]], object]


def train(accelerator: Any, edit: Edit, windows: int, is_toy: bool = False) -> torch.Tensor:
    """``edit`` gets the accelerator and the parameters before each step."""
    model, optimizer = one(accelerator) if is_toy else prepared(accelerator)
    for number in range(windows):
        accelerator.backward(model(0.5) if is_toy else loss_of(model, number))
        edit(accelerator, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def named(caplog: pytest.LogCaptureFixture, text: str = INSTEAD) -> list[str]:
    """The verdict of a run that is dropped may come later, at any time."""
    return [each for each in caplog.messages if text in each and each.endswith("(Logged once.)")]


@pytest.mark.parametrize("mode", [{}, {"step_mode": "overlap"}])
def test_a_clip_of_scaled_gradients_is_named_and_changes_no_number(
    mode: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its windows move weights by 1/65536 of what is meant, in stock and here."""
    found: list[int] = []

    def clip(accelerator: Any, params: list[nn.Parameter]) -> None:
        found.append(len(named(caplog)))
        clip_grad_norm_(params, 0.5)

    path = tmp_path / "run.jsonl"
    accelerator = stock()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    expected = train(accelerator, clip, SAME + 4)
    reset()
    found.clear()
    a = ours(ScalerConfig(telemetry=str(path), init_scale=SCALE, **mode))
    assert same(train(a, clip, SAME + 4), expected)
    assert found == [0] * SAME + [1] * 4
    (text,) = named(caplog)
    assert f"{INSTEAD}0.5)" in text
    assert "scaler.unscale_(optimizer)" in text
    assert f"{INSTEAD}0.5)" in a.scaler_history.summary()
    detach(a)
    assert f"{INSTEAD}0.5)" in verdict(read_run(path))


def by_accelerator(a: Any, params: list[nn.Parameter]) -> None:
    a.clip_grad_norm_(params, 0.5)


def unscaled_first(a: Any, params: list[nn.Parameter]) -> None:
    a.unscale_gradients()
    clip_grad_norm_(params, 0.5)


def by_scaler_first(a: Any, params: list[nn.Parameter]) -> None:
    for optimizer in a._optimizers:
        a.scaler.unscale_(optimizer.optimizer)
    clip_grad_norm_(params, 0.5)


def to_a_scaled_limit(a: Any, params: list[nn.Parameter]) -> None:
    clip_grad_norm_(params, 0.5 * a.scaler.get_scale())


def masked(a: Any, params: list[nn.Parameter]) -> None:
    for p in params:
        p.grad.mul_((torch.arange(p.numel()) % 2).reshape(p.shape))


def zeroed(a: Any, params: list[nn.Parameter]) -> None:
    for p in params:
        p.grad.zero_()


def by_value(a: Any, params: list[nn.Parameter]) -> None:
    clip_grad_value_(params, a.scaler.get_scale() * 1e-2)


RIGHT = [
    *(by_accelerator, unscaled_first, by_scaler_first, to_a_scaled_limit),
    *(masked, zeroed, by_value, lambda a, params: None),
]


@pytest.mark.parametrize("is_toy", [False, True])
@pytest.mark.parametrize("edit", RIGHT)
def test_what_is_right_is_not_named(
    edit: Edit, is_toy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a loss whose gradient is constant; all numbers are stock's, of edited gradients,
    too."""
    settings = {"growth_interval": 1000, "init_scale": SCALE / 4}
    accelerator = stock()
    accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
    expected = train(accelerator, edit, TRIES + 5, is_toy)
    reset()
    a = ours(ScalerConfig(**settings))
    assert same(train(a, edit, TRIES + 5, is_toy), expected)
    assert named(caplog) == []
    assert "problem" not in a.scaler_history.summary()


def test_without_a_scale_torchs_own_clip_is_right(caplog: pytest.LogCaptureFixture) -> None:
    for precision in ("no", "bf16"):
        reset()
        a = attach(Accelerator(cpu=True, mixed_precision=precision))
        train(a, lambda _, params: clip_grad_norm_(params, 0.5), SAME + 4)
    assert named(caplog) == []


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
    assert named(caplog, "never had a gradient") == []
