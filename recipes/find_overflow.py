"""An fp16 run that no scale can help: the module is named, the run heals itself, and then learns.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/find_overflow.py

With no arguments it needs no network: a small GPT-2 learns the help texts that come with Python
(`pydoc_data.topics`), one byte a token. One of its layers has weights so large that its output does
not fit in fp16, as happens with weights that were trained in bf16 or fp32 (T5 is known for it).

1. fp16: every window overflows and is skipped, whatever the scale. After the first the next one is
   watched, and the module is named in which it began. After some skips the run ends with an error.
2. The same with heal=True: the named module runs in fp32 from then on, and the same run goes on.
3. From the start with the line that healing gave, fp32_modules: nothing has to be found any more.
4. Plain fp32, to compare the losses on held-out data with.

It writes the telemetry of all four runs and found.json to --output_dir, and ends with the command
that makes a report of one. Twelve other models overflow as real ones were reported to, each in
another place (sick_models.py); one of them, or all and a table:

    ... recipes/find_overflow.py --model cosine
    ... recipes/find_overflow.py --all

Your own model, without a layer spoilt on purpose:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/find_overflow.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --output_dir out/mine

It ends with an error and status 1 when nothing overflows.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from sick_models import HELD_OUT, SICK, Batch, SickModel, own_loss
from torch import Tensor, nn
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
EVALUATED = 8  # held-out batches


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
        description="Find the module that overflows in fp16, and train on with it in fp32.",
        epilog="The scaler's other settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", choices=SICK, help="one of the models of sick_models.py")
    which.add_argument("--all", action="store_true", help="all of these models, and a table")
    which.add_argument(
        "--model_name_or_path", help="hub name or directory (default: a small new GPT-2)"
    )
    add("--train_file", type=Path, help="text file (default: the help texts of Python)")
    spoil_help = f"module whose weight is multiplied by --factor (default: {SPOILT} of the small "
    spoil_help += "GPT-2, none of a model that is passed)"
    add("--spoil", metavar="MODULE", help=spoil_help)
    add("--factor", type=float, default=2e6, help="(default: %(default)g)")
    out_help = "where the results go (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/find_overflow"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    steps_help = "of each run (default: 100; the models of sick_models.py have their own)"
    add("--max_steps", type=positive, help=steps_help)
    skip_help = "skips in a row that end the first run (default: %(default)s)"
    add("--max_consecutive_skips", type=positive, default=8, help=skip_help)
    add("--per_device_batch_size", type=positive, default=8, help="(default: %(default)s)")
    add("--learning_rate", type=float, default=1e-3, help="(default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    block_help = "tokens of one example (default: %(default)s)"
    add("--block_size", type=positive, default=64, help=block_help)
    add("--max_eval_samples", type=positive, default=64, help="held-out blocks (default: 64)")
    add("--seed", type=int, default=0, help="of weights and order (default: 0)")
    return parser.parse_args(argv)


def check_output_dir(args: argparse.Namespace) -> None:
    """Refuse a place where something else would be lost."""
    out = args.output_dir
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip


def read_texts(args: argparse.Namespace) -> list[str]:
    """Check the path and return the texts."""
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


def language_model(args: argparse.Namespace) -> SickModel:
    """What the command line asks for, in the form of sick_models.py."""
    texts, tokenizer = read_texts(args), load_tokenizer(args)
    learned, held_out = blocks(texts, tokenizer, args)
    load_model(args, len(tokenizer))  # names what is wrong with the arguments

    def batches(seed: int) -> Iterator[Batch]:
        order = torch.Generator().manual_seed(seed)
        size = args.per_device_batch_size
        while seed != HELD_OUT:
            for rows in torch.randperm(len(learned), generator=order).split(size):
                yield {"input_ids": learned[rows], "labels": learned[rows]}
        for block in held_out.tensor_split(EVALUATED):
            yield {"input_ids": block, "labels": block}

    return SickModel(
        name=args.model_name_or_path or "gpt2",
        about=args.spoil or SPOILT,
        make=lambda: load_model(args, len(tokenizer)),
        batches=batches,
        loss=own_loss,
        lr=args.learning_rate,
        steps=100,
        init_scale=ScalerConfig.from_env().init_scale,
    )


# --- the runs -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one run."""

    steps: int
    skips: int
    loss: float
    """Of the end, on held-out data, computed in fp32."""
    began: str | None
    """Where the first overflow began."""
    healed: list[str]
    """Modules that the run has put into fp32."""
    ended_by: str | None


