"""Which hazards a launch meets, and what attaching mends, from a plan made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from accel_scaler import ScalerConfig
from accel_scaler.config import Settings
from accel_scaler.doctor.diagnostics import hazards, mended
from accel_scaler.doctor.environment import Devices, LaunchPlan, Processes, Threads

T4S = Devices("cuda", ("Tesla T4", "Tesla T4"), True)
ON_A_DEVICE = ["F1", "F2", "F3", "F4", "F5", "F7"]


def found_with(
    *,
    devices: Devices = T4S,
    precision: str = "fp16",
    device: str = "cuda",
    ranks: int = 1,
    cores: int = 8,
    training: int = 4,
    **settings: Any,
) -> LaunchPlan:
    """The plan of a launch with these settings, all of them from the command line."""
    attach = settings.pop("attach", True)
    config = ScalerConfig(**settings)
    share = max(1, cores // ranks)
    auto = max(1, share - 1)
    asked = config.optimizer_threads
    own = config.step_mode != "sync" or config.offload != "none"
    kind = "one process" if ranks == 1 else "DDP"
    job = Processes(precision, kind, device, device == "cpu", 1, ranks, ranks, True)
    threads = Threads(cores, training, auto, auto if asked == "auto" else asked, own)
    versions = dict.fromkeys(("torch", "accelerate", "transformers"))
    sources = {name: f"--{name}" for name in settings}
    return LaunchPlan(versions, devices, job, threads, Settings(config, attach, sources))


STREAK = {"max_consecutive_skips": 50}


@pytest.mark.parametrize(
    ("facts", "expected", "away"),
    [
        # fp16 on a GPU
        ({}, ["F11"], ON_A_DEVICE),
        (STREAK, [], ON_A_DEVICE),
        ({"attach": False, "training": 1}, [*ON_A_DEVICE, "F11"], []),
        ({"enabled": False}, [*ON_A_DEVICE, "F11"], []),
        ({"offload": "cpu", **STREAK}, [], ON_A_DEVICE),
        ({"training": 1, "offload": "cpu", **STREAK}, [], [*ON_A_DEVICE, "F12"]),
        # fp16 on the CPU
        ({"device": "cpu", **STREAK}, [], ["F6"]),
        ({"device": "cpu", "training": 1, **STREAK}, ["F12"], ["F6"]),
        ({"device": "cpu", "training": 1, "ranks": 8, **STREAK}, [], ["F6"]),
        ({"device": "cpu", "training": 1, "step_mode": "overlap", **STREAK}, [], ["F6", "F12"]),
        ({"device": "cpu", "attach": False}, ["F6"], []),
        # nothing to scale
        ({"precision": "bf16"}, [], []),
        ({"precision": "no", "device": "cpu"}, [], []),
        # hazards with a word
        ({"device": "cpu", "devices": Devices(None, (), False), **STREAK}, ["slow-fp16"], ["F6"]),
        ({"device": "cpu", "devices": Devices(None, (), None), **STREAK}, [], ["F6"]),
        # settings that nothing reads
        ({"attach": False, "precision": "no", "hysteresis": 2}, ["unused-settings"], []),
        ({"precision": "no", "hysteresis": 2}, ["unused-settings"], []),
        ({"precision": "no", "telemetry": "run.jsonl", "underflow_interval": 5}, [], []),
    ],
)  # fmt: skip
def test_each_hazard_is_seen_where_it_is_met(
    facts: dict[str, Any], expected: list[str], away: list[str]
) -> None:
    found = found_with(**facts)
    assert [word for word, _ in hazards(found)] == expected
    assert [word for word, _ in mended(found)] == away


def test_unused_settings_are_named() -> None:
    found = found_with(precision="no", telemetry="run.jsonl", hysteresis=2, step_mode="overlap")
    ((_, text),) = hazards(found)
    assert text.startswith("hysteresis, step_mode: set, but not used")
