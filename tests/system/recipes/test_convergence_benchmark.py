"""benchmarks/convergence.py: its arithmetic, its check of ``overlap``, its tasks for a few steps.

And the plain sum that explains what it finds: how large a step a delayed update stands.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from accel_scaler import AsyncOptimizer

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


def descend(mode: str, rate: float, momentum: float, steps: int = 1000) -> float:
    """How far SGD is from the minimum of x * x / 2, begun at 1; a step late in ``delayed``."""
    x = torch.nn.Parameter(torch.ones((), dtype=torch.float32))
    sgd = torch.optim.SGD([x], lr=rate, momentum=momentum)
    with AsyncOptimizer(sgd, mode=mode) as optimizer:
        for _ in range(steps):
            (0.5 * x * x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return abs(x.item())


def late_by_hand(rate: float, momentum: float, steps: int = 1000) -> float:
    """The recurrence itself: the gradient is that of the parameter one update ago."""
    seen = newest = torch.ones(())
    velocity = torch.zeros(())
    for _ in range(steps):
        velocity = (velocity * momentum).add_(seen)
        seen, newest = newest, newest.add(velocity, alpha=-rate)
    return abs(newest.item())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_one_late_step_lowers_the_largest_rate_most_under_momentum(
    mode: str, momentum: float, one_thread: None
) -> None:
    # Late: z^2 - (1 + m) z + m + rate = 0, whose roots leave the unit circle at rate = 1 - m.
    limit = 1 - momentum if mode == "delayed" else 2 * (1 + momentum)
    assert descend(mode, 0.9 * limit, momentum) < 0.1
    assert not descend(mode, 1.1 * limit, momentum) < 10  # it may be NaN


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_delayed_is_the_recurrence_of_one_late_step(momentum: float, one_thread: None) -> None:
    late = [late_by_hand(0.05, momentum, steps) for steps in (1, 2, 3, 20)]
    assert late == [descend("delayed", 0.05, momentum, steps) for steps in (1, 2, 3, 20)]
    assert late[-1] != descend("sync", 0.05, momentum, 20)
