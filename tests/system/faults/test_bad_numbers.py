"""Losses that are inf, scales at either end of float32, 4,000 skips in a row: when a warning comes.

An end by ``max_consecutive_skips``: tests/integration/test_recording.py.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import LR, Linear, reset, stock

from accel_scaler import ConfigError, GradScaler, ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
LARGEST = torch.finfo(torch.float32).max
WARNS_AT = 30


class Loop:
    """One parameter whose gradient is what the caller says; SGD."""

    def __init__(self, make: Any = None, **settings: Any) -> None:
        if make is None:
            plain = Accelerator(cpu=True, mixed_precision="fp16")
            self.accelerator: Any = attach(plain, ScalerConfig(optimizer_threads=1, **settings))
        else:
            self.accelerator = make()
        self.layer = Linear()
        self.model, self.optimizer = self.accelerator.prepare(
            self.layer, torch.optim.SGD(self.layer.parameters(), lr=LR)
        )

    def window(self, gradient: float, factor: float = 1.0) -> bool:
        """False if it was skipped."""
        self.accelerator.backward(self.model(gradient) * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return not self.optimizer.step_was_skipped

    def close(self) -> None:
        self.accelerator.scaler.abandon_window()
        detach(self.accelerator)
        reset()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_infinite_loss_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """A warning when the scale falls below 1, after 17 windows; else at 30 and 300 skips."""
    loop = Loop()
    when: dict[str, int] = {}
    for number in range(1, 301):
        assert not loop.window(1.0, INF)
        for text in warned(caplog)[len(when) :]:
            when[text] = number
    assert list(when.values()) == [17, WARNS_AT, 10 * WARNS_AT]
    # A finite loss does not bring such a scale back, as it would not with torch's scaler.
    assert not loop.window(1.0)
    assert loop.layer.moved == 0
    loop.close()


def test_a_scale_of_zero_in_a_checkpoint_is_refused_or_raised_to_the_floor() -> None:
    """Every window of a run that begins with it would be skipped."""
    dead = torch.amp.GradScaler("cpu", init_scale=1.0).state_dict() | {"scale": 0.0}
    ours = GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ConfigError, match=r"scale=0\.0.*min_scale"):
        ours.load_state_dict(dead)
    assert ours.get_scale() == 8.0
    floor = GradScaler("cpu", min_scale=2.0)
    floor.load_state_dict(dead)
    assert floor.get_scale() == 2.0


@pytest.mark.parametrize("first", [2.0**126, 2.0**127, LARGEST])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_a_scale_that_would_pass_float32_stays_the_last_one_that_does_not(
    mode: str, first: float
) -> None:
    """Growth past it is left out, at every window here; training is what it was."""
    loop = Loop(init_scale=first, growth_interval=1, step_mode=mode)
    reference = Loop(stock)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=1)
    reference.accelerator.scaler.load_state_dict(scaler.state_dict())
    for _ in range(20):
        assert loop.window(2.0**-120)
        reference.window(2.0**-120)
        scales = [each.accelerator.scaler.get_scale() for each in (loop, reference)]
        assert scales == [max(2.0**127, first)] * 2
    loop.optimizer.synchronize()
    assert torch.equal(loop.layer.w, reference.layer.w)
    loop.close()


def test_thousands_of_skips_in_a_row_are_three_lines_and_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then the first finite loss trains on, and a second streak is warned of as well."""
    scaler, layer, live = GradScaler("cpu", min_scale=1.0), Linear(), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=LR)

    def window(factor: float) -> None:
        scaler.scale(layer(1.0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        for _ in range(2000):
            window(INF)
        gc.collect()
        live.append(len(gc.get_objects()))
    assert live[1] - live[0] < 100, live
    assert [text.split()[0] for text in warned(caplog)] == ["30", "300", "3000"]
    assert scaler.get_scale() == 1.0
    assert layer.moved == 0
    window(1.0)
    assert layer.moved == 1.0
    for _ in range(WARNS_AT):
        window(INF)
    assert warned(caplog)[-1].startswith(f"{WARNS_AT} ")
