"""Reinforcement learning in fp16: TRL's GRPOTrainer with sampler and trainer in one dtype.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/grpo_fp16.py

Tokens are drawn by one program and scored by another, which round differently; in bf16 the two
differ by enough to bend or end a training, in fp16, with three bits more, they hardly do
("Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). So the weights are float16
here, for sampler and trainer alike, and the optimizer steps float32 masters. Look for "the one
added line".

With no arguments it needs no network: a small new Llama is rewarded for writing the letter that it
is asked for. A step that overflows runs again, so no rollout is lost. It prints the mean reward
before and after, the number of rollouts saved and a summary of the scaler, and saves the model.
`benchmarks/grpo_mismatch.py` measures the mismatch, `docs/reinforcement-learning.md` says who sees
which parameters. Every argument of TRL's GRPOConfig can be given, or --config with a YAML file. On
a GPU, with vLLM in the same process (this was never run with vLLM):

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/grpo_fp16.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/DeepMath-103K \
        --reward accuracy_reward --use_vllm --vllm_mode colocate --max_completion_length 1024 \
        --learning_rate 1e-6 --output_dir out/mine

or with TRL's asynchronous trainer, which needs a vLLM server and FlashAttention 3 (never run):

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen2.5-0.5B-Instruct --dtype float16 \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "nccl"}'
    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/grpo_fp16.py \
        --asynchronous --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/DeepMath-103K --reward accuracy_reward --output_dir out/mine
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, TrlParser

from accel_scaler import ScalerConfig, attach

RESULT_FILE = "grpo_fp16.json"  # marks a directory as this recipe's
START = "float16"  # in --output_dir: the first weights, where vLLM reads the dtype
LETTERS = "abcdefgh"
TOY: dict[str, Any] = {
    "max_steps": 100,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 12,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "logging_steps": 10,
    "save_strategy": "no",
}


@dataclass
class Arguments:
    """What is this recipe's own; the rest is TRL's."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "hub name or directory (default: a small new Llama)"}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "with a column `prompt` (default: letters to write)"}
    )
    dataset_split: str = field(default="train", metadata={"help": "of --dataset_name"})
    reward: str = field(
        default="accuracy_reward",
        metadata={"help": "a function of trl.rewards, for --dataset_name"},
    )
    step_mode: str | None = field(
        default=None,
        metadata={
            "help": "when parameters are updated (default: ACCEL_SCALER_STEP_MODE, or sync)",
            "choices": ["sync", "overlap"],
        },
    )
    offload: str | None = field(
        default=None,
        metadata={
            "help": "where masters and optimizer state rest (default: ACCEL_SCALER_OFFLOAD, or "
            "none: with the model)",
            "choices": ["none", "cpu"],
        },
    )
    asynchronous: bool = field(
        default=False,
        metadata={"help": "TRL's AsyncGRPOTrainer; its arguments are AsyncGRPOConfig's"},
    )


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"grpo_fp16: error: {message}")


def parse_args(argv: Sequence[str]) -> tuple[Arguments, Any]:
    """Read the command line: this recipe's arguments, and TRL's."""
    config: Any = GRPOConfig
    defaults: dict[str, Any] = {"output_dir": "out/grpo_fp16", "report_to": "none", "fp16": True}
    if "--asynchronous" in argv:
        from trl.experimental import async_grpo

        config, defaults = async_grpo.AsyncGRPOConfig, {**defaults, "dtype": "float16"}
    parser = TrlParser((Arguments, config), description="Reinforcement learning in fp16.")
    parser.set_defaults(**defaults, use_cpu=not torch.cuda.is_available())
    if not any(arg.startswith("--model_name_or_path") for arg in argv):
        parser.set_defaults(**TOY)
    own, args = parser.parse_args_and_config(list(argv))
    return own, args


def check(own: Arguments, args: Any) -> None:
    """Refuse bad arguments before anything is made."""
    out = Path(args.output_dir)
    if not args.fp16:
        raise fail("--fp16 false: then sampler and trainer are not in fp16, which this is about")
    if own.asynchronous and not (own.model_name_or_path and own.dataset_name):
        raise fail("--asynchronous needs --model_name_or_path and --dataset_name")
    if own.model_name_or_path and not own.dataset_name:
        raise fail("--model_name_or_path needs --dataset_name: the letters are for the small model")
    if own.dataset_name and not own.model_name_or_path:
        raise fail("--dataset_name needs --model_name_or_path: the small model knows letters only")
    if (getattr(args, "use_vllm", False) or own.asynchronous) and find_spec("vllm") is None:
        raise fail("vLLM is asked for and not installed: pip install 'trl[vllm]'")
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    is_ours = (out / RESULT_FILE).is_file()
    if out.is_dir() and any(out.iterdir()) and not is_ours and not args.resume_from_checkpoint:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory")


