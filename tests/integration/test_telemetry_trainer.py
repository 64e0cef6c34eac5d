"""A Trainer's telemetry: a window a step, values in its logs; a loop's in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import mlp, reset, weights
from telemetry_runs import INF, kinds_of, lines_of, loss_of, noted_in, sgd, windows_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_support import CONFIG, SKIPPED, logs, make, train

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


def config(path: Path | None = None, **more: Any) -> ScalerConfig:
    telemetry = None if path is None else str(path)
    return ScalerConfig(**CONFIG.changed(), telemetry=telemetry, **more)


def test_a_run_has_a_window_a_step_and_the_same_numbers(tmp_path: Path) -> None:
    path, ends = tmp_path / "run.jsonl", []
    for telemetry in (None, path):
        trainer, recorder = make(tmp_path / "out", eval_strategy="steps", eval_steps=4)
        attach(trainer, config(telemetry, step_mode="overlap"))
        train(trainer)
        if telemetry:
            assert kinds_of(path).count("window") == trainer.state.global_step == STEPS
            found = windows_of(path)
            assert [line["next_scale"] for line in found] == recorder.scales
            assert [n for n, line in enumerate(found) if line["skipped"]] == SKIPPED
            logged = [entry for entry in trainer.state.log_history if "loss" in entry]
            for line, entry in zip(found, logged, strict=True):
                if not line["skipped"]:
                    assert line["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-6)
                assert len(line["lr"]) == 2  # with and without decay
                assert line["loss"] == pytest.approx(entry["loss"], rel=1e-6)
            assert all("optimizer_us" in line for line in found if not line["skipped"])
        ends.append((weights(trainer.model), logs(trainer)))
        detach(trainer)
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert lines_of(path)[-1]["kind"] == "end"
    noted, params = noted_in(path), list(trainer.model.parameters())
    assert (
        noted.pop("parameters")
        == noted.pop("parameters_trained")
        == [sum(p.numel() for p in params)]
    )
    assert noted.pop("parameter_bytes") == [sum(p.nbytes for p in params)]
    assert 5e7 < noted.pop("host_peak_bytes")[0] < 1e11
    evaluated = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert (noted, len(evaluated)) == ({"eval_loss": evaluated}, 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])  # with it the Trainer computes the loss
def test_the_loss_is_what_the_trainer_logs_to_the_odd_end_of_an_epoch(
    tmp_path: Path, smoothing: float
) -> None:
    path = tmp_path / "run.jsonl"
    trainer, _ = make(
        tmp_path / "out",
        gradient_accumulation_steps=5,
        max_steps=-1,
        num_train_epochs=1,
        label_smoothing_factor=smoothing,
    )
    attach(trainer, config(path))
    train(trainer)
    detach(trainer)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 10  # of 48 micro-batches: the last one has 3
    assert [line["loss"] for line in windows_of(path)] == pytest.approx(logged, rel=1e-6)


def test_the_logs_have_scale_and_skips(tmp_path: Path) -> None:
    trainer, recorder = make(tmp_path)
    attach(trainer, config())
    train(trainer)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["scaler_scale"] for entry in logged] == recorder.scales
    skips = [sum(n <= step for n in SKIPPED) for step in range(STEPS)]
    assert [entry["scaler_skips"] for entry in logged] == skips
    (last,) = [entry for entry in trainer.state.log_history if "train_runtime" in entry]
    assert "scaler_scale" not in last
    detach(trainer)
    trainer.log({"loss": 1.0})
    assert "scaler_scale" not in trainer.state.log_history[-1]


def test_log_values_false_leaves_the_logs_alone(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    train(attach(trainer, config(), log_values=False))
    history, accelerator = trainer.state.log_history, trainer.accelerator
    assert accelerator.scaler_history.skips == len(SKIPPED)
    assert sum("loss" in entry for entry in history) == STEPS
    assert [key for entry in history for key in entry if "scaler" in key] == []
    got: list[Any] = []
    tracker = SimpleNamespace(name="a", log=lambda values, step: got.append(values))
    accelerator.trackers = [tracker]
    accelerator.log({"loss": 1.0})
    assert got == [{"loss": 1.0}]


def test_each_accelerator_of_a_search_is_a_session_of_its_own(tmp_path: Path) -> None:
    """A hyperparameter search makes a new accelerator for each trial; nothing is collected yet."""
    path = tmp_path / "run.jsonl"
    trainer, _ = make(tmp_path / "out", max_steps=2, overflows=())
    attach(trainer, config(path))
    before = trainer.accelerator
    train(trainer)
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator is not before
    train(trainer)
    detach(trainer)
    one = ["start", "names", "window", "window", "end"]
    assert kinds_of(path) == one * 2
    assert [line["step"] for line in windows_of(path)] == [0, 1, 0, 1]


WINDOWS = 7


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Of each tag its values by step; the file is the only one: no second writer was begun."""
    (_,) = folder.glob("events.*")
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: {each.step: each.value for each in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
    }


def test_of_a_loop_they_stand_at_the_loops_own_steps(tmp_path: Path) -> None:
    reset()
    accelerator: Any = Accelerator(
        cpu=True, mixed_precision="fp16", log_with="tensorboard", project_dir=tmp_path
    )
    attach(accelerator, init_scale=1024.0)
    accelerator.init_trackers("run")
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
    scales, norms = {}, {}
    for window in range(WINDOWS):
        accelerator.backward(loss_of(model, window) * (INF if window == 4 else 1.0))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        scales[100 * window] = accelerator.scaler.get_scale()
        if window != 4:
            norms[100 * window] = pytest.approx(norm)
        accelerator.log({"loss": 1.0, "val/accuracy": 0.5}, step=100 * window)
    own = 100 * WINDOWS  # with a value that the user logs under the same name
    accelerator.log({"loss": 1.0, "scaler/scale": 3.0}, step=own)
    scales[own], norms[own] = 3.0, pytest.approx(norm)
    accelerator.end_training()
    detach(accelerator)

    found = scalars(tmp_path / "run")
    assert list(found["loss"]) == list(scales)
    assert found["scaler/scale"] == scales
    assert list(found["scaler/skips"].values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found["scaler/grad_norm"] == norms
