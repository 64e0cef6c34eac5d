"""Scripts that TRL and Accelerate install, unchanged, in bf16 under ``accel-scaler launch``.

What each saves is what it saves under ``accelerate launch``, bit for bit. docs/compared.md has
those that are not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from launching import OURS, STOCK, finish, start
from places import HELPERS
from safetensors.torch import load_file
from support import same

pytest.importorskip("peft")
pytest.importorskip("trl", minversion="1.16", reason="an older one has other scripts")

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
STEPS = 3
TRAINER = (
    "--model_name_or_path llama --use_cpu --report_to none --disable_tqdm 1 --seed 1 "
    "--per_device_train_batch_size 4 --learning_rate 1e-2 --logging_steps 1 "
    f"--max_steps {STEPS} --save_steps {STEPS} "
)
SAMPLED = TRAINER + "--dataset_name prompts --max_completion_length 4 "
TRL, ACCELERATE = Path(trl.__file__).parent, Path(accelerate.__file__).parent
SCRIPTS = {
    "sft": TRAINER + "--dataset_name texts --gradient_accumulation_steps 2",
    "sft, LoRA": TRAINER + "--dataset_name texts --use_peft --lora_r 2",
    "kto": TRAINER + "--dataset_name judged",
    "reward": TRAINER + "--dataset_name pairs",
    "rloo": SAMPLED + "--num_generations 2 --reward_funcs run_others.share",
    "distillation": SAMPLED + "--teacher_model_name_or_path teacher",
    # Two epochs of two batches.
    "test_checkpointing": "--model_name_or_path llama",
}
WINDOWS = 6 * STEPS + 4
OF_THE_CLOCK = ("runtime", "per_second", "flos", "step_time", "scaler_skips")


def file_of(name: str) -> Path:
    external = ACCELERATE / "test_utils/scripts/external_deps"
    return (external if "test" in name else TRL / "scripts") / f"{name.split(',')[0]}.py"


def text() -> str:
    return "".join(LETTERS[at] for at in torch.randint(len(LETTERS), (8,)))


def coin() -> bool:
    return bool(torch.randint(2, ()))


DATA: dict[str, dict[str, Any]] = {
    "texts": {"text": text},
    "prompts": {"prompt": text},
    "pairs": {"prompt": text, "chosen": text, "rejected": text},
    "judged": {"prompt": text, "completion": text, "label": coin},
    # By the name that the script would load from the hub.
    "nyu-mll/glue/mrpc": {
        **{"sentence1": text, "sentence2": text, "idx": int},
        "label": lambda: int(coin()),
    },
}


def write_inputs(folder: Path) -> None:
    """Models with a tokenizer of letters, and data; their names are the scripts' arguments."""
    words = {token: at for at, token in enumerate(("<pad>", "<end>", *LETTERS))}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        model_input_names=["input_ids", "attention_mask"],
        **{"pad_token": "<pad>", "eos_token": "<end>"},
    )
    config = LlamaConfig(
        **{"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    )
    torch.manual_seed(0)
    for name in ("llama", "teacher"):
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, columns in DATA.items():
        for split in ("train", "validation"):
            rows = [{key: make() for key, make in columns.items()} for _ in range(32)]
            Dataset.from_list(rows).to_json(folder / name / f"{split}.jsonl")
    card = "---\nconfigs:\n- {config_name: mrpc, data_dir: mrpc}\n---\n"
    (folder / "nyu-mll/glue/README.md").write_text(card)


def saved(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, schedule, and what was logged but for what the clock says."""
    found: dict[str, Any] = {}
    for file in folder.rglob("*.*"):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            found[name] = load_file(file)
        elif file.stem in ("optimizer", "scheduler"):
            found[name] = torch.load(file)
        elif file.name == "trainer_state.json":
            logged = json.loads(file.read_text())["log_history"]
            items = [(key, value) for entry in logged for key, value in entry.items()]
            found[name] = [item for item in items if not any(t in item[0] for t in OF_THE_CLOCK)]
    return found


@pytest.mark.process
def test_each_saves_what_it_saves_under_stock(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    processes = {}
    for way in ("stock", "sync", "overlap"):
        ours = [*OURS, "--step_mode", way, "--telemetry", f"{way}.jsonl"]
        launch = [*(STOCK if way == "stock" else ours), "--cpu", "--mixed_precision", "bf16"]
        jobs = [(f"{way}/{name}", str(file_of(name)), SCRIPTS[name].split()) for name in SCRIPTS]
        for name, _, _ in jobs:
            (tmp_path / name).mkdir(parents=True)
        processes[way] = start([*launch, HELPERS / "run_others.py", json.dumps(jobs)], tmp_path)
    said = {way: finish(process) for way, process in processes.items()}
    assert {way: code for way, (code, _, _) in said.items()} == dict.fromkeys(said, 0), said
    for name in SCRIPTS:
        stock = saved(tmp_path / "stock" / name)
        assert {Path(file).stem for file in stock} >= {"optimizer", "scheduler"}, name
        for way in ("sync", "overlap"):
            ours = saved(tmp_path / way / name)
            assert ours.keys() == stock.keys(), (way, name)
            assert [file for file in stock if not same(ours[file], stock[file])] == [], (way, name)
    for way in ("sync", "overlap"):
        lines = map(json.loads, (tmp_path / f"{way}.jsonl").read_text().splitlines())
        skipped = [line["skipped"] for line in lines if line["kind"] == "window"]
        assert skipped == [False] * WINDOWS, way
