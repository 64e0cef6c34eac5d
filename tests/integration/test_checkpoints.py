"""save_state and load_state of a raw Accelerate loop: stock reads ours, ours reads stock's.

A new process that goes on bit for bit: tests/system/faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from support import same, stock, weights
from torch import nn

from accel_scaler import GradScaler, ScalerConfig, attach

ACCUMULATION = 2
CONFIG = ScalerConfig(init_scale=1024.0, growth_interval=3)
HANDLER = GradScalerKwargs(init_scale=1024.0, growth_interval=3)
# Windows that overflow: in each half, and on either side of the checkpoint after window 9.
OVERFLOWS = (2, 9, 10, 15)


class Run:
    """A model with dropout, an optimizer and a schedule under one accelerator."""

    def __init__(self, accelerator: Any, optimizer: str = "adamw") -> None:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        if optimizer == "sgd":
            stepper: Any = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
        else:
            stepper = torch.optim.AdamW(layers.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: 1 / (1 + step))
        self.accelerator = accelerator
        self.model, self.optimizer, self.schedule = accelerator.prepare(layers, stepper, schedule)
        self.skipped: list[bool] = []
        self.scales: list[float] = []

    def micro_batch(self, window: int, index: int) -> None:
        """One forward and backward, and what an Accelerate loop does after it."""
        seeded = torch.Generator().manual_seed(100 * window + index)
        x, y = torch.randn(4, 8, generator=seeded), torch.randn(4, 1, generator=seeded)
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            if window in OVERFLOWS and index == 0:
                loss = loss * float("inf")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def windows(self, first: int, end: int) -> Run:
        """Train windows ``first`` to ``end - 1``."""
        for window in range(first, end):
            for index in range(ACCUMULATION):
                self.micro_batch(window, index)
            self.skipped.append(self.optimizer.step_was_skipped)
            self.scales.append(self.accelerator.scaler.get_scale())
        return self

    def result(self) -> dict[str, Any]:
        """Everything a run leaves."""
        return {
            "weights": weights(self.model),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict()["last_epoch"],
            "scaler": self.accelerator.scaler.state_dict(),
            "skipped": self.skipped,
            "scales": self.scales,
        }


def ours(config: ScalerConfig = CONFIG) -> Any:
    return attach(
        Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=ACCUMULATION),
        config,
    )


def theirs() -> Any:
    return stock(gradient_accumulation_steps=ACCUMULATION, kwargs_handlers=[HANDLER])


def half_equals_whole(half: dict[str, Any], whole: dict[str, Any]) -> None:
    for key in ("weights", "optimizer", "schedule", "scaler"):
        assert same(half[key], whole[key]), key
    assert half["skipped"] == whole["skipped"][10:]
    assert half["scales"] == whole["scales"][10:]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("to_ours", [True, False])
def test_checkpoints_go_on_in_stock_as_in_ours(
    tmp_path: Path, optimizer: str, to_ours: bool
) -> None:
    run = Run(theirs() if to_ours else ours(), optimizer).windows(0, 10)
    run.accelerator.save_state(str(tmp_path))
    whole = run.windows(10, 20).result()
    half = Run(ours(ScalerConfig()) if to_ours else theirs(), optimizer)
    half.accelerator.load_state(str(tmp_path))
    assert type(half.accelerator.scaler) is (GradScaler if to_ours else torch.amp.GradScaler)
    result = half.windows(10, 20).result()
    assert [i for i, skipped in enumerate(whole["skipped"]) if skipped] == list(OVERFLOWS)
    assert (result if to_ours else whole)["scaler"].pop("_consecutive_skips") == 0
    half_equals_whole(result, whole)


@pytest.mark.parametrize("stepped", [False, True], ids=["half a window", "clipped, not stepped"])
def test_load_state_in_the_middle_of_a_window(tmp_path: Path, stepped: bool) -> None:
    """The open window is given up; after zeroing the gradients training goes on as saved."""
    run = Run(ours()).windows(0, 10)
    run.accelerator.save_state(str(tmp_path))
    whole = run.windows(10, 20).result()
    half = Run(ours())
    half.micro_batch(0, 0)
    if stepped:
        half.accelerator.gradient_state._set_sync_gradients(True)
        half.accelerator.clip_grad_norm_(half.model.parameters(), 0.5)
    assert half.accelerator.scaler.window.opened_by is not None
    half.accelerator.load_state(str(tmp_path))
    assert half.accelerator.scaler.window.opened_by is None
    half.model.zero_grad()
    half_equals_whole(half.windows(10, 20).result(), whole)
