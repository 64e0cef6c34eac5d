"""benchmarks/convergence.py: its arithmetic, its check of ``overlap``, its tasks."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

pytest.importorskip("datasets")
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def convergence() -> Iterator[Any]:
    """The benchmark as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import convergence as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    yield module
    for name in ("convergence", "finetune_classifier", "stdlib_docstrings", "trainer_swap"):
        sys.modules.pop(name, None)


@pytest.fixture
def few_looks(convergence: Any, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Looks are fences: with one after every step nothing would be late."""
    monkeypatch.setattr(convergence, "LOOKS", 2)
    monkeypatch.setattr(convergence, "HELD_OUT", 8)
    labels = {"logging": ["logging"], "xml": ["xml"]}  # the whole library takes seconds to read
    monkeypatch.setattr(convergence.recipe("stdlib_docstrings"), "LABELS", labels)


def result(convergence: Any, mode: str, seed: int, *losses: float, weights: str = "same") -> Any:
    run = convergence.Run("scratch", "sgd", 0.5, "high", len(losses) - 1, mode, seed)
    return convergence.Result(run, dict(enumerate(losses)), weights, 0, 1.0)


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_table_pairs_runs_by_seed(convergence: Any) -> None:
    losses = {"sync": [2.0, 4.0, 9.0], "delayed": [2.5, 4.25, 9.25]}
    results = [
        result(convergence, mode, seed, 10.0, final - 0.5, final)
        for mode, finals in losses.items()
        # Not in the order of the seeds: pairs go by seed, not by place.
        for seed, final in reversed(list(enumerate(finals)))
    ]
    head, _, sync, delayed = rows_of(convergence.table(results))
    assert len(head) == len(sync) == len(delayed)
    assert sync[:3] == ["scratch, 2", "SGD, momentum 0.9, lr 0.5 (high)", "sync"]
    assert sync[3] == f"{5:.3f} ± {statistics.stdev([2.0, 4.0, 9.0]):.3f}"
    assert sync[4] == f"{4.5:.3f} ± {statistics.stdev([1.5, 3.5, 8.5]):.3f}"
    assert sync[5:] == ["", "", ""]
    gaps = [0.5, 0.25, 0.25]
    assert delayed[5] == f"+{sum(gaps) / 3:.3f} ± {statistics.stdev(gaps):.3f}"
    assert delayed[6] == f"{(2.5 / 2 + 4.25 / 4 + 9.25 / 9) / 3:.3f}"
    assert delayed[7] == "3/3"


@pytest.mark.parametrize("change", ["weights", "a loss", "nothing"])
def test_one_different_bit_of_overlap_fails_the_script(
    convergence: Any, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = math.nextafter(2.0, 3.0) if change == "a loss" else 2.0
    weights = "other" if change == "weights" else "same"
    results = [
        result(convergence, "sync", 0, 9.0, 2.0, math.nan),
        result(convergence, "overlap", 0, 9.0, loss, math.nan, weights=weights),
        result(convergence, "sync", 1, 9.0, 2.5, 3.0),
        result(convergence, "overlap", 1, 9.0, 2.5, 3.0),
    ]
    convergence.save(tmp_path / "out.json", results)
    status = convergence.main(["--show", str(tmp_path / "out.json")])
    said = capsys.readouterr().out.splitlines()[-1]
    if change == "nothing":
        assert status == 0
        assert said.startswith("overlap equals sync in all 2 pairs")
    else:
        assert status == 1
        assert said.startswith("FAULT: overlap differs from sync in 1 of 2")
        assert "seed=0" in said


@pytest.mark.slow
@pytest.mark.usefixtures("few_looks")
def test_the_script_trains_each_mode_as_named(
    convergence: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    few = ["--tasks", "trainer", "scratch", "--optimizers", "sgd", "--seeds", "1", "--steps", "6"]
    # One rate is enough.
    rates = {key: dict(list(value.items())[:1]) for key, value in convergence.RATES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convergence, "RATES", rates)
        assert convergence.main([*few, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "overlap equals sync in all 2 pairs" in said
    results = {(r.run.task, r.run.mode): r for r in convergence.load(out)}
    assert len(results) == 8 == len(json.loads(out.read_text()))
    for task in ("trainer", "scratch"):
        weights = [results[task, mode].weights for mode in convergence.MODES]
        # Late, and late after a fresh step, are neither fresh nor the same as each other.
        assert [weights.index(w) for w in weights] == [0, 0, 2, 3]
        for mode in convergence.MODES:
            assert list(results[task, mode].losses) == [0, 3, 6]
            assert all(map(math.isfinite, results[task, mode].losses.values()))
        starts = {results[task, mode].losses[0] for mode in convergence.MODES}
        assert len(starts) == 1
