"""An optimizer whose step communicates, on two ranks: torch's numbers, and no hang. FSDP1: refused.

Collectives stay on the training thread, in program order: where the optimizer thread had one, two
ranks could order it differently among those of the backward.
"""

from __future__ import annotations

from typing import Any

import async_copies_script as script
import pytest
from launching import torchrun

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return torchrun("async_copies_script.py", tmp_path_factory.mktemp("async_copies"))


@pytest.mark.parametrize("case", script.CASES)
def test_an_optimizer_that_communicates_is_stepped_on_the_training_thread(
    ranks: Results, case: str
) -> None:
    for rank in ranks:
        assert rank["moved"]
        assert rank[case]["same"]
        if case.startswith("sync"):  # where it would be anyway
            assert rank[case]["said"] == []
        else:
            (word,) = rank[case]["said"]
            assert "Dealt is stepped on the training thread" in word


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    "case", [*script.CASES, "attached", "attached late", "submodule", "wrapped later"]
)
def test_fsdp1_is_refused_and_trains_on_without_us(
    ranks: Results, original: bool, case: str
) -> None:
    for rank in ranks:
        result = rank[f"fsdp1 {original}"]
        said = result["said"][case]
        assert said.startswith("UnsupportedError: SGD steps parameters that FSDP1")
        assert "Use FSDP2" in said
        assert result["left"] == []
        assert result["same"]
