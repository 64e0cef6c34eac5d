"""``grpo_fp16.py`` on one process: it learns, in float16, in each step mode; what it refuses. And
``benchmarks/grpo_mismatch.py``, run small."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.0", reason="an older GRPOConfig has other arguments")

from places import ROOT
from recipe_support import run

SHORT = ("--disable_tqdm", "true", "--logging_steps", "2")


@pytest.fixture(name="recipe")
def grpo_fp16(recipe: Any) -> ModuleType:
    found: ModuleType = recipe("grpo_fp16")
    return found


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "grpo_mismatch.py"
    spec = importlib.util.spec_from_file_location("grpo_mismatch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_its_model_is_float16(
    recipe: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    args = ("--max_steps", "40", "--logging_steps", "10", "--disable_tqdm", "true")
    result = json.loads(run(recipe, out, *args))
    said = capsys.readouterr().out
    assert "75,456 parameters in torch.float16" in said
    assert "scaler: 40 windows, 0 skipped" in said
    assert result["steps"] == 40
    assert result["dtypes"] == ["torch.float16"]
    # An untrained model draws one of eleven tokens.
    assert result["rewards"][0] < 0.16
    assert result["rewards"][-1] > result["rewards"][0] + 0.1
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype is torch.float16
    assert AutoTokenizer.from_pretrained(out)("c:")["input_ids"] == [5, 2]


# --- the mismatch ---------------------------------------------------------------------------------


def test_fp16_is_nearer_than_bf16(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three bits more are a factor of eight; of the KL divergence its square."""
    benchmark.main(["--layers", "2", "--seeds", "2", "--rows", "4", "--length", "24"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = {row[1]: row[2:] for row in ([c.strip() for c in line.split("|")] for line in lines)}
    bf16, fp16 = cells["bf16"], cells["fp16"]
    assert float(bf16[0]) > 4.0 * float(fp16[0]) > 0.0
    assert float(bf16[2]) > 16.0 * float(fp16[2]) > 0.0
    assert float(bf16[1]) > float(fp16[1]) >= 1.0