def held_out_loss(sick: SickModel, model: nn.Module, device: torch.device) -> float:
    """Return the mean loss of a model that no accelerator has prepared, so in fp32."""
    model.to(device).eval()
    total = rows = 0.0
    for batch in islice(sick.batches(HELD_OUT), EVALUATED):
        size = len(next(iter(batch.values())))
        if not size:
            continue  # there are fewer blocks than that
        # With gradients: a model may need them for its loss.
        loss = sick.loss(model, {key: each.to(device) for key, each in batch.items()})
        total, rows = total + loss.item() * size, rows + size
    return total / rows


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sick: SickModel,
    name: str,
    args: argparse.Namespace,
) -> str | None:
    """Make the optimizer steps; return why they ended early, if they did."""
    bar = tqdm(total=sick.steps, desc=f"{name:>6}")
    with logging_redirect_tqdm(loggers=[logging.getLogger()]), bar:
        for batch in islice(sick.batches(args.seed), sick.steps * sick.accumulate):
            batch = {key: each.to(accelerator.device) for key, each in batch.items()}
            with accelerator.accumulate(model):
                with accelerator.autocast() if sick.loss_in_autocast else nullcontext():
                    loss = sick.loss(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                try:
                    optimizer.step()
                except OverflowStreakError as error:
                    tqdm.write(f"ended: {error}")
                    return str(error)
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update()
                shown = {"loss": f"{loss.item():.3f}"} | accelerator.scaler_history.progress()
                bar.set_postfix(shown)
    return None


def run(
    name: str,
    sick: SickModel,
    args: argparse.Namespace,
    precision: str = "fp16",
    **settings: object,
) -> Outcome:
    """Train once from the same start, with these settings and telemetry in name.jsonl."""
    # Accelerate keeps the precision for the whole process, and the last run has another one.
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    telemetry = args.output_dir / f"{name}.jsonl"
    telemetry.unlink(missing_ok=True)  # else it would be appended to
    # What this recipe shows is not for the environment to set.
    settings = {"find_overflow": "auto", "heal": False, "fp32_modules": ()} | settings
    config = replace(
        ScalerConfig.from_env(), telemetry=str(telemetry), init_scale=sick.init_scale, **settings
    )
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=sick.accumulate
    )
    with warnings.catch_warnings():  # of a run that needs no scaling, as is meant here
        warnings.filterwarnings("ignore", "accel_scaler: mixed_precision='no'")
        attach(accelerator, config)
    set_seed(args.seed)
    model = sick.make()
    optimizer = sick.optimizer(model.parameters(), lr=sick.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    ended_by = train(accelerator, model, optimizer, sick, name, args)
    # The runs are compared by their weights alone, whatever precision they were trained in.
    judge = sick.make()
    judge.load_state_dict(accelerator.get_state_dict(model))
    loss = held_out_loss(sick, judge, accelerator.device)
    history = accelerator.scaler_history
    began = [record.first["text"] for record in history.records if record.first]
    print(history.summary())
    accelerator.end_training()
    return Outcome(
        history.boundaries, history.skips, loss, next(iter(began), None),
        list(history.healed), ended_by,
    )  # fmt: skip


def story(sick: SickModel, args: argparse.Namespace) -> dict[str, Outcome]:
    """Make the four runs; return their results."""
    print("1. fp16: steps that overflow are skipped, and the next one is watched for the module")
    limit = {"max_consecutive_skips": args.max_consecutive_skips}
    outcomes = {"fp16": run("fp16", sick, args, **limit)}
    fp16 = outcomes["fp16"]
    if not fp16.skips:
        raise fail(f"nothing overflowed in {fp16.steps} steps of fp16; there is nothing to find")
    print(f"   {fp16.began or 'one step alone overflowed, so none that did was watched'}")

    print("2. the same with heal=True: one run, which goes on")
    healed = outcomes["healed"] = run("healed", sick, args, heal=True)
    if healed.healed:
        print(f"3. fp16 from the start, with fp32_modules={json.dumps(healed.healed)}")
        outcomes["kept"] = run("kept", sick, args, fp32_modules=tuple(healed.healed), **limit)
    elif not args.all:
        raise fail(f"{healed.skips} of {healed.steps} steps of fp16 overflowed, and no module was "
                   "at fault; that takes a lower scale, or another loss")  # fmt: skip

    print("4. fp32")
    outcomes["fp32"] = run("fp32", sick, args, precision="no")
    return outcomes


def share_in_fp32(sick: SickModel, names: list[str]) -> float:
    """Return which part of the model's parameters these modules hold."""
    model = sick.make()
    held = {p for name in names for p in model.get_submodule(name).parameters()}
    return sum(p.numel() for p in held) / sum(p.numel() for p in model.parameters())


def table(outcomes: dict[str, Outcome]) -> str:
    """Put the runs of one model side by side."""
    well = outcomes["fp32"].loss
    lines = ["run     steps  skipped  held-out loss  off fp32"]
    for name, each in outcomes.items():
        off = f"{abs(each.loss / well - 1):9.2%}"
        lines.append(f"{name:<6}{each.steps:7}{each.skips:9}{each.loss:15.4f}{off}")
    return "\n".join(lines)


def row(sick: SickModel, outcomes: dict[str, Outcome]) -> str:
    """Put one model's runs into one line."""
    healed, well = outcomes["healed"], outcomes["fp32"].loss
    share = share_in_fp32(sick, healed.healed)
    off = abs(healed.loss / well - 1)
    numbers = f"{healed.skips:8}{healed.loss:9.4f}{well:9.4f}{off:8.2%}{share:7.1%}"
    return f"{sick.name:<20}{numbers}  {', '.join(healed.healed)}"


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    check_output_dir(args)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if (processes := PartialState().num_processes) > 1:
        raise fail(f"got {processes} processes, expected one; launch it with --num_processes 1")
    chosen = list(SICK) if args.all else [args.model] if args.model else []
    if chosen and (args.train_file or args.spoil):
        raise fail("--train_file and --spoil are for a language model; --model and --all bring "
                   "their own data")  # fmt: skip
    subjects = [SICK[name] for name in chosen] or [language_model(args)]
    out = args.output_dir
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT_FILE).write_text("{}\n")
    result = {}
    rows = ["model               skipped   healed     fp32     off  share  kept in fp32"]
    for sick in subjects:
        if args.max_steps:
            sick = replace(sick, steps=args.max_steps)
        if args.all:
            print(f"--- {sick.name}: {sick.about}")
            args.output_dir = out / sick.name
            args.output_dir.mkdir(exist_ok=True)
        outcomes = story(sick, args)
        print(table(outcomes))
        rows.append(row(sick, outcomes))
        result[sick.name] = {name: asdict(each) for name, each in outcomes.items()}
        (out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    if args.all:
        print("\n".join(rows))
    print(f"to see more:\n  accel-scaler report {args.output_dir / 'healed.jsonl'} -o report.html")


if __name__ == "__main__":
    main()
