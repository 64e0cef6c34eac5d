"""Trainings as users of TRL and peft write them; this file knows nothing of accel_scaler.

Not collected by itself: ``test_plugin_training.py`` runs it stock and with the plugin. Each test
leaves its losses, weights and optimizer state in the folder ``RESULTS``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradScalerKwargs, set_seed
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

TEXT = [
    "the",
    "scale",
    "grows",
    "while",
    "all",
    "is",
    "finite",
    "and",
    "falls",
    "where",
    "a",
    "gradient",
    "is",
    "not",
]
BAD = (2, 7)
"""Backwards whose gradients overflow."""
COMMON: dict[str, Any] = {
    "fp16": True,
    "use_cpu": True,
    "max_steps": 5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """The same numbers for each test, and no state of another's Accelerator."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    set_seed(3)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *sorted(set(TEXT))]
    table = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<end>"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="<end>")


def texts() -> list[str]:
    return [" ".join(TEXT[i % 7 : i % 7 + 6]) for i in range(20)]


def gpt2() -> Any:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )
    return overflowing(model, model.transformer.ln_f.weight)


def overflowing(model: Any, parameter: torch.Tensor) -> Any:
    """Some gradients of this parameter are infinite, as a bad batch would make them."""
    count = -1

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.full_like(grad, float("inf")) if count in BAD else grad

    parameter.register_hook(spoil)
    return model


def lora() -> Any:
    model = gpt2()
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return overflowing(adapted, trained[-1])


def keep(name: str, model: Any, optimizer: Any, seen: list[Any]) -> None:
    """All that a run leaves, exactly."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save(
        {"weights": state, "optimizer": optimizer.state_dict()["state"], "seen": seen},
        Path(os.environ["RESULTS"]) / f"{name}.pt",
    )


def keep_trainer(name: str, trainer: Any) -> None:
    trainer.train()
    logged = ("loss", "grad_norm", "learning_rate")
    seen = [
        [str(entry[key]) for key in logged]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert len(seen) == COMMON["max_steps"]
    keep(name, trainer.model, trainer.optimizer, seen)


def test_sft_trainer(tmp_path: Path) -> None:
    arguments = SFTConfig(
        str(tmp_path), max_length=8, bf16=False, gradient_checkpointing=False, **COMMON
    )
    rows = Dataset.from_dict({"text": texts()})
    trainer = SFTTrainer(gpt2(), arguments, train_dataset=rows, processing_class=tokenizer())
    keep_trainer("sft", trainer)


def test_lora_under_the_trainer(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer()(texts())["input_ids"]]
    trainer = Trainer(lora(), TrainingArguments(str(tmp_path), **COMMON), train_dataset=rows)
    keep_trainer("lora_trainer", trainer)


def test_lora_in_a_plain_loop() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=2)],
    )
    net = lora()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    data = torch.tensor(tokenizer()(texts())["input_ids"])
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    seen: list[Any] = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(trained, 0.5)
                seen.append([str(loss.item()), str(float(norm)), schedule.get_last_lr()])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.append(bool(accelerator.optimizer_step_was_skipped))
    assert seen.count(True) == (0 if accelerator.scaler is None else 2)
    keep("lora_loop", net, optimizer, seen)
