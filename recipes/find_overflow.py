"""A run that overflows: find the layer, keep it in fp32, compare with a run that is all fp32.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/find_overflow.py

With no arguments it needs no network: a small GPT-2 learns the help texts that come with Python
(`pydoc_data.topics`), one byte a token. One of its layers has weights so large that its output does
not fit in fp16, as happens with weights that were trained in bf16 or fp32 (T5 is known for it).

1. fp16 with find_overflow: every step overflows, whatever the scale. The run ends with an error
   that names the tensors, and the record of each skipped step names the module it began in.
2. The same with the modules that were named in fp32. Where that only moves the overflow to another
   module, that one is added, and so on.
3. Plain fp32, to compare the losses on held-out texts with.

It writes the telemetry of all three runs and found.json to --output_dir, and ends with the command
that makes a report of them. Your own model, without a layer spoilt on purpose:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/find_overflow.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --output_dir out/mine

It ends with an error and status 1 when nothing overflows.
"""

import argparse
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_scaler import OverflowStreakError, ScalerConfig, attach

RESULT_FILE = "found.json"  # marks a directory as this recipe's
SPOILT = "transformer.h.2.mlp.c_proj"
MOST_MODULES = 8  # more of them in fp32, and there is little fp16 left


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"find_overflow: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Find the layer that overflows in fp16, and train with that layer in fp32.",
        epilog="The scaler's other settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new GPT-2)")
    add("--train_file", type=Path, help="text file (default: the help texts of Python)")
    spoil_help = f"module whose weight is multiplied by --factor (default: {SPOILT} of the small "
    spoil_help += "GPT-2, none of a model that is passed)"
    add("--spoil", metavar="MODULE", help=spoil_help)
    add("--factor", type=float, default=2e6, help="(default: %(default)g)")
    out_help = "where the results go (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/find_overflow"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--max_steps", type=positive, default=60, help="of each run (default: %(default)s)")
    skip_help = "skips in a row that end a run (default: %(default)s)"
    add("--max_consecutive_skips", type=positive, default=8, help=skip_help)
    add("--per_device_batch_size", type=positive, default=8, help="(default: %(default)s)")
    add("--learning_rate", type=float, default=2e-3, help="(default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    block_help = "tokens of one example (default: %(default)s)"
    add("--block_size", type=positive, default=64, help=block_help)
    add("--max_eval_samples", type=positive, default=64, help="held-out blocks (default: 64)")
    add("--seed", type=int, default=0, help="of weights and order (default: 0)")
    return parser.parse_args(argv)


def read_texts(args: argparse.Namespace) -> list[str]:
    """Check the paths and return the texts."""
    out = args.output_dir
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip
    if not args.train_file:
        return [topics[name] for name in sorted(topics)]
    if not args.train_file.is_file():
        raise fail(f"no such file: {args.train_file}")
    texts = [text for text in args.train_file.read_text(encoding="utf-8").split("\n\n") if text]
    if not "".join(texts).strip():
        raise fail(f"{args.train_file} is empty")
    return texts


# --- the model and the data -----------------------------------------------------------------------


def load_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    """Load the named model's tokenizer, or make one whose tokens are bytes."""
    if not args.model_name_or_path:
        return ByT5Tokenizer(extra_ids=0)
    try:
        return AutoTokenizer.from_pretrained(args.model_name_or_path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error


def load_model(args: argparse.Namespace, tokens: int) -> PreTrainedModel:
    """Load the named model in fp32 or make a small one, the same each time, and spoil a layer."""
    set_seed(args.seed)
    if args.model_name_or_path:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                args.model_name_or_path, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error
    else:
        length = max(128, args.block_size)
        sizes = {"n_positions": length, "n_embd": 64, "n_layer": 4, "n_head": 4}
        ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=tokens, **sizes, **ends))
    name = args.spoil or (None if args.model_name_or_path else SPOILT)
    if name is not None:
        module = dict(model.named_modules()).get(name)
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise fail(f"--spoil {name}: the model has no such module with a weight")
        with torch.no_grad():
            module.weight *= args.factor
    return model


