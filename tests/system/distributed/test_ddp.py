"""DDP on two gloo ranks: one rank overflows, both skip; the numbers are stock's, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import ddp_script
import pytest
import torch
from launching import accelerate_launch
from support import mlp, weights

from accel_scaler import attach

Results = list[dict[str, Any]]
SKIPPED = [window == ddp_script.OVERFLOW for window in range(ddp_script.WINDOWS)]
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return accelerate_launch("ddp_script.py", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return accelerate_launch("trainer_script.py", tmp_path_factory.mktemp("trainer"))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["weights"], other["weights"])
    for key in ("skipped", "scales", "rates"):
        assert one[key] == other[key], key
    # Where a window overflowed, ours says inf; torch's norm is inf or NaN.
    for mine, reference in zip(one["norms"], other["norms"], strict=True):
        assert mine == (reference if math.isfinite(reference) else math.inf)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_attached_equals_stock(ranks: Results, rank: int, kind: str) -> None:
    reference = ranks[rank][f"stock {kind}"]
    assert_same(ranks[rank][f"attached {kind}"], reference)
    assert reference["wrapped"]
    assert reference["skipped"] == SKIPPED
    assert not torch.equal(reference["weights"], weights(mlp()))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_clipping_it_equals_stock(ranks: Results, rank: int, kind: str) -> None:
    reference = ranks[rank][f"stock unclipped {kind}"]
    assert_same(ranks[rank][f"unclipped {kind}"], reference)
    assert not torch.equal(reference["weights"], ranks[rank][f"stock {kind}"]["weights"])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("rank", [0, 1])
def test_attaching_after_prepare_equals_attaching_before(
    ranks: Results, rank: int, kind: str
) -> None:
    """Though a schedule had wrapped the optimizer's ``step`` by then."""
    assert_same(ranks[rank][f"late {kind}"], ranks[rank][f"attached {kind}"])
    assert ranks[rank][f"late {kind}"]["recorded"] == SKIPPED
    assert ranks[rank][f"late {kind}"]["scaler"] == ranks[rank][f"attached {kind}"]["scaler"]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_an_overflow_on_one_rank_skips_on_both(ranks: Results, kind: str) -> None:
    for rank in ranks:
        result = rank[f"attached {kind}"]
        assert result["skipped"] == SKIPPED
        assert result["scales"] == SCALES
        # The schedule stands still while the step is skipped.
        assert result["rates"][ddp_script.OVERFLOW] == result["rates"][ddp_script.OVERFLOW - 1]
    assert torch.equal(
        ranks[0][f"attached {kind}"]["weights"], ranks[1][f"attached {kind}"]["weights"]
    )


def test_ranks_communicate_only_on_the_last_micro_batch(ranks: Results) -> None:
    for rank in ranks:
        assert rank["attached sgd"]["synced"] == [False, True] * ddp_script.WINDOWS


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_two_ranks_equal_one_rank_with_twice_the_batch(ranks: Results, kind: str) -> None:
    """To rounding: float16 products of 4 rows, averaged, against those of 8 rows."""
    alone = ddp_script.train(attach(ddp_script.plain()), kind)
    assert not alone["wrapped"]
    both = ranks[0][f"attached {kind}"]
    assert alone["skipped"] == both["skipped"]
    assert alone["scales"] == both["scales"]
    moved = torch.linalg.vector_norm(alone["weights"] - weights(mlp()))
    apart = torch.linalg.vector_norm(alone["weights"] - both["weights"])
    assert moved > 0.1
    assert apart < 0.02 * moved
    assert alone["norms"] == pytest.approx(both["norms"], rel=0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_under_ddp_equals_the_stock_trainer(trainers: Results, rank: int) -> None:
    ours, theirs = trainers[rank]["attached"], trainers[rank]["stock"]
    assert ours["scaler"].startswith("accel_scaler")
    assert theirs["scaler"].startswith("torch")
    assert theirs["skipped"] == [False, True, False, False]
    for key in ("skipped", "scales", "logs"):
        assert ours[key] == theirs[key], key
    assert torch.equal(ours["weights"], theirs["weights"])
    assert torch.equal(ours["weights"], trainers[1 - rank]["attached"]["weights"])
