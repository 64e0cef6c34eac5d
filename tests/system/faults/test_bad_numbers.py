"""Losses that are inf, 4,000 skips in a row: when a warning comes.

An end by ``max_consecutive_skips``: tests/integration/test_recording.py.
"""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from support import LR, Linear

from accel_scaler import GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
WARNS_AT = 30


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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