def blocks(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """Join the tokens of all texts and cut them, (blocks, tokens); the last tenth is held out."""
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    size = args.block_size
    count = len(tokens) // size
    if count < 2:
        raise fail(f"the text has {len(tokens)} tokens; two blocks of {size} are the least")
    cut = torch.tensor(tokens[: count * size]).view(count, size)
    held_out = max(1, count // 10)
    return cut[:-held_out], cut[-held_out:][: args.max_eval_samples]


# --- the remedy -----------------------------------------------------------------------------------


def keep_in_fp32(module: nn.Module, device: str) -> None:
    """Make a module compute in fp32 under autocast: its weights, its inputs, its output."""
    forward: Callable[..., Any] = module.forward

    def as_fp32(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if is_float else value

    @wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            named = {key: as_fp32(value) for key, value in kwargs.items()}
            return forward(*map(as_fp32, args), **named)

    module.float()
    module.forward = in_fp32


# --- the runs -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one run."""

    losses: list[float]
    """Held-out loss before and after, computed in fp32."""
    windows: int
    skips: int
    began_in: Counter
    """(where, module) -> in how many skipped windows the overflow began there."""
    ended_by: str | None


@torch.no_grad()
def held_out_loss(model: nn.Module, blocks: Tensor, device: torch.device) -> float:
    """Return the mean loss of a model that no accelerator has prepared, so in fp32."""
    model.to(device).eval()
    parts = [block.to(device) for block in blocks.split(16)]
    total = sum(model(input_ids=part, labels=part).loss.item() * len(part) for part in parts)
    return total / len(blocks)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    name: str,
    args: argparse.Namespace,
) -> str | None:
    """Make the optimizer steps; return why they ended early, if they did."""
    bar = tqdm(total=args.max_steps, desc=f"{name:>5}")
    with logging_redirect_tqdm(loggers=[logging.getLogger()]), bar:
        while bar.n < args.max_steps:
            for (block,) in loader:
                loss = model(input_ids=block, labels=block).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                try:
                    optimizer.step()
                except OverflowStreakError as error:
                    tqdm.write(f"ended: {error}")
                    return str(error)
                optimizer.zero_grad()
                bar.update()
                bar.set_postfix(
                    {"loss": f"{loss.item():.3f}"} | accelerator.scaler_history.progress()
                )
                if bar.n == args.max_steps:
                    break
    return None


def run(
    name: str,
    data: tuple[Tensor, Tensor],
    tokens: int,
    in_fp32: list[str],
    args: argparse.Namespace,
) -> Outcome:
    """Train once from the same start, with these modules in fp32, and telemetry in name.jsonl."""
    # Accelerate keeps the precision for the whole process, and the third run has another one.
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    telemetry = args.output_dir / f"{name}.jsonl"
    telemetry.unlink(missing_ok=True)  # else it would be appended to
    config = replace(
        ScalerConfig.from_env(),
        telemetry=str(telemetry),
        find_overflow=name != "fp32",
        max_consecutive_skips=args.max_consecutive_skips,
    )
    accelerator = Accelerator(mixed_precision="no" if name == "fp32" else "fp16")
    with warnings.catch_warnings():  # of a run that needs no scaling, which is what is meant
        warnings.filterwarnings("ignore", "accel_scaler: mixed_precision='no'")
        attach(accelerator, config)
    learned, held_out = data
    model, device = load_model(args, tokens), accelerator.device
    for module in in_fp32:
        keep_in_fp32(model.get_submodule(module), device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(
        torch.utils.data.TensorDataset(learned),
        batch_size=args.per_device_batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(args.seed),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ended_by = train(accelerator, model, optimizer, loader, name, args)
    # The runs are compared by their weights alone, whatever precision they were trained in.
    judge = load_model(args, tokens)
    losses = [held_out_loss(judge, held_out, device)]
    judge.load_state_dict(accelerator.get_state_dict(model))
    losses.append(held_out_loss(judge, held_out, device))
    history = accelerator.scaler_history
    firsts = [record.first for record in history.records if record.first]
    began_in = Counter((first["where"], first["module"]) for first in firsts)
    print(history.summary())
    accelerator.end_training()
    return Outcome(losses, history.boundaries, history.skips, began_in, ended_by)


def culprits(outcome: Outcome, in_fp32: list[str]) -> list[str]:
    """Return the modules, not in fp32 yet, in whose forward an overflow began.

    One that began in a backward needs no remedy: there the scaler lowers the scale.
    """
    named = {module for where, module in outcome.began_in if where == "forward" and module}
    return sorted(named - set(in_fp32))


def find_and_fix(
    data: tuple[Tensor, Tensor], tokens: int, args: argparse.Namespace
) -> tuple[dict[str, Outcome], list[str]]:
    """Make the runs; return what became of them, and the modules that were kept in fp32."""
    print("1. fp16, watching every module")
    outcomes, in_fp32 = {"fp16": run("fp16", data, tokens, [], args)}, []
    found = culprits(outcomes["fp16"], in_fp32)
    if not found:
        last = outcomes["fp16"]
        if not last.skips:
            raise fail(f"nothing overflowed in {last.windows} steps of fp16; there is no layer to "
                       "find")  # fmt: skip
        raise fail(f"{last.skips} of {last.windows} steps of fp16 overflowed, none of them in a "
                   "forward; that takes a lower scale, not a layer in fp32")  # fmt: skip
    while found:
        if len(in_fp32) >= MOST_MODULES:
            raise fail(f"{len(in_fp32)} modules are in fp32 and {', '.join(found)} still "
                       "overflows; train this model in fp32 or bf16")  # fmt: skip
        in_fp32 += found
        print(f"2. fp16, with {', '.join(in_fp32)} in fp32")
        outcomes["fixed"] = run("fixed", data, tokens, in_fp32, args)
        found = culprits(outcomes["fixed"], in_fp32)
    print("3. fp32")
    outcomes["fp32"] = run("fp32", data, tokens, [], args)
    return outcomes, in_fp32


def table(outcomes: dict[str, Outcome]) -> str:
    """Put the runs side by side."""
    lines = ["run     steps  skipped  held-out loss before  after"]
    for name, each in outcomes.items():
        before, after = each.losses
        lines.append(f"{name:<6}{each.windows:7}{each.skips:9}{before:22.3f}{after:7.3f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    texts = read_texts(args)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if (processes := PartialState().num_processes) > 1:
        raise fail(f"got {processes} processes, expected one; launch it with --num_processes 1")
    tokenizer = load_tokenizer(args)
    data, tokens = blocks(texts, tokenizer, args), len(tokenizer)
    load_model(args, tokens)  # says what is wrong with the arguments before anything is written
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / RESULT_FILE).write_text("{}\n")
    outcomes, in_fp32 = find_and_fix(data, tokens, args)
    print(f"kept in fp32: {', '.join(in_fp32)}")
    print(table(outcomes))
    result = {
        "kept_in_fp32": in_fp32,
        **{
            name: {"losses": each.losses, "skips": each.skips, "ended_by": each.ended_by}
            for name, each in outcomes.items()
        },
    }
    (args.output_dir / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    files = " ".join(str(args.output_dir / f"{name}.jsonl") for name in outcomes)
    print(f"to see them side by side:\n  accel-scaler report {files} -o report.html")


if __name__ == "__main__":
    main()
