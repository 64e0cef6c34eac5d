"""Tests of an Accelerate loop as users write them; this file knows nothing of accel_scaler.

Not collected by itself. Stock Accelerate 1.15 on a CPU fails those in ``MENDED``: it trains fp16 in
float32 there, without a word (F6 in docs/what-to-expect.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradScalerKwargs
from torch import nn

MENDED = ("test_fp16_is_fp16", "test_an_overflow_is_a_skip")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


class Mine(Accelerator):  # type: ignore[misc]
    """A user's own."""


def prepared(precision: str, cls: type[Accelerator] = Accelerator) -> tuple[Any, Any, Any]:
    handlers = [GradScalerKwargs(init_scale=256.0)]
    accelerator = cls(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
    net = nn.Linear(4, 1)
    with torch.no_grad():
        net.weight.fill_(0.5)
        net.bias.zero_()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    return accelerator, model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any, factor: float = 1.0) -> bool:
    accelerator.backward(model(torch.ones(2, 4)).sum() * factor)
    accelerator.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    optimizer.zero_grad()
    return bool(accelerator.optimizer_step_was_skipped)


@pytest.mark.parametrize("cls", [Accelerator, Mine])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_step_is_a_step(precision: str, cls: type[Accelerator]) -> None:
    accelerator, model, optimizer = prepared(precision, cls)
    assert isinstance(accelerator, cls)
    assert not step(accelerator, model, optimizer)
    # The gradient of each weight is 2, whatever the scale.
    assert model.state_dict()["weight"].tolist() == [[-0.5] * 4]


def test_fp16_is_fp16() -> None:
    accelerator, model, optimizer = prepared("fp16")
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 256.0


def test_an_overflow_is_a_skip() -> None:
    accelerator, model, optimizer = prepared("fp16")
    assert step(accelerator, model, optimizer, float("inf"))
    assert model.state_dict()["weight"].tolist() == [[0.5] * 4]
    assert not step(accelerator, model, optimizer)
