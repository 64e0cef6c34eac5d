"""Telemetry of two gloo ranks: who writes, and what rank 0 says of an overflow on rank 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import telemetry_script
import torch
from launching import accelerate_launch
from telemetry_runs import lines_of, windows_of
from telemetry_script import MODES, OVERFLOW, WINDOWS

SKIPPED = [window == OVERFLOW for window in range(WINDOWS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("telemetry")
    return folder, accelerate_launch("telemetry_script.py", folder)


def test_rank_0_writes_and_with_its_place_in_the_path_each_rank(run: Any) -> None:
    folder, _ = run
    expected = {f"{mode}{end}.jsonl" for mode in MODES for end in ("", "_0", "_1")}
    assert {p.name for p in folder.glob("*.jsonl")} == expected
    for mode in MODES:
        for name, rank in ((mode, 0), (f"{mode}_0", 0), (f"{mode}_1", 1)):
            start, *_, end = lines_of(folder / f"{name}.jsonl")
            assert (start["rank"], start["ranks"]) == (rank, telemetry_script.RANKS)
            assert (end["windows"], end["skips"], end["error"]) == (WINDOWS, 1, None)


@pytest.mark.parametrize("mode", MODES)
def test_rank_0_records_the_overflow_of_rank_1(run: Any, mode: str) -> None:
    folder, _ = run
    for name in (mode, f"{mode}_0", f"{mode}_1"):
        found = windows_of(folder / f"{name}.jsonl")
        assert [line["found_inf"] for line in found] == SKIPPED
        assert [line["skipped"] for line in found] == SKIPPED
        assert [line["scale"] for line in found] == [1024.0] * 3 + [512.0] * 2
        # DDP has summed the gradients: rank 0 sees what they are.
        assert [bool(line["nonfinite"]) for line in found] == SKIPPED


@pytest.mark.parametrize("mode", MODES)
def test_only_the_rank_whose_loss_was_bad_says_so(run: Any, mode: str) -> None:
    folder, _ = run
    for rank in range(2):
        found = windows_of(folder / f"{mode}_{rank}.jsonl")
        bad = [line.get("loss_nonfinite", 0) for line in found]
        assert bad == [int(skipped and rank == 1) for skipped in SKIPPED]


@pytest.mark.parametrize("mode", MODES)
def test_the_norms_are_those_that_the_clip_returned(run: Any, mode: str) -> None:
    folder, ranks = run
    found = windows_of(folder / f"{mode}.jsonl")
    norms = ranks[0][f"{mode} one"]["norms"]
    for line, norm in zip(found, norms, strict=True):
        assert line["grad_norm"] in ((None, "inf") if line["skipped"] else (norm,))
    assert norms == ranks[1][f"{mode} one"]["norms"]


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_as_without(run: Any, mode: str) -> None:
    """On the rank that writes, and on the one that does not."""
    _, ranks = run
    for rank in ranks:
        one, off = rank[f"{mode} one"], rank[f"{mode} off"]
        assert torch.equal(one["weights"], off["weights"])
        assert (one["norms"], one["scale"]) == (off["norms"], off["scale"])
        assert torch.equal(one["weights"], ranks[0][f"{mode} one"]["weights"])
