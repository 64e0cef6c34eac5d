"""The asynchronous optimizer under DDP on two gloo ranks: torch's numbers, bit for bit.

The references are torch's own scaler, clipping and optimizer, on the same two ranks, with the
one-step delay of ``delayed`` written out by hand. The optimizer thread is slowed down all along.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import async_ddp_script as script
import pytest
import torch
from launching import RANKS, accelerate_launch, free_port
from places import HELPERS
from two_ranks import OVERFLOW, WINDOWS, differing
from versions import before_torch

NEEDS_STREAMS = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")

Results = list[dict[str, Any]]
SKIPPED = [window == OVERFLOW for window in range(WINDOWS)]
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0]

RUNS = [
    *((f"raw {case}, {kind}, {b}") for (kind, b), cases in script.RAW.items() for case in cases),
    *((f"accelerate {case}, {kind}") for kind, cases in script.ATTACHED.items() for case in cases),
]


def reference_of(run: str) -> str:
    """The run that it must equal."""
    layer, _, rest = run.partition(" ")
    case, _, name = rest.partition(", ")
    if name.startswith("fused"):  # torch's own fused step on a CPU is no reference
        return f"{layer} sync, {name}"
    return f"{layer} torch {script.STALE_AFTER.get(case)}, {name}"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return accelerate_launch("async_ddp_script.py", tmp_path_factory.mktemp("async_ddp"))


@pytest.mark.parametrize("run", RUNS)
def test_every_mode_equals_torch_on_the_same_ranks(ranks: Results, run: str) -> None:
    """``delayed``: torch with the delay by hand. Gradients may be views of buckets that the next
    backward overwrites, a bucket may hold one gradient alone."""
    for rank in ranks:
        assert differing(rank[run], rank[reference_of(run)]) == []
    one, other = (rank[run] for rank in ranks)
    assert torch.equal(one["weights"], other["weights"])
    assert one["losses"] != other["losses"]  # each had rows of its own


@pytest.mark.parametrize("run", RUNS)
def test_an_overflow_on_one_rank_is_one_skip_on_both(ranks: Results, run: str) -> None:
    for rank in ranks:
        result = rank[run]
        assert result["skipped"] == SKIPPED
        assert result["scales"] == SCALES
        assert result["rates"][OVERFLOW] == result["rates"][OVERFLOW - 1]
        assert bool(result["weights"].isfinite().all())


def test_the_references_differ_where_they_should(ranks: Results) -> None:
    """Or the tests above would show nothing: the delay and its warm-up change the numbers."""
    for layer, name in (("raw", "sgd, views"), ("accelerate", "sgd")):
        newest, stale, warm = (
            ranks[0][f"{layer} torch {after}, {name}"] for after in (None, 0, script.WARMUP)
        )
        for one, other in ((newest, stale), (newest, warm), (stale, warm)):
            assert {"losses", "weights", "norms"} <= set(differing(one, other))
        assert max(newest["norms"][:OVERFLOW]) > 0.5  # it clipped


@pytest.mark.parametrize("run", RUNS)
def test_no_collective_leaves_the_training_thread(ranks: Results, run: str) -> None:
    for rank in ranks:
        names, elsewhere = rank[run]["collectives"]
        assert "allreduce_" in names
        assert elsewhere == 0
        if run.startswith("raw"):
            expected = rank[reference_of(run)]["collectives"][0]
            assert names == expected  # not one more either, in the same order


def test_the_watch_sees_a_collective_on_another_thread(ranks: Results) -> None:
    assert [rank["control"] for rank in ranks] == [1, 1]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, str]]]:
    """Exit status and output of both ranks, for each way to fail."""
    folder = tmp_path_factory.mktemp("failures")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    subprocess.run(
        [
            *(sys.executable, str(HELPERS / "async_ddp_script.py"), str(folder)),
            *(str(free_port()) for _ in script.FAILURES),
        ],
        check=True,
        timeout=150,
        env=environment | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
    )
    statuses = torch.load(folder / "statuses.pt")
    return {
        how: [
            (statuses[how, rank], (folder / f"{how}{rank}.txt").read_text())
            for rank in range(RANKS)
        ]
        for how in script.FAILURES
    }


@pytest.mark.parametrize("how", ["exit", pytest.param("sharded", marks=NEEDS_STREAMS)])
def test_a_rank_that_dies_ends_the_other_with_an_error(failures: Any, how: str) -> None:
    """Though an update was on the optimizer thread: no hang, and no exit without a word."""
    (status, output), (other_status, _) = failures[how]
    assert other_status == 3
    assert status == 1
    assert "window 2" in output
    assert "window 5" not in output
    assert "Traceback" in output
    assert "gloo" in output.lower()


def test_an_optimizer_that_fails_on_one_rank_ends_both_with_an_error(failures: Any) -> None:
    (status, output), (other_status, other_output) = failures["worker"]
    assert other_status == 1
    assert "StepError" in other_output
    assert "the kernel of rank 1 failed" in other_output  # its own traceback
    assert status == 1
    assert "Traceback" in output
    assert "gloo" in output.lower()
