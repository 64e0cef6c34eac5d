"""Sparse gradients and ``LocalSGD`` on two gloo ranks, beside torch's and stock Accelerate's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edges_ddp_script import EVERY, MODES, STEPS
from launching import accelerate_launch

Results = list[dict[str, Any]]


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        key
        for key, value in mine.items()
        if not (torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key])
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return accelerate_launch("edges_ddp_script.py", tmp_path_factory.mktemp("edges_ddp"))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_sparse_gradients_train_as_in_torch(ranks: Results, mode: str, views: bool) -> None:
    for rank in ranks:
        found = rank[f"sparse {mode}, {views}"]
        assert differing(found, rank[f"sparse torch, {views}"]) == []
        assert not found["unchanged"]


@pytest.mark.parametrize("views", [False, True])
def test_sparse_gradients_are_refused_where_masters_step(ranks: Results, views: bool) -> None:
    for rank in ranks:
        found = rank[f"sparse delayed, {views}"]
        assert "embed.weight has a sparse gradient" in found["refused"]
        assert found["unchanged"]


@pytest.mark.parametrize("mode", MODES)
def test_local_sgd_averages_the_newest_parameters(ranks: Results, mode: str) -> None:
    """Between two averages ``delayed`` has its delay; an average is of what was stepped."""
    reference = "local stale torch" if mode == "delayed" else "local torch"
    for rank in ranks:
        assert differing(rank[f"local {mode}"], rank[reference]) == []
    one, other = (rank[f"local {mode}"] for rank in ranks)
    assert one["losses"] != other["losses"]
    assert one["averaged"].shape[0] == STEPS // EVERY * one["weights"].shape[0]
    assert torch.equal(one["averaged"], other["averaged"])
    assert torch.equal(one["weights"], other["weights"])


def test_the_references_differ_where_they_should(ranks: Results) -> None:
    newest, stale = ranks[0]["local torch"], ranks[0]["local stale torch"]
    assert {"losses", "weights", "averaged"} <= set(differing(newest, stale))
