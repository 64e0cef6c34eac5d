"""The scaler's values in TensorBoard, read back from its file: of a loop, and of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from support import mlp, reset, weights
from telemetry_runs import INF, loss_of, sgd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_support import CONFIG, SKIPPED, logs, make, train

from accel_scaler import attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = 7


def read(folder: Path) -> EventAccumulator:
    (_,) = folder.glob("events.*")  # one file: no second writer was begun
    found = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    return found.Reload()


def scalars(found: EventAccumulator, tag: str) -> dict[int, float]:
    events = found.Scalars(tag)
    assert len({each.step for each in events}) == len(events), tag
    return {each.step: each.value for each in events}


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_of_a_loop(mode: str, tmp_path: Path) -> None:
    reset()
    accelerator: Any = Accelerator(
        cpu=True, mixed_precision="fp16", log_with="tensorboard", project_dir=tmp_path
    )
    attach(accelerator, tracker_interval=2, step_mode=mode, init_scale=1024.0)
    accelerator.init_trackers("run")
    plain, grads, scales = mlp(), {}, {}
    model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
    for window in range(WINDOWS):
        accelerator.backward(loss_of(model, window) * (INF if window == 4 else 1.0))
        scale = accelerator.scaler.get_scale()
        grads[window] = plain[0].weight.grad.float().numpy() / scale
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scales[window] = accelerator.scaler.get_scale()
        accelerator.log({"loss": 1.0}, step=100 * window)
    accelerator.end_training()
    detach(accelerator)

    found = read(tmp_path / "run")
    due = range(0, WINDOWS, 2)
    assert scalars(found, "scaler/scale") == {window: scales[window] for window in due}
    assert scalars(found, "scaler/skips") == {0: 0, 2: 0, 4: 1, 6: 1}
    assert list(scalars(found, "loss")) == [100 * window for window in range(WINDOWS)]
    for name in ("loss", "grad_norm", "clip_coefficient"):
        assert list(scalars(found, f"scaler/{name}")) == [0, 2, 6], name
    assert set(scalars(found, "scaler/headroom")) == set(due)
    histograms = found.Histograms("scaler/gradients/0.weight")
    assert [each.step for each in histograms] == [0, 2, 6]
    for each in histograms:
        said, values = each.histogram_value, grads[each.step]
        assert said.num == sum(said.bucket) == values.size
        assert (said.min, said.max) == pytest.approx((values.min(), values.max()), rel=1e-5)
        assert said.sum_squares == pytest.approx(np.square(values, dtype="f8").sum(), rel=1e-4)
    assert len(found.Tags()["histograms"]) == len(list(plain.parameters()))


def test_of_a_trainer_nothing_is_logged_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    ends, entries = [], []
    for interval in (None, 2):
        more: dict[str, Any] = {"report_to": ["tensorboard"]} if interval else {}
        trainer, recorder = make(tmp_path / "out", logging_steps=3, **more)
        attach(trainer, CONFIG, tracker_interval=interval)
        train(trainer)
        ends.append(weights(trainer.model))
        entries.append((logs(trainer), [entry.keys() for entry in trainer.state.log_history]))
        detach(trainer)
    assert ends[0].equal(ends[1])
    for one, other in zip(entries[0][0], entries[1][0], strict=True):
        assert one == other  # what is printed is as it was

    found = read(tmp_path / "board")
    # Windows 0, 2, 4 and 6 end at steps 1, 3, 5, 7; the Trainer logs at 3 and 6.
    scales = scalars(found, "train/scaler_scale")
    assert scales == {step: recorder.scales[step - 1] for step in (1, 3, 5, 6, 7)}
    assert set(scalars(found, "train/scaler_skips")) == set(scales)
    assert list(scalars(found, "train/loss")) == [3, 6]
    assert SKIPPED == [2, 5]
    # Of window 2, which was skipped, there are none; so they are of 0, 4 and 6.
    assert list(scalars(found, "train/scaler_loss")) == [1, 5, 7]
    histograms = found.Histograms("scaler/gradients/transformer.wte.weight")
    assert [each.step for each in histograms] == [1, 5, 7]


def test_a_trainer_that_reports_to_nobody_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = make(tmp_path, max_steps=3)
    attach(trainer, CONFIG, tracker_interval=1)
    train(trainer)
    detach(trainer)
    said = [r.getMessage() for r in caplog.records if "tracker_interval" in r.getMessage()]
    assert len(said) == 1
    assert "report_to" in said[0]
