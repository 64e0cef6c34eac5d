"""The recipes' sick models: well in fp32, sick in fp16, well again with what they name in fp32."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from accelerate import Accelerator
from recipe_support import RECIPES
from support import reset, same
from torch import nn

from accel_scaler import ScalerConfig, attach

sys.path.insert(0, str(RECIPES))
try:
    from sick_models import HEALTHY, HELD_OUT, NO_MODULE, SICK
finally:
    sys.path.remove(str(RECIPES))

pytestmark = pytest.mark.slow


@dataclass
class SickRun:
    """The results of one run."""

    before: float
    after: float
    """Held-out loss, computed in fp32."""
    skips: int
    records: Any
    """The scaler's history."""
    model: nn.Module
    """With the weights of the end, in fp32."""


def train(sick: Any, precision: str = "fp16", **settings: Any) -> SickRun:
    """Train a sick model from its start."""
    reset()
    accelerator: Any = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=sick.accumulate
    )
    if precision == "fp16":
        attach(accelerator, ScalerConfig(init_scale=sick.init_scale, **settings))
    model = sick.make()
    start = held_out_loss(sick, sick.make())
    optimizer = sick.optimizer(model.parameters(), lr=sick.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = sick.batches(0)
    for _ in range(sick.steps * sick.accumulate):
        batch = next(batches)
        if precision == "no" and any(each.isnan().any() for each in batch.values()):
            continue  # nothing would skip it
        in_autocast = accelerator.autocast() if sick.loss_in_autocast else contextlib.nullcontext()
        with accelerator.accumulate(model):
            with in_autocast:
                loss = sick.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    judge = sick.make()
    judge.load_state_dict(accelerator.get_state_dict(model))
    history = accelerator.scaler_history if precision == "fp16" else None
    after = held_out_loss(sick, judge)
    return SickRun(start, after, history.skips if history else 0, history, judge)


def held_out_loss(sick: Any, model: nn.Module) -> float:
    """Mean loss in fp32 of a model in evaluation, on batches that no training saw."""
    model.eval()
    batches = sick.batches(HELD_OUT)
    return sum(sick.loss(model, next(batches)).item() for _ in range(8)) / 8


def close(run: SickRun, reference: SickRun) -> bool:
    """Within 1 per cent; False for NaN."""
    return abs(run.after - reference.after) <= 0.01 * abs(reference.after)


def few(sick: Any, steps: int) -> Any:
    """The same for a few steps."""
    return replace(sick, steps=steps)


def share(sick: Any, names: Any) -> float:
    """Share of the model's parameters that these modules hold."""
    model = sick.make()
    held = {p for name in names for p in model.get_submodule(name).parameters()}
    return sum(p.numel() for p in held) / sum(p.numel() for p in model.parameters())


@cache
def in_fp32(name: str) -> SickRun:
    """The reference."""
    return train(SICK[name], "no")


@pytest.mark.parametrize("name", SICK)
def test_a_sick_model_learns_in_fp32_not_in_fp16_and_with_its_cure_as_in_fp32(name: str) -> None:
    sick, well = SICK[name], in_fp32(name)
    assert well.after < 0.75 * well.before
    ill = train(few(sick, 50), min_scale=1.0)
    assert ill.skips > 0.9 * 50
    assert not close(ill, well)
    cured = train(sick, fp32_modules=sick.cure)
    assert close(cured, well)
    assert cured.skips <= 5
    assert sick.cure
    assert share(sick, sick.cure) <= 0.05


@pytest.mark.parametrize("name", SICK)
def test_a_sick_model_heals_itself_in_the_same_run(name: str) -> None:
    sick = SICK[name]
    healed = train(sick, heal=True)
    assert close(healed, in_fp32(name))
    assert healed.skips <= 8
    assert set(healed.records.healed) == set(sick.cure)
    assert share(sick, healed.records.healed) <= 0.05


@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_control_nothing_is_healed(name: str) -> None:
    control = HEALTHY[name]
    healed, plain = train(control, heal=True), train(control)
    assert healed.records.healed == ()
    assert same(healed.model.state_dict(), plain.model.state_dict())
    assert 1 <= healed.skips == plain.skips <= 16
    assert close(plain, train(control, "no"))


def test_a_loss_that_the_script_spoils_is_no_modules_fault() -> None:
    well = train(NO_MODULE, "no")
    assert well.after < 0.75 * well.before
    run = train(few(NO_MODULE, 8), find_overflow="always", heal=True)
    assert run.skips == 8
    assert run.records.healed == ()
    assert {each.first["where"] for each in run.records.records} == {"loss"}
