"""Telemetry reads no value from the device that was not read before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp
from torch.utils._python_dispatch import TorchDispatchMode

from accel_scaler import GradScaler, ScalerConfig
from accel_scaler.optimizer_step.boundary import Boundary
from accel_scaler.telemetry.recorder import make_recorder


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: numbers read out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads(clip: bool, telemetry: str | None) -> list[int]:
    torch.manual_seed(0)
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    recorder = make_recorder(scaler, ScalerConfig(telemetry=telemetry), {"rank": 0, "ranks": 1})
    scaler.parameter_names.add_module(model)
    boundary = Boundary(scaler, torch.device("cpu"), recorder)
    boundary.add(optimizer)
    counts = []
    for _ in range(6):
        scaler.scale(model(torch.randn(16, 8)).pow(2).mean()).backward()
        with Reads() as seen:
            if clip:
                boundary.clipping.clip_norm(list(model.parameters()), 0.5)
            boundary.step(optimizer)
        counts.append(seen.count)
        optimizer.zero_grad()
    recorder.close()
    return counts


@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "not clipped"])
def test_a_boundary_reads_as_many_numbers_with_telemetry_as_without(
    clip: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    without, with_file = reads(clip, None), reads(clip, str(path))
    assert with_file == without
    assert without[-1] == 1  # the verdict
    assert ('"norms":' in path.read_text()) == clip
