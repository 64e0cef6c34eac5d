"""A Trainer with one more line: real runs, bit for bit those of torch's scaler done right, and in
``overlap`` the synchronous one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import async_support
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from support import weights
from trainer_support import (
    CONFIG,
    OVERFLOWS,
    SKIPPED,
    Recorder,
    arguments,
    as_stock,
    gpt2,
    logs,
    make,
    sft_trainer,
    train,
)
from transformers import Trainer

from accel_scaler import GradScaler, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("kind", "mode"), [("", "sync"), ("a loss of its own", "overlap"), ("sft", "sync")]
)
def test_a_run_that_makes_windows_again_equals_one_in_which_nothing_overflows(
    kind: str, mode: str, tmp_path: Path
) -> None:
    """Its own ``compute_loss`` runs again: no skip, no inf in a log, the same schedule."""

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    def run(name: str, overflows: Iterable[int], **settings: Any) -> tuple[Any, Any]:
        model = gpt2(overflows)
        if kind == "sft":
            pytest.importorskip("trl")
            trainer = sft_trainer(model, **arguments(tmp_path / name).to_dict())
        else:
            trainer = make(tmp_path / name, cls=Own if kind else Trainer, model=model)[0]
        exact = {"fp32_modules": ["transformer", "lm_head"]}  # float16 has subnormal numbers
        train(attach(trainer, init_scale=1024.0, step_mode=mode, **exact, **settings))
        records = list(trainer.accelerator.scaler_history.records)
        detach(trainer)
        return trainer, records

    ours, records = run("ours", OVERFLOWS, on_overflow="retry")
    theirs, _ = run("theirs", ())
    assert not any(r.skipped for r in records)
    assert [r.scale for r in records[1:3]] == [1024.0, 512.0]
    assert logs(ours) == logs(theirs)
    assert torch.equal(weights(ours.model), weights(theirs.model))


def test_a_loss_that_calls_the_model_twice_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    """As R-Drop's. Each call casts the weights to float16 for itself, in the second run, too."""

    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            one, other = model(**inputs), model(**inputs)
            return one.loss + other.loss + (one.logits - other.logits).square().mean()

    def run(name: str, scale: float, **settings: Any) -> tuple[Any, Any]:
        trainer = make(tmp_path / name, (), cls=Twice, max_steps=1, warmup_steps=0)[0]
        train(attach(trainer, init_scale=scale, **settings))
        records = list(trainer.accelerator.scaler_history.records)
        detach(trainer)
        return trainer, records

    ours, (record,) = run("ours", 2.0**20, on_overflow="retry")
    theirs, (plain,) = run("theirs", record.scale)
    assert record.retries > 0
    assert not record.skipped
    assert not plain.skipped
    assert logs(ours) == logs(theirs)
    assert torch.equal(weights(ours.model), weights(theirs.model))


def test_a_run_equals_the_stock_run_bit_for_bit(tmp_path: Path) -> None:
    """Losses, norms, learning rates, evaluation in the middle, scale and weights."""
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    given = {"eval_strategy": "steps", "eval_steps": 3, **saved}
    (ours, mine), (theirs, other) = (make(tmp_path / name, **given) for name in ("ours", "theirs"))
    train(attach(ours, CONFIG))
    train(as_stock(theirs))
    assert type(theirs.accelerator) is Accelerator
    assert isinstance(ours.accelerator.scaler, GradScaler)
    assert logs(ours) == logs(theirs)
    assert (mine.skipped, mine.scales) == (other.skipped, other.scales)
    assert torch.equal(weights(ours.model), weights(theirs.model))
    # The reference really overflowed, skipped, held its schedule, clipped, evaluated and saved.
    assert [i for i, skipped in enumerate(other.skipped) if skipped] == SKIPPED
    assert 512.0 in other.scales
    steps = [entry for entry in logs(theirs) if "loss" in entry]
    assert len(steps) == 8
    assert steps[2]["learning_rate"] == steps[3]["learning_rate"]
    assert sum(0.5 < entry["grad_norm"] < float("inf") for entry in steps) >= 2
    assert sum("eval_loss" in entry for entry in logs(theirs)) >= 2
    assert (tmp_path / "ours" / "checkpoint-8" / "scaler.pt").is_file()
    history = ours.accelerator.scaler_history
    assert [record.skipped for record in history.records] == other.skipped


