"""A GRPOTrainer small enough to run a hundred steps in a test, and what its sampler saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from async_support import values
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

LETTERS = "abcd"


def llama(dtype: torch.dtype = torch.float16, overflows: Iterable[int] = ()) -> Any:
    """One layer, the same on each call; its n-th backward overflows for n in overflows."""
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model: Any = LlamaForCausalLM(config).to(dtype)
    count, bad = -1, set(overflows)

    def overflow(grad: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.full_like(grad, float("inf")) if count in bad else grad

    model.model.norm.weight.register_hook(overflow)
    return model


def tokenizer() -> Any:
    """Its tokens are letters."""
    words = {token: at for at, token in enumerate(("<pad>", "<end>", ":", *LETTERS))}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


class Sampler:
    """Notes, for each generation, what was drawn, and the parameters that it was drawn with."""

    __name__ = "share"

    def __init__(self) -> None:
        self.drawn: list[list[list[int]]] = []
        self.weights: list[list[Tensor]] = []
        self.around: Callable[[Callable[[], Any]], Any] = lambda generate: generate()

    def __call__(self, prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        """The reward: the share of the letter that was asked for."""
        self.drawn.append(completion_ids)
        asked = [3 + LETTERS.index(prompt[0]) for prompt in prompts]
        return [ids.count(one) / 4 for ids, one in zip(completion_ids, asked, strict=True)]

    def watch(self, model: Any) -> None:
        generate = model.generate

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = self.around(lambda: self._generate(generate, model, args, kwargs))
            return result

        model.generate = watched

    def _generate(self, generate: Any, model: Any, args: Any, kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        self.weights.append(values(model))  # as the last token was drawn with
        return result


def make(
    path: Path, model: Any, optimizer: Any = None, **kwargs: Any
) -> tuple[GRPOTrainer, Sampler]:
    """A trainer, stock so far, of two prompts with four completions a step."""
    settings: dict[str, Any] = {
        "output_dir": str(path),
        "fp16": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": False,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 5,
    }
    set_seed(5)
    sampler = Sampler()
    trainer = GRPOTrainer(
        model,
        reward_funcs=sampler,
        args=GRPOConfig(**(settings | kwargs)),
        train_dataset=Dataset.from_dict({"prompt": [f"{letter}:" for letter in LETTERS * 4]}),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )
    sampler.watch(trainer.model)
    return trainer, sampler
