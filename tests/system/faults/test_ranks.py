"""One of two ranks is killed, stopped, slow, or overflows alone: what the other does, and when."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run
from places import HELPERS
from ranks_script import TIMEOUT_S, TIMES_SLOWER, TRIED, WINDOW, WINDOWS

MOST_S = 30.0
"""Longest that a rank may go on, or hang, after the other is gone: gloo's limit was 90."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    code, out, err = run([sys.executable, HELPERS / "ranks_script.py", folder], folder)
    assert code == 0, out + err
    return folder, json.loads((folder / "statuses.json").read_text())


def results(ended: Any, case: str) -> list[dict[str, Any]]:
    """Of both ranks, which came to their end."""
    folder, ends = ended
    outputs = [(folder / f"{case}{rank}.txt").read_text() for rank in range(2)]
    assert ends[case]["statuses"] == [0, 0], outputs
    both = [torch.load(folder / f"{case}{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(both[0]["weights"], both[1]["weights"])
    return both


@pytest.mark.parametrize("mode", TRIED)
def test_one_of_two_ranks_killed_ends_the_other_with_an_error(ended: Any, mode: str) -> None:
    """At its next collective: the connection is closed, nobody waits for a timeout."""
    folder, ends = ended
    case = f"killed, {mode}"
    status, other = ends[case]["statuses"]
    output = (folder / f"{case}0.txt").read_text()
    assert other == -9
    assert status == 1, output  # -14: it hung
    assert ends[case]["knew_after_s"] < MOST_S
    assert f"window {WINDOW - 1}" in output
    assert f"window {WINDOW + 1}" not in output, "it trained on alone"
    assert "Traceback" in output
    assert "gloo" in output.lower()


@pytest.mark.parametrize("mode", TRIED)
def test_an_optimizer_that_fails_on_one_of_two_ranks_ends_both(ended: Any, mode: str) -> None:
    folder, ends = ended
    case = f"raises, {mode}"
    assert ends[case]["statuses"] == [1, 1]
    output, other = ((folder / f"{case}{rank}.txt").read_text() for rank in range(2))
    assert "StepError" in other
    assert "the kernel of rank 1 failed" in other  # its own traceback
    assert "Traceback" in output
    assert "gloo" in output.lower()


@pytest.mark.parametrize("mode", TRIED)
def test_one_of_two_ranks_stopped_is_an_error_after_gloos_timeout(ended: Any, mode: str) -> None:
    """It may come back, so the other waits as long as it was told to, and no longer."""
    folder, ends = ended
    end = ends[f"stopped, {mode}"]
    output = (folder / f"stopped, {mode}0.txt").read_text()
    assert end["statuses"] == [1, -9], output
    assert end["knew_after_s"] < TIMEOUT_S + MOST_S
    assert f"window {WINDOW + 1}" not in output
    assert f"{TIMEOUT_S}000ms" in output


@pytest.mark.parametrize("mode", TRIED)
def test_one_of_two_ranks_slow_changes_no_number(ended: Any, mode: str) -> None:
    """The other waits in its collectives, window by window."""
    slow, well = results(ended, f"slow, {mode}"), results(ended, f"nothing, {mode}")
    assert torch.equal(slow[0]["weights"], well[0]["weights"])
    assert slow[0]["skipped"] == well[0]["skipped"] == [False] * WINDOWS
    # Rank 1 rested for so many of its quickest windows, and rank 0 had to wait for it.
    rested = TIMES_SLOWER * min(slow[1]["took"])
    assert sum(slow[0]["took"]) > rested


@pytest.mark.parametrize("mode", TRIED)
def test_one_of_two_ranks_overflowing_alone_is_one_skip_on_both(ended: Any, mode: str) -> None:
    """In the same window; the weights stay equal."""
    for rank in results(ended, f"overflow, {mode}"):
        assert rank["skipped"] == [window == WINDOW for window in range(WINDOWS)]
        assert rank["scale"] == 512.0
        assert bool(rank["weights"].isfinite().all())
    well = results(ended, f"nothing, {mode}")
    assert not torch.equal(rank["weights"], well[0]["weights"])
