"""A Trainer, unchanged. Not a test: tests launch it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trainer_support import examples, gpt2
from transformers import Trainer, TrainingArguments


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


def main(folder: Path) -> None:
    """Train and print what it was."""
    trainer = ordinary(folder)
    trainer.train()
    found = {
        "class": [cls.__name__ for cls in type(trainer).__mro__],
        "accelerator": type(trainer.accelerator).__name__,
        "scale": trainer.accelerator.scaler and trainer.accelerator.scaler.get_scale(),
        "weights": weights(trainer.model),
    }
    print("FACTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
