"""Torch's switches are as a file says within the block, and as they were after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_scaler.overflow_finder import as_then, surroundings

CPU = torch.device("cpu")


def test_switches_are_set_and_put_back() -> None:
    before = surroundings(CPU)
    assert before["device"] == "cpu"
    assert before["torch"] == torch.__version__
    other = {
        "threads": before["threads"] + 1,
        "float32 products": "medium" if before["float32 products"] != "medium" else "high",
        "deterministic": not before["deterministic"],
        "TF32 convolutions": not before["TF32 convolutions"],
    }
    with pytest.raises(KeyError), as_then({**before, **other}):  # noqa: PT012
        assert surroundings(CPU) == {**before, **other}
        raise KeyError
    assert surroundings(CPU) == before


@pytest.mark.parametrize("value", [None, 0, -1, 1 << 40, 1.0, "x", True])
def test_nonsense_changes_nothing(value: Any) -> None:
    before = surroundings(CPU)
    with as_then({"threads": value, "float32 products": value}):
        assert surroundings(CPU) == before
