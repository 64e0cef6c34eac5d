"""What trackers are told of a device's gradients; no number depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import DEVICE
from support import mlp, reset, weights
from telemetry_runs import batch, sgd
from torch import Tensor
from tracker_fakes import KeepingTracker, Writer

from accel_scaler import ScalerConfig, attach, detach

STEPS = 6
OVERFLOW = 3


def train(
    mode: Any, interval: int | None
) -> tuple[Tensor, KeepingTracker, list[dict[str, Tensor]]]:
    """The weights; what the tracker was told; each window's gradients, unscaled."""
    reset()
    accelerator: Any = Accelerator(mixed_precision="fp16")
    accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
    attach(accelerator, ScalerConfig(init_scale=1024.0, step_mode=mode, tracker_interval=interval))
    tracker, plain = KeepingTracker(Writer()), mlp(64).to(DEVICE)
    accelerator.trackers.append(tracker)
    model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
    looks = []
    for step in range(STEPS):
        x, y = (each.to(DEVICE) for each in batch(step))
        loss = (model(x).float() - y).square().mean()
        accelerator.backward(loss * (float("inf") if step == OVERFLOW else 1.0))
        scale = accelerator.scaler.get_scale()
        looks.append({n: p.grad.float() / scale for n, p in plain.named_parameters()})
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    detach(accelerator)
    return weights(plain).cpu(), tracker, looks


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_they_are_told_of_a_devices_gradients(mode: str) -> None:
    without, nothing, _ = train(mode, None)
    ends, tracker, looks = train(mode, 1)
    assert torch.equal(ends, without)
    assert nothing.told == []
    assert [step for _, step in tracker.told] == list(range(STEPS))
    told = tracker.run.histograms
    assert {step for _, step in told} == set(range(STEPS)) - {OVERFLOW}
    for (tag, step), said in told.items():
        values = looks[step][tag.removeprefix("scaler/gradients/")].cpu()
        assert said["num"] == sum(said["counts"]) == values.numel()
        ends_at = float(values.min()), float(values.max())
        assert (said["min"], said["max"]) == pytest.approx(ends_at, rel=1e-4, abs=1e-7)
        squares = float(values.square().sum())
        assert said["sum_squares"] == pytest.approx(squares, rel=1e-3, abs=1e-9)
