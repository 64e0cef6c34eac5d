"""Small Trainers on real text, whose runs tests compare bit for bit."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from support import stock_fp16_on_cpu
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from accel_scaler import ScalerConfig

BLOCK = 8
CONFIG = ScalerConfig(init_scale=1024.0, growth_interval=3)
# With four micro-batches a step: the first one of step 2, the last one of step 5.
OVERFLOWS = (8, 23)
SKIPPED = [2, 5]


def examples(count: int = 96, start: int = 0) -> list[dict[str, Tensor]]:
    """Blocks of Python's own reference text, byte by byte."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    rows = [text[i * BLOCK : (i + 1) * BLOCK] for i in range(start, start + count)]
    return [
        {"input_ids": torch.tensor(list(row)), "labels": torch.tensor(list(row))} for row in rows
    ]


def overflow_in(p: Tensor, overflows: Iterable[int], first: int = 0) -> None:
    """The n-th backward through ``p`` overflows for n in overflows; ``first``: the next one's."""
    count, bad = first - 1, set(overflows)

    def overflow(grad: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.full_like(grad, float("inf")) if count in bad else grad

    p.register_hook(overflow)  # type: ignore[no-untyped-call]


def gpt2(overflows: Iterable[int] = (), first: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of 2 layers, the same on each call; its n-th backward overflows for n in overflows.

    ``first`` is the number of the next backward: a resumed run does not start at 0.
    """
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=BLOCK,
                n_embd=16,
                n_layer=2,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    overflow_in(model.transformer.ln_f.weight, overflows, first)
    return model


class Recorder(TrainerCallback):
    """After each step: was it skipped, and the scale."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.skipped: list[bool] = []
        self.scales: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        accelerator = self.trainer.accelerator
        self.skipped.append(bool(accelerator.optimizer_step_was_skipped))
        if accelerator.scaler is not None:
            self.scales.append(accelerator.scaler.get_scale())


def arguments(path: Path, **kwargs: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(path),
        "fp16": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "adamw_torch",
        "seed": 5,
    }
    return TrainingArguments(**(defaults | kwargs))


def make(
    path: Path,
    overflows: Iterable[int] = OVERFLOWS,
    cls: type[Trainer] = Trainer,
    model: Any = None,
    **kwargs: Any,
) -> tuple[Any, Recorder]:
    """A Trainer on the text, and what records its steps."""
    recorder = Recorder()
    trainer = cls(
        model=gpt2(overflows) if model is None else model,
        args=arguments(path, **kwargs),
        train_dataset=examples(),
        eval_dataset=examples(16, start=500),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    return trainer, recorder


def sft_trainer(model: Any, **settings: Any) -> Any:
    """TRL's SFTTrainer on the text; ``settings`` are those of its ``SFTConfig``."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    rows = [{"input_ids": row["input_ids"].tolist()} for row in examples(20)]
    return SFTTrainer(
        model,
        SFTConfig(**(settings | {"max_length": BLOCK})),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="0", pad_token="1"
        ),
    )


def as_stock(trainer: Any) -> Any:
    """The same Trainer with torch's own scaler, as stock Accelerate runs it on a GPU."""
    stock_fp16_on_cpu(trainer.accelerator)
    trainer.accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=CONFIG.init_scale, growth_interval=CONFIG.growth_interval
    )
    return trainer


def train(trainer: Any, **kwargs: Any) -> Any:
    """``trainer.train()`` from the same random numbers each time; returns the trainer."""
    set_seed(5)
    trainer.train(**kwargs)
    return trainer


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Everything logged, without what the clock says and what only an attached Trainer has."""
    timed = ("runtime", "per_second", "flos", "scaler_")
    return [
        {key: value for key, value in entry.items() if not any(t in key for t in timed)}
        for entry in trainer.state.log_history
    ]