# Beside the synchronous run, with the laziest optimizer thread there can be (``lazy``).
# Float16 weights, beside a plain loop: test_grpo.py.


def outcome(trainer: Any, recorder: Recorder) -> dict[str, Any]:
    """All that is left of a run."""
    return {
        "weights": weights(trainer.model),
        "state": trainer.optimizer.state_dict(),
        "scaler": trainer.accelerator.scaler.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "skipped": recorder.skipped,
        "scales": recorder.scales,
        "logs": logs(trainer),
    }


def run(
    path: Path,
    mode: str,
    overflows: Iterable[int] = OVERFLOWS,
    *,
    model: Any = None,
    resume: Path | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """One attached training from start to end."""
    trainer, recorder = make(path, overflows, model=model, **kwargs)
    with nullcontext() if mode == "sync" else async_support.lazy():
        try:
            attach(trainer, init_scale=1024.0, growth_interval=3, step_mode=mode)
            train(trainer, resume_from_checkpoint=None if resume is None else str(resume))
            return outcome(trainer, recorder)
        finally:
            detach(trainer)


def test_a_whole_run_equals_the_synchronous_one(tmp_path: Path) -> None:
    """Accumulated, clipped, warmed up, overflowing, evaluated, saved, the best one loaded."""
    whole: dict[str, Any] = {
        "optim": "adamw_torch_fused",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so that the best is the first, not the last
    }
    sync = run(tmp_path / "sync", "sync", **whole)
    async_support.assert_same(run(tmp_path / "overlap", "overlap", **whole), sync)
    for step in (2, 6):
        for name in ("model.safetensors", "optimizer.pt", "scaler.pt", "scheduler.pt"):
            mine, other = (
                tmp_path / mode / f"checkpoint-{step}" / name for mode in ("overlap", "sync")
            )
            load = load_file if name.endswith("safetensors") else torch.load
            async_support.assert_same(load(mine), load(other), f"{step} {name}")
    # The reference did what the test is about.
    assert [i for i, skipped in enumerate(sync["skipped"]) if skipped] == SKIPPED
    losses = [entry for entry in sync["logs"] if "loss" in entry]
    assert sum(entry["grad_norm"] > 0.5 for entry in losses) > 2
    assert len({entry["loss"] for entry in losses}) == 8
    first = load_file(tmp_path / "sync" / "checkpoint-2" / "model.safetensors")
    last = load_file(tmp_path / "sync" / "checkpoint-8" / "model.safetensors")
    assert torch.equal(first["transformer.ln_f.weight"], sync["weights"][-32:-16])
    assert not torch.equal(first["transformer.ln_f.weight"], last["transformer.ln_f.weight"])


def test_one_mode_resumes_from_anothers_checkpoint(tmp_path: Path) -> None:
    """Half the run in ``sync``, half in ``overlap``: the whole run in ``sync``, whose checkpoints
    are the same as those of ``overlap``."""
    saved = {"save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "whole", "sync", **saved)
    half = run(
        tmp_path / "rest",
        "overlap",
        resume=tmp_path / "whole" / "checkpoint-4",
        model=gpt2(OVERFLOWS, 16),
        **saved,
    )
    for name in ("weights", "state", "scaler", "schedule"):
        async_support.assert_same(half[name], whole[name], name)
    assert half["skipped"] == whole["skipped"][4:] == [False, True, False, False]
    assert half["scales"] == whole["scales"][4:]
    assert [e for e in half["logs"] if "loss" in e] == [e for e in whole["logs"] if "loss" in e]
