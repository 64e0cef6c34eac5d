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
from support import mlp
from torch.optim.lr_scheduler import LambdaLR

from accel_scaler import GradScaler, attach, detach

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

pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_source_runs_what_a_file_or_a_text_says() -> None:
    found = {path.name: RUNS_WHAT_IT_READS.search(path.read_text("utf-8")) for path in SOURCES}
    assert {name: match[0] for name, match in found.items() if match} == {}
    for bad in ("import pickle", "torch.load(path)", "yaml.load(x)"):
        assert RUNS_WHAT_IT_READS.search(bad)


# Checkpoints.


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
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.full((2, 8), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    state = loads_safely(scaler.state_dict(), tmp_path / "scaler.pt")
    fresh = GradScaler("cpu", hysteresis=2, max_consecutive_skips=9, min_scale=1.0)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_saved_state_loads_without_pickled_code(mode: Any, tmp_path: Path) -> None:
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), step_mode=mode)
    model: Any = mlp().half()
    inner = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = LambdaLR(inner, lambda step: 1.0)
    model, optimizer, _ = accelerator.prepare(model, inner, schedule)
    accelerator.backward(model(torch.ones(2, 8).half()).float().sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    saved = {"pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= saved
    assert not [name for name in names if name.startswith("custom_checkpoint")]
    assert accelerator._custom_objects == [], "Accelerate unpickles these as they are"
    for name in saved:
        loads_safely(torch.load(tmp_path / name, weights_only=True), tmp_path / "again.pt")
    accelerator.load_state(str(tmp_path))
    detach(accelerator)
