"""Runs of the recipes' sick models, in fp32 and in fp16."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from recipe_support import RECIPES
from support import reset
from torch import nn

from accel_scaler import ScalerConfig, attach

sys.path.insert(0, str(RECIPES))
try:
    from sick_models import HEALTHY, HELD_OUT, NO_MODULE, SICK
finally:
    sys.path.remove(str(RECIPES))

__all__ = ["HEALTHY", "NO_MODULE", "SICK", "SickRun", "close", "few", "share", "train"]


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
