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
from recipe_support import refusal, run

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


def test_every_step_mode_draws_and_learns_the_same(recipe: ModuleType, tmp_path: Path) -> None:
    """Rewards and weights; ``delayed`` has others."""
    found = {}
    modes = ("sync", "none"), ("overlap", "none"), ("overlap", "cpu"), ("delayed", "cpu")
    for mode, offload in modes:
        out = tmp_path / f"{mode} {offload}"
        flags = ("--max_steps", "6", "--step_mode", mode, "--offload", offload)
        found[mode, offload] = [
            json.loads(run(recipe, out, *SHORT, *flags))["rewards"],
            (out / "model.safetensors").read_bytes(),
        ]
    assert found["overlap", "none"] == found["sync", "none"] == found["overlap", "cpu"]
    assert found["delayed", "cpu"][1] != found["sync", "none"][1]
    assert len(found["delayed", "cpu"][0]) == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model_name_or_path", "some/model"], "--model_name_or_path needs --dataset_name"),
        (["--dataset_name", "some/data"], "--dataset_name needs --model_name_or_path"),
        (["--fp16", "false"], "--fp16 false"),
        (["--use_vllm"], "pip install 'trl[vllm]'"),
        (["--asynchronous"], "--asynchronous needs --model_name_or_path and --dataset_name"),
    ],
)
def test_what_cannot_be_right_is_refused(
    recipe: ModuleType, tmp_path: Path, args: list[str], said: str
) -> None:
    assert said in refusal(recipe, *args, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_another_origin_are_left_alone(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert "files of another origin" in refusal(recipe, "--output_dir", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


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


def test_its_figures_are_those_of_the_formulas(benchmark: ModuleType) -> None:
    d = torch.tensor([0.0, 0.02, -0.1, 0.001], dtype=torch.float64)
    mean, ratio, kl, off = benchmark.figures(d)
    assert mean == pytest.approx(0.121 / 4)
    assert ratio == pytest.approx(2.718281828**0.1)
    assert kl == pytest.approx((2.013400e-04 + 4.837418e-03 + 5.0017e-07) / 4, rel=1e-4)
    assert off == 0.5
    same = torch.zeros(3, dtype=torch.float64)
    assert benchmark.figures(same) == [0.0, 1.0, 0.0, 0.0]
