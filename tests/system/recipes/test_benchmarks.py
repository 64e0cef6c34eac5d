"""Each benchmark for two turns of something tiny: its table has its rows."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = ROOT / "benchmarks"
NUMBER = r" +-?[\d.]+"
TINY = {"layers": 1, "width": 16, "heads": 2, "vocab": 32, "length": 8, "batch": 2}
GPU = ["--device=cpu", "--threads=1", "--rounds=1", "--blocks=1", "--windows=1"]
GPU += [f"--{key}={value}" for key, value in TINY.items()]
MISMATCH = ["--layers=1", "--seeds=1", "--rows=2", "--length=8"]
LOAD = ["--case", "long", "--windows", "100", "--variant", "sync"]

ROWS: dict[str, tuple[list[str], str, int]] = {
    "boundary": (["--repeats", "2"], rf"^tiny +(step|skip, one \w+)({NUMBER}){{3}}$", 3),
    "guard": (["--repeats", "2"], rf"^tiny +(no )?clip({NUMBER}){{5}}$", 2),
    "overlap": (["--repeats", "2"], rf"^(sleeps|small|runs) [a-zA-Z ]+({NUMBER}){{2}} +-?\d+%", 3),
    "telemetry": (["--repeats", "2"], rf"^tiny +(step|skip)({NUMBER}){{4}}$", 2),
    "overflow": (["--repeats", "1"], rf"^(in|out)side +(step|skip)({NUMBER}){{5}}$", 4),
    "load": (LOAD, rf"MB({NUMBER}){{10}}", 1),
    "grpo_mismatch": (MISMATCH, r"^\| (bf16|fp16) ", 3),
    "gpu": ([*GPU, "--variants", "stock", "sync", "--accumulation", "1"], r"^(stock|sync) +\d+", 2),
}
"""Arguments, what a row of the table looks like, and how many there are."""


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Benchmarks silence warnings in the process that they are."""
    logger = logging.getLogger("accel_scaler")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def benchmark() -> Iterator[Callable[[str], ModuleType]]:
    known = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - known:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.process
@pytest.mark.parametrize("name", ROWS)
def test_the_table_has_its_rows(
    benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, row, count = ROWS[name]
    module = benchmark(name)
    if hasattr(module, "CASES"):
        for each in (module, benchmark("boundary")):
            monkeypatch.setattr(each, "CASES", {"tiny": [(8, 8), (8,)]})
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert not module.main()
    printed = capsys.readouterr().out
    assert len(re.findall(row, printed, re.MULTILINE)) == count, printed
