"""TRL and peft under the plugin, from files that know nothing of us.

The training runs stand beside the same file under stock Accelerate, its fp16 switched on as a GPU
would: losses, norms, rates, skips, weights and optimizer state are the same, bit for bit.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from plugin_support import THEIRS, python

TRAININGS = ["sft", "lora_trainer", "lora_loop"]
needs_both = pytest.mark.skipif(
    not (find_spec("trl") and find_spec("peft")), reason="trl and peft are not installed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """``{run: {training: what it left}}``."""
    folder = tmp_path_factory.mktemp("trainings")
    out = python([str(THEIRS / "three_runs.py"), str(folder)], folder)
    said = {part.split("\n")[0]: part for part in out.split("RUN ")[1:]}
    for run in ("sync", "overlap"):
        counted = "GradScalers replaced: 0, Accelerators attached: 3, Trainers attached: 2"
        assert counted in said[run], said[run]
    assert "GradScalers replaced" not in said["stock"]
    return {
        run: {name: torch.load(folder / run / f"{name}.pt") for name in TRAININGS} for run in said
    }


@needs_both
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_training_of_theirs_leaves_what_stock_leaves(
    results: dict[str, dict[str, Any]], mode: str, training: str
) -> None:
    ours, stock = results[mode][training], results["stock"][training]
    assert ours["seen"] == stock["seen"]
    assert str(stock["seen"]).count("'inf'") == 2, "two windows overflowed"
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, value in stock["weights"].items():
        assert torch.equal(ours["weights"][name], value), name
    assert ours["optimizer"].keys() == stock["optimizer"].keys() != set()
    for index, entry in stock["optimizer"].items():
        assert float(entry["step"]) == 3.0, "five windows, two of them skipped"
        for key, value in entry.items():
            assert torch.equal(ours["optimizer"][index][key], value), (index, key)
