"""TRL's GRPOTrainer on float16 weights in each step mode: a run, and what its sampler draws, is
that of a plain torch loop with masters, and a skip moves nothing.

The worker updates nothing that nobody waits for (``lazy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.0", reason="an older GRPOTrainer has other arguments")

from async_support import assert_same, lazy, values
from datasets import Dataset
from references import GROWTH_INTERVAL, INIT_SCALE, Reference
from support import stock_fp16_on_cpu
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from trainer_support import overflow_in
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from accel_scaler import attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("sync", "overlap")
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
    overflow_in(model.model.norm.weight, overflows)
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


class Reward:
    """The share of the letter that was asked for; keeps what was drawn."""

    __name__ = "share"

    def __init__(self) -> None:
        self.drawn: list[list[list[int]]] = []

    def __call__(self, prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        self.drawn.append(completion_ids)
        asked = [3 + LETTERS.index(prompt[0]) for prompt in prompts]
        return [ids.count(one) / 4 for ids, one in zip(completion_ids, asked, strict=True)]


def make(
    path: Path, model: Any, optimizer: Any = None, **kwargs: Any
) -> tuple[GRPOTrainer, Reward]:
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
    reward = Reward()
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(**(settings | kwargs)),
        train_dataset=Dataset.from_dict({"prompt": [f"{letter}:" for letter in LETTERS * 4]}),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )
    return trainer, reward


@contextmanager
def attached(trainer: Any, mode: str, **more: Any) -> Iterator[Any]:
    usual = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL, "step_mode": mode}
    with nullcontext() if mode == "sync" else lazy():
        try:
            yield attach(trainer, **usual, **more)
        finally:
            detach(trainer)


def masters(trainer: Any) -> list[Tensor]:
    """The optimizer's float32 weights."""
    state = trainer.optimizer.state_dict()["state"]
    return [state[i]["master"].clone() for i in range(len(state))]


def outcome(trainer: Any, reward: Reward) -> dict[str, Any]:
    state = trainer.optimizer.state_dict()["state"]
    return {
        "drawn": reward.drawn,
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "momentum": [state[i]["momentum_buffer"].clone() for i in range(len(state))],
        "masters": masters(trainer),
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "rates": [e["learning_rate"] for e in trainer.state.log_history if "loss" in e],
    }


# --- beside a plain loop ------------------------------------------------------------------------


def momentum(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD shows a wrong scale, its momentum a lost step."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class ReferenceOptimizer(torch.optim.SGD):
    """What a Trainer steps in place of ours: :class:`references.Reference`, at the same rate."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.reference = Reference(params, momentum)
        self.skipped = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.reference.optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.skipped = not self.reference.boundary(max_norm=0.5)


class ReferenceScaler(torch.amp.GradScaler):
    """Scales by the reference's scale, and leaves the rest to it."""

    def __init__(self, reference: Reference) -> None:
        super().__init__("cpu", enabled=False)
        self.reference = reference

    def scale(self, outputs: Any) -> Any:
        return outputs * self.reference.scale


class Verdicts(TrainerCallback):
    """Tells the Trainer, as Accelerate would, whether the reference has skipped."""

    def on_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        optimizer._is_overflow = optimizer.optimizer.skipped


def run_plain(path: Path, steps: int, overflows: Iterable[int]) -> dict[str, Any]:
    """A stock GRPOTrainer around it."""
    model = llama(overflows=overflows)
    optimizer = ReferenceOptimizer(model.parameters())
    trainer, reward = make(path, model, optimizer, max_steps=steps, max_grad_norm=0.0)
    trainer.add_callback(Verdicts())
    reference = optimizer.reference
    stock_fp16_on_cpu(trainer.accelerator).scaler = ReferenceScaler(reference)
    # The plain loop clips. With no limit Trainers do it all the same, and the norm of scaled
    # float16 gradients may be inf, by which they make them nan.
    trainer.accelerator.clip_grad_norm_ = lambda *_: torch.zeros(())
    trainer.train()
    return {
        "drawn": reward.drawn,
        "weights": values(model),
        "momentum": [entry["momentum_buffer"] for entry in reference.state()],
        "masters": [m.detach() for m in reference.masters],
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
        "rates": [e["learning_rate"] for e in trainer.state.log_history if "loss" in e],
    }


def test_a_run_is_that_of_a_plain_loop_with_masters(tmp_path: Path) -> None:
    """What is drawn, losses, rates, weights, masters and momentum, bit for bit."""
    steps, overflows = 10, (3, 7, 8)
    reference = run_plain(tmp_path / "plain", steps, overflows)
    for mode in MODES:
        trainer, reward = make(tmp_path / mode, llama(overflows=overflows), max_steps=steps)
        trainer.optimizer = momentum(trainer.model.parameters())
        with attached(trainer, mode):
            trainer.train()
            ours = outcome(trainer, reward)
        assert_same(ours, reference)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    assert len(reference["losses"]) == steps
    assert reference["rates"][3] == reference["rates"][4] != reference["rates"][5]
    drawn = reference["drawn"]
    assert drawn[-1] != drawn[0]
