"""Accelerate's shipped check scripts as tests, in this process. Not collected by itself.

Stock passes them in float32, whatever precision it is told: it has no fp16 on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize("name", ["test_sync", "test_script"])
def test_the_script_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    monkeypatch.setattr("sys.argv", [name])
    script.main()
