"""The scaler's values in TensorBoard, read back from its file: of a loop, and of a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from support import mlp, reset
from telemetry_runs import INF, loss_of, sgd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_scaler import attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = 7


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Of each tag its values by step; the file is the only one: no second writer was begun."""
    (_,) = folder.glob("events.*")
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: {each.step: each.value for each in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
    }


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_of_a_loop_they_stand_at_the_loops_own_steps(mode: str, tmp_path: Path) -> None:
    reset()
    accelerator: Any = Accelerator(
        cpu=True, mixed_precision="fp16", log_with="tensorboard", project_dir=tmp_path
    )
    attach(accelerator, step_mode=mode, init_scale=1024.0)
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
        accelerator.log({"loss": 1.0}, step=100 * window)
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
