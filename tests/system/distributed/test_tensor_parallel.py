"""Tensor and sequence parallelism: partial gradients, and ranks that must agree on a skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launching import RANKS, torchrun
from tensor_parallel_script import SCALE, STEPS, WAYS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return torchrun("tensor_parallel_script.py", tmp_path_factory.mktemp("tensor_parallel"))


@pytest.mark.parametrize("attached", [False, True], ids=["AsyncOptimizer", "attach"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("mode", "offload"), WAYS)
def test_two_ranks_train_as_one_process_does(
    results: list[dict[str, Any]], mode: str, offload: str, clip: bool, attached: bool
) -> None:
    """An overflow in rank 1's shard is skipped by both; the replicated parameter stays one."""
    expected = results[0][f"alone {clip}"]
    each = [result[f"{mode} {offload} {clip} {attached}"] for result in results]
    assert each[0]["partial"] == [True] * STEPS, "this gradient is what the test is about"
    assert torch.equal(each[0]["replicated"], each[1]["replicated"])
    for found in each:
        torch.testing.assert_close(found["weights"], expected["weights"])
        assert found["scale"] == expected["scale"] == SCALE / 2
        torch.testing.assert_close(found["norms"], each[0]["norms"])
    finite = [n for n in each[0]["norms"] if n != float("inf")]
    torch.testing.assert_close(finite, [n for n in expected["norms"] if n == n and n < 1e30])


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_overflow_beside_shards_is_one_for_all(results: list[dict[str, Any]], rank: int) -> None:
    """In a parameter that is no DTensor, on rank 1 alone."""
    assert results[rank]["beside"] == {"skipped": True, "scale": SCALE / 2}


@pytest.mark.parametrize("rank", range(RANKS))
def test_who_shards_by_himself_says_so(results: list[dict[str, Any]], rank: int) -> None:
    """Nothing in plain tensors shows it; ``sharded=True`` makes the ranks agree."""
    assert results[rank]["said"] == {"skipped": True, "scale": SCALE / 2}
    assert results[rank]["not said"]["skipped"] is (rank == 1)
