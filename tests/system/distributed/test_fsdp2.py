"""FSDP2 on two gloo ranks: an inf in one rank's shard is every rank's overflow."""

from __future__ import annotations

from typing import Any

import fsdp2_script
import pytest
import torch
from launching import torchrun
from versions import before_torch

pytestmark = before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")

Results = list[dict[str, Any]]
KINDS = ["sgd", "adamw", "fused"]
MOVED = [step != fsdp2_script.OVERFLOW for step in range(fsdp2_script.STEPS)]
SCALES = [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return torchrun("fsdp2_script.py", tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", ["ours", "boundary"])
def test_an_overflow_in_one_shard_skips_on_both_ranks(ranks: Results, loop: str, kind: str) -> None:
    for rank in ranks:
        assert rank[f"{loop} {kind}"]["moved"] == MOVED
        assert rank[f"{loop} {kind}"]["scales"] == SCALES
    one, other = (rank[f"{loop} {kind}"] for rank in ranks)
    assert torch.equal(one["weights"], other["weights"])
    assert bool(one["weights"].isfinite().all())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("loop", ["ours", "boundary"])
def test_it_equals_torchs_scaler(ranks: Results, loop: str, kind: str) -> None:
    for rank in ranks:
        reference, mine = rank[f"torch {kind}"], rank[f"{loop} {kind}"]
        assert reference["moved"] == MOVED
        assert torch.equal(mine["weights"], reference["weights"])
        assert mine["scales"] == reference["scales"]
        assert mine["scaler"] == reference["scaler"] | {"_consecutive_skips": 0}


def test_the_fused_optimizer_agrees_with_the_plain_one(ranks: Results) -> None:
    for rank in ranks:
        torch.testing.assert_close(
            rank["ours fused"]["weights"], rank["torch adamw"]["weights"], rtol=1e-4, atol=1e-5
        )
        assert torch.equal(rank["boundary fused"]["weights"], rank["ours fused"]["weights"])


def test_ranks_agree_only_where_their_gradients_differ(ranks: Results) -> None:
    assert [rank["agreed"] for rank in ranks] == [True, True]
    assert [rank["not sharded"] for rank in ranks] == [False, True]
    assert [rank["none"] for rank in ranks] == [False, False]
