"""Weights that float16 does not hold are named."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from accel_scaler.overflow import warn_past_float16


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)


def named(model: nn.Module, caplog: pytest.LogCaptureFixture, *given: Any) -> list[str]:
    """The names in the warning."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        warn_past_float16(model, *given)
    texts = [record.getMessage().partition(": ")[0] for record in caplog.records]
    return re.findall(r"[\w.]+(?= \()|and \d+ more", "".join(texts))


@pytest.mark.parametrize(
    ("value", "dtype", "is_past"),
    [
        (65280.0, torch.bfloat16, False),  # the last before 65504
        (65536.0, torch.bfloat16, True),
        (-1e30, torch.bfloat16, True),
        (65519.0, torch.float32, False),  # rounds to 65504
        (65520.0, torch.float32, True),
        (65504.0, torch.float16, False),
        (float("inf"), torch.bfloat16, False),  # no dtype would help
        (float("nan"), torch.bfloat16, False),
    ],
)
def test_what_rounds_to_inf(
    value: float, dtype: torch.dtype, is_past: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = layers().to(dtype)
    with torch.no_grad():
        model[1].weight[2, 1] = value
    assert named(model, caplog) == (["1.weight"] if is_past else [])
    assert bool(torch.full((), value, dtype=dtype).half().isinf()) == (
        is_past or abs(value) == float("inf")
    )


def test_names_are_in_the_models_order_without_what_is_in_float32_or_has_no_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = layers()
    model[1].float()
    model.packed = nn.Parameter(torch.full((3,), 255, dtype=torch.uint8), requires_grad=False)
    model.nothing = nn.Parameter(torch.empty(0, 4))
    model.elsewhere = nn.Linear(2, 2, device="meta")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(131072 if p.dtype.is_floating_point else 255)
    assert named(model, caplog) == ["0.weight", "0.bias", "1.weight", "and 1 more"]
    compiled: Any = torch.compile(model, backend="eager")
    assert named(compiled, caplog, [model[0]]) == ["1.weight", "1.bias"]
    (record,) = caplog.records
    assert record.getMessage().startswith("1.weight (1.31e+05), ")
    assert "fp32_modules with '1'" in record.getMessage()
