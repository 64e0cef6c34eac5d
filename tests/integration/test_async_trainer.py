"""A Trainer in every step mode: ``overlap`` and offload are the synchronous run, bit for bit;
``delayed`` and float16 weights are the plain loop of references.py.

The worker is the laziest there can be (``lazy``), so a use that does not wait sees old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from async_support import assert_same, lazy
from reference_trainer import ReferenceOptimizer, ReferenceScaler, Verdicts, momentum
from references import GROWTH_INTERVAL, INIT_SCALE, NEVER_STALE
from safetensors.torch import load_file
from support import stock_fp16_on_cpu, weights
from trainer_support import (
    OVERFLOWS,
    SKIPPED,
    Recorder,
    arguments,
    examples,
    gpt2,
    logs,
    make,
    rates,
    train,
)
from transformers import Trainer, TrainerCallback

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap": {"step_mode": "overlap"},
    "overlap offload": {"step_mode": "overlap", "offload": "cpu"},
    "sync offload": {"offload": "cpu"},
    "delayed": {"step_mode": "delayed"},
    "delayed offload": {"step_mode": "delayed", "offload": "cpu"},
}
CURRENT = ["overlap", "overlap offload"]


def config(mode: str, **kwargs: Any) -> ScalerConfig:
    settings = {"init_scale": 1024.0, "growth_interval": 3, "optimizer_threads": 1}
    return ScalerConfig(**(settings | MODES[mode] | kwargs))


@contextmanager
def attached(trainer: Any, mode: str, **settings: Any) -> Iterator[Any]:
    """The Trainer with one line more, and at the end one less."""
    with nullcontext() if mode == "sync" else lazy():
        try:
            yield attach(trainer, config(mode, **settings))
        finally:
            detach(trainer)


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
    callbacks: Iterable[TrainerCallback] = (),
    resume: Path | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """One attached training from start to end."""
    trainer, recorder = make(path, overflows, model=model, **kwargs)
    for callback in callbacks:
        trainer.add_callback(callback)
    with attached(trainer, mode):
        train(trainer, resume_from_checkpoint=None if resume is None else str(resume))
        return outcome(trainer, recorder)


# --- the newest parameters: overlap, and state in host memory -------------------------------------


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
    for mode in CURRENT:
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


class Reader(TrainerCallback):
    """Reads every parameter and the learning rate, where callbacks are called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def read(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.seen.append((weights(model), optimizer.param_groups[0]["lr"]))

    on_optimizer_step = on_step_end = on_substep_end = read

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.seen.append([p.grad.clone() for p in model.parameters()])


class ForwardReader(Reader):
    """Reads them where a training forward begins."""

    on_optimizer_step = on_step_end = on_substep_end = TrainerCallback.on_step_end

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        def read(model: Any, _: Any) -> None:
            self.read(**kwargs)

        kwargs["model"].register_forward_pre_hook(read)


# --- one step late --------------------------------------------------------------------------------


def stepped(
    path: Path, model: Any, optimizer: Any, callbacks: Iterable[TrainerCallback], **kwargs: Any
) -> tuple[Any, Recorder]:
    """A Trainer with an optimizer of one group, and the Trainer's own schedule."""
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=arguments(path, learning_rate=0.1, **kwargs),
        train_dataset=examples(),
        eval_dataset=examples(16, start=500),
        callbacks=[*callbacks, recorder],
        optimizers=(optimizer, None),
    )
    recorder.trainer = trainer
    return trainer, recorder


def run_reference(
    path: Path, make_model: Callable[[], Any], prompt: int, reader: Reader
) -> dict[str, Any]:
    """Stock Trainer around the plain loop."""
    model = make_model()
    optimizer = ReferenceOptimizer(model.parameters(), prompt)
    trainer, recorder = stepped(path, model, optimizer, [Verdicts(), reader], max_grad_norm=0.0)
    stock_fp16_on_cpu(trainer.accelerator).scaler = ReferenceScaler(optimizer.reference)
    train(trainer)
    optimizer.reference.publish()
    return {
        "weights": weights(model),
        "momentum": [entry["momentum_buffer"] for entry in optimizer.reference.state()],
        "seen": [seen for seen in reader.seen if isinstance(seen, tuple)],
        "skipped": recorder.skipped,
        "losses": [entry["loss"] for entry in logs(trainer) if "loss" in entry],
        "rates": rates(trainer),
    }


def half() -> Any:
    return gpt2(OVERFLOWS).half()


def single() -> Any:
    return gpt2(OVERFLOWS)


@pytest.mark.parametrize(
    ("make_model", "mode"),
    [
        (single, "delayed"),
        (single, "delayed offload"),
        (half, "sync"),
        (half, "overlap"),
        (half, "sync offload"),
        (half, "delayed"),
    ],
)
def test_masters_in_a_trainer_equal_the_plain_loop(
    tmp_path: Path, make_model: Any, mode: str
) -> None:
    """Losses, rates, weights, momentum, and the parameters that callbacks see step by step.

    In ``delayed`` callbacks see newer ones than the forward, which is asked then.
    """
    warmup = 2
    prompt, cls = (warmup, ForwardReader) if "delayed" in mode else (NEVER_STALE, Reader)
    reference = run_reference(tmp_path / "reference", make_model, prompt, cls())
    model, reader = make_model(), cls()
    dtype = model.dtype
    trainer, recorder = stepped(tmp_path / "ours", model, momentum(model.parameters()), [reader])
    settings = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
    if "delayed" in mode:
        settings |= {"delay_warmup_steps": warmup, "delay_compensation": "none"}
    with attached(trainer, mode, **settings):
        train(trainer)
        # No fence is called here: the model is the newest when train() returns.
        assert_same(weights(model), reference["weights"], "weights")
        state = trainer.optimizer.state_dict()["state"]
    assert model.dtype is dtype
    assert_same([state[i]["momentum_buffer"] for i in range(len(state))], reference["momentum"])
    assert recorder.skipped == reference["skipped"]
    assert rates(trainer) == reference["rates"]
    assert_same([s for s in reader.seen if isinstance(s, tuple)], reference["seen"], "seen")
    losses = [entry["loss"] for entry in logs(trainer) if "loss" in entry]
    assert losses == reference["losses"]
    assert [i for i, skipped in enumerate(recorder.skipped) if skipped] == SKIPPED


# --- float16 weights, and the scale ---------------------------------------------------------------
