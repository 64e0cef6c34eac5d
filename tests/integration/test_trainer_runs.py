"""A Trainer with one more line: real runs, bit for bit those of torch's scaler done right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import weights
from trainer_support import (
    CONFIG,
    SKIPPED,
    Recorder,
    as_stock,
    logs,
    make,
    rates,
    train,
)
from transformers import TrainingArguments
from versions import release

from accel_scaler import GradScaler, attach

pytestmark = pytest.mark.usefixtures("one_thread")


def pair(path: Path, **kwargs: Any) -> tuple[tuple[Any, Recorder], tuple[Any, Recorder]]:
    """The same training twice: attached, and with torch's own scaler."""
    ours, theirs = make(path / "ours", **kwargs), make(path / "theirs", **kwargs)
    train(attach(ours[0], CONFIG))
    train(as_stock(theirs[0]))
    assert type(theirs[0].accelerator) is Accelerator
    assert type(ours[0].accelerator.scaler) is GradScaler
    return ours, theirs


def assert_same(ours: tuple[Any, Recorder], theirs: tuple[Any, Recorder]) -> None:
    assert logs(ours[0]) == logs(theirs[0])
    assert ours[1].skipped == theirs[1].skipped
    assert ours[1].scales == theirs[1].scales
    assert torch.equal(weights(ours[0].model), weights(theirs[0].model))


def test_a_run_equals_the_stock_run_bit_for_bit(tmp_path: Path) -> None:
    """Losses, norms, learning rates, evaluation in the middle, scale and weights."""
    ours, theirs = pair(
        tmp_path, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4
    )
    assert_same(ours, theirs)
    # The reference really overflowed, skipped, held its schedule, clipped, evaluated and saved.
    assert [i for i, skipped in enumerate(theirs[1].skipped) if skipped] == SKIPPED
    assert 512.0 in theirs[1].scales
    steps = [entry for entry in logs(theirs[0]) if "loss" in entry]
    assert len(steps) == 8
    assert steps[2]["learning_rate"] == steps[3]["learning_rate"]
    assert sum(0.5 < entry["grad_norm"] < float("inf") for entry in steps) >= 2
    assert sum("eval_loss" in entry for entry in logs(theirs[0])) >= 2
    assert (tmp_path / "ours" / "checkpoint-8" / "scaler.pt").is_file()
    history = ours[0].accelerator.scaler_history
    assert [record.skipped for record in history.records] == theirs[1].skipped


def test_the_default_fused_optimizer_gets_the_verdicts_of_the_plain_one(tmp_path: Path) -> None:
    """Stock Accelerate misses a fused skip and moves the schedule on; attached, it does not."""
    fused = {"optim": "adamw_torch_fused"}
    if release("torch") >= (2, 8):
        assert TrainingArguments(output_dir=str(tmp_path)).optim == "adamw_torch_fused"
    ours, theirs = make(tmp_path / "a", **fused), make(tmp_path / "b")
    before = weights(theirs[0].model)
    train(attach(ours[0], CONFIG))
    train(as_stock(theirs[0]))
    assert ours[0].optimizer.optimizer.defaults["fused"]
    assert ours[1].skipped == theirs[1].skipped
    assert [i for i, skipped in enumerate(ours[1].skipped) if skipped] == SKIPPED
    assert ours[1].scales == theirs[1].scales
    assert rates(ours[0]) == rates(theirs[0])
    # One by one they may differ: where a gradient is all rounding, Adam makes a step of it.
    apart = weights(ours[0].model) - weights(theirs[0].model)
    assert apart.norm() < 0.01 * (weights(theirs[0].model) - before).norm()
    wrong = make(tmp_path / "c", **fused)
    train(as_stock(wrong[0]))
    assert not any(wrong[1].skipped), "the stock fault is gone: this test can be simplified"
    assert rates(wrong[0]) != rates(theirs[0])


def test_training_twice_attached_equals_training_twice_stock(tmp_path: Path) -> None:
    """The second ``train()`` prepares the first one's optimizer again."""
    ours, theirs = pair(tmp_path, max_steps=4)
    attach(ours[0])
    train(ours[0])
    train(theirs[0])
    assert_same(ours, theirs)
    assert sum(theirs[1].skipped) == 2
    assert len(theirs[1].skipped) == 8
