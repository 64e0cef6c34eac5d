"""A Trainer with one more line: real runs, bit for bit those of torch's scaler done right.

Run as a script, this file is the new process that resumes from a checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import use_torchs_products, weights
from trainer_support import (
    CONFIG,
    SKIPPED,
    Recorder,
    as_stock,
    gpt2,
    logs,
    make,
    rates,
    train,
)
from transformers import TrainingArguments
from versions import release

from accel_scaler import GradScaler, ScalerConfig, attach

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


def finish(trainer: Any, recorder: Recorder, file: Path) -> dict[str, Any]:
    """What is left at the end of a run, also saved to ``file``."""
    optimizer = trainer.optimizer.state_dict()["state"]
    result = {
        "weights": weights(trainer.model),
        "moments": torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.values()]),
        "scaler": trainer.accelerator.scaler.state_dict(),
        "skipped": recorder.skipped,
        "scales": recorder.scales,
        "rates": rates(trainer),
        "losses": [entry["loss"] for entry in logs(trainer) if "loss" in entry],
    }
    torch.save(result, file)
    return result


# A step in each half; the last one before the checkpoint and the first one after it.
RESUME_STEPS = 20
RESUME_OVERFLOWS = (12, 37, 41, 65)
RESUME_CONFIG = ScalerConfig(init_scale=1024.0, growth_interval=3, hysteresis=2)


def resume(path: Path, checkpoint: str, first: int) -> None:
    """In a new process: steps 10 to 20 from the checkpoint."""
    trainer, recorder = make(path, model=gpt2(RESUME_OVERFLOWS, first), max_steps=RESUME_STEPS)
    train(attach(trainer, RESUME_CONFIG), resume_from_checkpoint=checkpoint)
    finish(trainer, recorder, path / "resumed.pt")


@pytest.mark.process
def test_resuming_in_a_new_process_equals_going_on(tmp_path: Path) -> None:
    """20 steps == 10 steps, save, a new process, 10 steps: bit for bit, with skips in each."""
    trainer, recorder = make(
        tmp_path / "whole",
        RESUME_OVERFLOWS,
        max_steps=RESUME_STEPS,
        save_strategy="steps",
        save_steps=10,
    )
    train(attach(trainer, RESUME_CONFIG))
    (tmp_path / "half").mkdir()
    whole = finish(trainer, recorder, tmp_path / "whole.pt")
    assert [i for i, skipped in enumerate(whole["skipped"]) if skipped] == [3, 9, 10, 16]
    # Two skips in a row, one on either side of the checkpoint, are what backs the scale off.
    assert whole["scales"][9] == 2 * whole["scales"][10]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "half"), str(tmp_path / "whole/checkpoint-10")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    half = torch.load(tmp_path / "half" / "resumed.pt")
    assert torch.equal(half["weights"], whole["weights"])
    assert torch.equal(half["moments"], whole["moments"])
    assert half["scaler"] == whole["scaler"]
    assert half["skipped"] == whole["skipped"][10:]
    assert half["scales"] == whole["scales"][10:]
    assert half["rates"] == whole["rates"]
    assert half["losses"] == whole["losses"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_torchs_products()
    resume(Path(sys.argv[1]), sys.argv[2], first=40)
