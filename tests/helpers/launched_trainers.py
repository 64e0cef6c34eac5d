"""A Trainer and a TRL trainer, unchanged. Not a test: tests launch it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_support import examples, gpt2
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments


def weights(model: torch.nn.Module) -> list[Any]:
    """One number of each parameter, exact."""
    return [value.data.double().sum().item() for value in model.parameters()]


def ordinary(folder: Path) -> Any:
    """A transformers.Trainer."""
    arguments = TrainingArguments(
        str(folder / "hf"), max_steps=4, per_device_train_batch_size=4, fp16=True, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    return Trainer(gpt2((1,)), arguments, train_dataset=examples(16))


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="1")


def of_trl(folder: Path) -> Any:
    """A trl.SFTTrainer on token ids that are there already."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in examples(16)])
    arguments = SFTConfig(
        str(folder / "trl"), max_steps=4, per_device_train_batch_size=4, fp16=True, use_cpu=True,
        bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, max_length=8,
        gradient_checkpointing=False, learning_rate=1e-2,
    )  # fmt: skip
    return SFTTrainer(gpt2((1,)), arguments, train_dataset=rows, processing_class=tokenizer())


def main(folder: Path, names: list[str]) -> None:
    """Train each and print what it was."""
    found = {}
    for name in names:
        trainer = {"transformers": ordinary, "trl": of_trl}[name](folder)
        trainer.train()
        found[name] = {
            "class": [cls.__name__ for cls in type(trainer).__mro__],
            "accelerator": type(trainer.accelerator).__name__,
            "scale": trainer.accelerator.scaler and trainer.accelerator.scaler.get_scale(),
            "weights": weights(trainer.model),
        }
    print("FACTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
