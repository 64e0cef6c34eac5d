"""The asynchronous optimizer under torch's FSDP2 on two gloo ranks: torch's numbers, bit for bit.

Every group of parameters is gathered before it is used, some ahead of time, while the optimizer
thread (slowed down) still updates the shards: the wait has to come before the gather.
"""

from __future__ import annotations

from typing import Any

import async_fsdp2_script as script
import pytest
import torch
from launching import torchrun
from two_ranks import OVERFLOW, WINDOWS, differing
from versions import before_torch

pytestmark = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")

Results = list[dict[str, Any]]
SKIPPED = [window == OVERFLOW for window in range(WINDOWS)]
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0]
RUNS = [(case, kind, layout) for (kind, layout), cases in script.RUNS.items() for case in cases]
SCALED = [run for run in RUNS if run[2] != "plain root"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return torchrun("async_fsdp2_script.py", tmp_path_factory.mktemp("async_fsdp2"))


def name_of(run: tuple[str, str, str]) -> str:
    return ", ".join(run)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_every_mode_equals_torch_on_the_same_ranks(
    ranks: Results, run: tuple[str, str, str]
) -> None:
    """Losses, norms, scales, rates, parameters, optimizer state; ``delayed`` as written by hand."""
    case, kind, layout = run
    for rank in ranks:
        expected = rank[script.reference_key(kind, layout, case)]
        assert differing(rank[name_of(run)], expected) == []
    one, other = (rank[name_of(run)] for rank in ranks)
    assert one["losses"] != other["losses"]  # each had rows of its own
    if layout != "plain root":
        assert torch.equal(one["weights"], other["weights"])


@pytest.mark.parametrize("run", SCALED, ids=name_of)
def test_an_overflow_in_one_shard_is_one_skip_on_both_ranks(
    ranks: Results, run: tuple[str, str, str]
) -> None:
    for rank in ranks:
        result = rank[name_of(run)]
        assert result["skipped"] == SKIPPED
        assert result["scales"] == SCALES
        assert result["norms"][OVERFLOW] == float("inf")
        assert bool(result["weights"].isfinite().all())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_our_scaler_in_torchs_own_loop_is_torchs(ranks: Results, kind: str) -> None:
    """``unscale_``, clip, ``step``, ``update``: an inf in one shard is found on both ranks."""
    for rank in ranks:
        mine = rank[f"plain loop, {kind}"]
        assert differing(mine, rank[f"torch None, {kind}, resharded"]) == []
        assert mine["skipped"] == SKIPPED


def test_the_references_differ_where_they_should(ranks: Results) -> None:
    """Or the tests above would show nothing: the delay changes the numbers, clipping clips."""
    newest, stale, warm = (
        ranks[0][f"torch {after}, sgd, resharded"] for after in (None, 0, script.WARMUP)
    )
    for one, other in ((newest, stale), (newest, warm), (stale, warm)):
        assert {"losses", "weights", "norms"} <= set(differing(one, other))
    assert max(newest["norms"][:OVERFLOW]) > 0.5


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_no_collective_leaves_the_training_thread(
    ranks: Results, run: tuple[str, str, str]
) -> None:
    for rank in ranks:
        names, elsewhere = rank[name_of(run)]["collectives"]
        assert "_allgather_base_" in names
        assert "_reduce_scatter_base_" in names
        assert elsewhere == 0


@pytest.mark.parametrize("case", ["overlap", "overlap offload", "delayed", "delayed offload"])
def test_collectives_come_in_the_order_of_a_synchronous_run(ranks: Results, case: str) -> None:
    for rank in ranks:
        expected = rank["sync, sgd, resharded"]["collectives"]
        assert rank[f"{case}, sgd, resharded"]["collectives"] == expected


def test_the_watch_sees_a_collective_on_another_thread(ranks: Results) -> None:
    assert [rank["control"] for rank in ranks] == [1, 1]


@pytest.mark.parametrize("change", script.CHANGES, ids=str)
def test_checkpoints_interchange_with_the_stock_optimizer(ranks: Results, change: Any) -> None:
    """Through torch.distributed.checkpoint's state dicts, sharded or full, both directions.

    The model is loaded after the optimizer was wrapped, before its first step.
    """
    kind, first, second, full = change
    for rank in ranks:
        mine, stock = rank[f"{first} to {second}, {kind}"], rank[f"stock {full}, {kind}"]
        assert mine["kinds"] == stock["kinds"]
        assert ("DTensor" in mine["kinds"]) is not full
        assert mine["saved"].keys() == stock["saved"].keys()
        assert all(map(torch.equal, mine["saved"].values(), stock["saved"].values()))
        assert torch.equal(mine["weights"], stock["weights"])
        assert len(mine["state"]) == len(stock["state"]) > 0
        assert all(map(torch.equal, mine["state"], stock["state"]))


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
@pytest.mark.parametrize(
    ("key", "name"),
    [("Adafactor", "Adafactor"), ("Muon", "Muon"), ("transformers", "Adafactor"), ("own", "Own")],
)
def test_an_optimizer_that_a_shard_is_not_enough_for_is_refused(
    ranks: Results, key: str, name: str, mode: str
) -> None:
    """With the reason; and a second time the same, so the first left nothing behind."""
    for rank in ranks:
        for attempt in (1, 2):
            said = rank["refused"][f"{key} {mode} {attempt}"]
            assert said.startswith(f"UnsupportedError: {name} may need more of a sharded parameter")
            assert "communicate in its step" in said


def test_sharded_float16_parameters_are_refused(ranks: Results) -> None:
    for rank in ranks:
        assert "float16 gradients are sharded" in rank["refused"]["half"]
        assert "load the model in float32" in rank["refused"]["half"]