# --- the task that needs no network -------------------------------------------------------------


def make_small_model(seed: int) -> tuple[Any, Any]:
    """Make a new Llama of two layers in float16, and a tokenizer whose tokens are letters."""
    words = {token: at for at, token in enumerate(("<pad>", "<end>", ":", *LETTERS))}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    transformers.set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float16), tokenizer


def make_prompts(count: int, seed: int) -> Dataset:
    """Draw the letters to write: a column ``prompt`` like ``c:``."""
    drawn = random.Random(seed).choices(LETTERS, k=count)
    return Dataset.from_dict({"prompt": [f"{letter}:" for letter in drawn]})


class LetterShare:
    """The reward, 0 to 1: which part of the tokens that could be written is the asked letter."""

    __name__ = "letter_share"  # TRL logs it under this name

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        return [text.count(prompt[0]) / self.length for prompt, text in pairs]


# --- a model and a task of one's own ------------------------------------------------------------


def load_model(own: Arguments, args: Any) -> tuple[Any, Any]:
    """Load the named model in float16, whatever it is stored in."""
    name = own.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
    except (OSError, ValueError) as error:
        raise fail(f"--model_name_or_path {name}: {str(error).splitlines()[0]}") from error
    if getattr(args, "use_vllm", False) and args.vllm_mode == "colocate":
        # Inside TRL vLLM serves the dtype that the checkpoint names, which may be bf16.
        start = str(Path(args.output_dir) / START)
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float16)
    return model, tokenizer


def load_task(own: Arguments) -> tuple[Dataset, Any]:
    """Load the prompts, and TRL's reward of that name."""
    import trl.rewards

    try:
        data = load_dataset(own.dataset_name, split=own.dataset_split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise fail(f"--dataset_name {own.dataset_name}: {reason}") from error
    if "prompt" not in data.column_names:
        raise fail(f"the data has no column 'prompt', only: {', '.join(data.column_names)}")
    reward = getattr(trl.rewards, own.reward, None)
    if not callable(reward):
        raise fail(f"--reward {own.reward}: trl.rewards has no such function")
    return data, reward


def make_trainer(own: Arguments, args: Any) -> Any:
    """Make TRL's trainer, as one would without this package."""
    if own.asynchronous:
        from trl.experimental.async_grpo import AsyncGRPOTrainer

        data, reward = load_task(own)
        return AsyncGRPOTrainer(
            own.model_name_or_path, reward_funcs=reward, args=args, train_dataset=data
        )
    if own.model_name_or_path:
        data, reward = load_task(own)
        model, tokenizer = load_model(own, args)
    else:
        model, tokenizer = make_small_model(args.seed)
        data, reward = make_prompts(512, args.seed), LetterShare(args.max_completion_length)
    return GRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer
    )


def rewards_of(trainer: Any) -> list[float]:
    """Return the mean rewards that were logged, in their order."""
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    own, args = parse_args(sys.argv[1:] if argv is None else argv)
    check(own, args)
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()

    trainer = make_trainer(own, args)
    asked = {"step_mode": own.step_mode, "offload": own.offload}
    wanted = {"on_overflow": "retry"} | {k: v for k, v in asked.items() if v}
    config = replace(ScalerConfig.from_env(), **wanted)
    trainer = attach(trainer, config)  # <- the one added line, with its import at the top

    say = trainer.accelerator.print
    model = trainer.model
    dtypes = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad})
    say(f"TRL {trl.__version__}: {model.num_parameters():,} parameters in {', '.join(dtypes)}")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    found = rewards_of(trainer)
    if found:
        first, last = found[0], found[-1]
        say(f"mean reward of the first {args.logging_steps} steps {first:.3f}, the last {last:.3f}")
    history, step = trainer.accelerator.scaler_history, args.per_device_train_batch_size
    saved = history.retried * step * args.gradient_accumulation_steps * args.world_size
    say(
        f"rollouts saved: {saved} of {history.retried} steps that overflowed; lost: {history.skips}"
    )
    say(history.summary())
    trainer.save_model()
    if trainer.is_world_process_zero():
        result = {"rewards": found, "steps": trainer.state.global_step, "dtypes": dtypes}
        (Path(args.output_dir) / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    say(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
