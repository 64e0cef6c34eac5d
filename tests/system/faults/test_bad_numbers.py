"""Losses that are inf, 4,000 skips in a row: when a warning comes.

An end by ``max_consecutive_skips``: tests/integration/test_recording.py.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import LR, Linear

from accel_scaler import GradScaler, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
WARNS_AT = 30


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_infinite_loss_from_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """A warning at 30 and at 300 skips."""
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"))
    layer = Linear()
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=LR))
    when: dict[str, int] = {}
    # A finite loss does not bring such a scale back, as it would not with torch's scaler.
    for number in range(1, 302):
        accelerator.backward(model(1.0) * (INF if number <= 300 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
        for text in warned(caplog)[len(when) :]:
            when[text] = number
    assert list(when.values()) == [WARNS_AT, 10 * WARNS_AT]
    assert layer.moved == 0
    detach(accelerator)


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
