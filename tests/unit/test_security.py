"""Checkpoints and sources: nothing that comes from a file or a user is executed.

``test_hostile_files.py`` has config and telemetry files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from async_support import assert_same
from places import ROOT
from torch.optim.lr_scheduler import LambdaLR

from accel_scaler import GradScaler, ScalerConfig, attach, detach

SOURCES = [
    path
    for name in ("accel_scaler", "recipes", "benchmarks")
    for path in (ROOT / name).rglob("*.py")
]
RUNS_WHAT_IT_READS = re.compile(
    r"^\s*(import|from) \w*(pickle|dill|joblib|marshal|shelve)|(?<![.\w])(?<!def )(eval|exec)\("
    r"|os\.(system|popen)|shell=True|allow_pickle=True"
    r"|yaml\.(?!safe_load\b|BaseLoader\b|load\(\w+, yaml\.BaseLoader\))\w*[lL]oad"
    r"|subprocess\.\w+\(f?['\"]|torch\.load\((?!.*weights_only=True)",
    re.MULTILINE,
)

MODES = [
    {"step_mode": "sync"},
    {"step_mode": "overlap"},
]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_source_runs_what_a_file_or_a_text_says() -> None:
    found = {path.name: RUNS_WHAT_IT_READS.search(path.read_text("utf-8")) for path in SOURCES}
    assert {name: match[0] for name, match in found.items() if match} == {}
    for bad in ("import pickle", "torch.load(path)", "yaml.load(x)"):
        assert RUNS_WHAT_IT_READS.search(bad)


# Checkpoints.


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)).to(dtype)


def loads_safely(state: Any, path: Path) -> Any:
    """``state`` after a file that is read as a checkpoint should be."""
    torch.save(state, path)
    before = torch.serialization.get_safe_globals()
    assert not [each for each in before if each.__module__.startswith("accel_scaler")]  # type: ignore[union-attr]
    torch.serialization.clear_safe_globals()  # torch has some of its own
    try:
        loaded = torch.load(path, weights_only=True)
    finally:
        torch.serialization.add_safe_globals(before)
    assert_same(loaded, state)
    return loaded


def test_a_scalers_state_is_plain_numbers(tmp_path: Path) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, hysteresis=2, max_consecutive_skips=9, min_scale=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.full((2, 4), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = loads_safely(scaler.state_dict(), tmp_path / "scaler.pt")
    fresh = GradScaler("cpu", hysteresis=2, max_consecutive_skips=9, min_scale=1.0)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == scaler.state_dict()


class Run:
    """An attached loop of a few windows, with everything that ``save_state`` writes."""

    def __init__(self, mode: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        config = ScalerConfig(init_scale=4.0, **mode)
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        model = model_of(dtype)
        inner = torch.optim.AdamW(model.parameters(), 0.1)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, inner, LambdaLR(inner, lambda step: 1.0)
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        detach(self.accelerator)

    def train(self, windows: int = 2) -> None:
        for _ in range(windows):
            self.accelerator.backward(self.model(torch.ones(2, 4)).float().sum())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_saved_state_loads_without_pickled_code(mode: dict[str, str], tmp_path: Path) -> None:
    with Run(mode, torch.float16) as run:
        run.train()
        run.accelerator.save_state(str(tmp_path), safe_serialization=False)
        names = {path.name for path in tmp_path.iterdir()}
        assert names >= {"pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"}
        assert not [name for name in names if name.startswith("custom_checkpoint")]
        assert run.accelerator._custom_objects == [], "Accelerate unpickles these as they are"
        for name in ("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"):
            loads_safely(torch.load(tmp_path / name, weights_only=True), tmp_path / "again.pt")
        run.accelerator.load_state(str(tmp_path))
        run.train(1)
