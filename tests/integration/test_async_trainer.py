"""A Trainer: ``overlap`` and offload are the synchronous run, bit for bit.

``delayed`` and float16 weights, beside a plain loop: test_grpo.py. The worker is the laziest there
can be (``lazy``), so a use that does not wait sees old values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from async_support import assert_same, lazy
from safetensors.torch import load_file
from support import weights
from trainer_support import (
    OVERFLOWS,
    SKIPPED,
    Recorder,
    gpt2,
    logs,
    make,
    train,
)

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap": {"step_mode": "overlap"},
    "overlap offload": {"step_mode": "overlap", "offload": "cpu"},
}


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
    settings = {"init_scale": 1024.0, "growth_interval": 3, "optimizer_threads": 1}
    with nullcontext() if mode == "sync" else lazy():
        try:
            attach(trainer, ScalerConfig(**(settings | MODES[mode])))
            train(trainer, resume_from_checkpoint=None if resume is None else str(resume))
            return outcome(trainer, recorder)
        finally:
            detach(trainer)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd"])
def test_a_whole_run_equals_the_synchronous_one(tmp_path: Path, optim: str) -> None:
    """Accumulated, clipped, warmed up, overflowing, evaluated, saved, the best one loaded."""
    whole: dict[str, Any] = {
        "optim": optim,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,  # so that the best is the first, not the last
    }
    sync = run(tmp_path / "sync", "sync", **whole)
    for mode in ("overlap", "overlap offload"):
        assert_same(run(tmp_path / mode, mode, **whole), sync, mode)
        for step in (2, 6):
            for name in ("model.safetensors", "optimizer.pt", "scaler.pt", "scheduler.pt"):
                mine, other = (
                    tmp_path / run_name / f"checkpoint-{step}" / name for run_name in (mode, "sync")
                )
                load = load_file if name.endswith("safetensors") else torch.load
                assert_same(load(mine), load(other), f"{mode} {step} {name}")
    # The reference did what the test is about.
    assert [i for i, skipped in enumerate(sync["skipped"]) if skipped] == SKIPPED
    losses = [entry for entry in sync["logs"] if "loss" in entry]
    assert sum(entry["grad_norm"] > 0.5 for entry in losses) > 2
    assert len({entry["loss"] for entry in losses}) == 8
    first = load_file(tmp_path / "sync" / "checkpoint-2" / "model.safetensors")
    last = load_file(tmp_path / "sync" / "checkpoint-8" / "model.safetensors")
    assert torch.equal(first["transformer.ln_f.weight"], sync["weights"][-32:-16])
    assert not torch.equal(first["transformer.ln_f.weight"], last["transformer.ln_f.weight"])


@pytest.mark.parametrize(
    ("before", "after"),
    [("sync", "overlap"), ("overlap", "sync"), ("overlap", "overlap offload")],
)
def test_one_mode_resumes_from_anothers_checkpoint(tmp_path: Path, before: str, after: str) -> None:
    """Half the run in one mode, half in another: the whole run in sync."""
    saved = {"save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "whole", "sync", **saved)
    run(tmp_path / "half", before, **saved)
    half = run(
        tmp_path / "rest",
        after,
        resume=tmp_path / "half" / "checkpoint-4",
        model=gpt2(OVERFLOWS, 16),
        **saved,
    )
    for name in ("weights", "state", "scaler", "schedule"):
        assert_same(half[name], whole[name], name)
    assert half["skipped"] == whole["skipped"][4:] == [False, True, False, False]
    assert half["scales"] == whole["scales"][4:]
    assert [e for e in half["logs"] if "loss" in e] == [e for e in whole["logs"] if "loss" in e]
