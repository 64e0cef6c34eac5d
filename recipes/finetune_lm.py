"""Train or fine-tune a causal language model in fp16, in a raw Accelerate loop, with checkpoints.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/finetune_lm.py

With no arguments it needs no network: a small GPT-2 learns the help texts that come with Python
(`pydoc_data.topics`), with a byte-level tokenizer trained on the same texts. It prints the loss and
the perplexity on held-out text before, during and after, a progress bar with the loss, the loss
scale and the skipped steps, and at the end what the scaler saw. The model lands in --output_dir,
for `AutoModelForCausalLM.from_pretrained`.

Your own text, and a run that may be cut off and goes on where it was:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/finetune_lm.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --max_steps 500 \
        --checkpoint_every 100 --output_dir out/book
    ... the same command and --resume_from_checkpoint latest

The resumed run computes what the uninterrupted one computes, bit for bit, whatever the step mode
(ACCEL_SCALER_STEP_MODE=overlap in front of the command), on the same machine and number of ranks.
"""

import argparse
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, set_seed
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from accel_scaler import attach

END = "<|endoftext|>"
RESULT_FILE = "finetune_lm.json"  # written last; marks a directory as this recipe's, and ended
STATE_FILE = "finetune_lm_state.json"  # written last; marks a checkpoint as complete
SHOW_EVERY = 5
# What a resumed run must have in common with its checkpoint: they decide which block comes when.
UNCHANGED = ("per_device_batch_size", "gradient_accumulation_steps", "block_size", "seed")


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"finetune_lm: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def count(text: str) -> int:
    """Read a whole number from the command line, zero for never."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is below zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a causal language model in fp16 with accel_scaler.",
        epilog="Without data arguments it learns the help texts of Python. "
        "The scaler's settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new GPT-2)")
    add("--dataset_name", help="hub name or directory with a train split, for load_dataset")
    add("--dataset_config", help="the data set's configuration, where it has several")
    add("--train_file", type=Path, help="your text: .txt, or .csv, or .json/.jsonl by lines")
    add("--validation_file", type=Path, help="held-out text (default: the end of the train file)")
    add("--text_column", default="text", help="column with the text (default: %(default)s)")
    out_help = "where the model goes (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/finetune_lm"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--max_steps", type=positive, help="optimizer steps (default: 60)")
    length.add_argument("--num_train_epochs", type=positive, help="instead of --max_steps")
    add("--per_device_batch_size", type=positive, default=4, help="(default: %(default)s)")
    add("--gradient_accumulation_steps", type=positive, default=2, help="(default: %(default)s)")
    rate_help = "at its peak (default: 1e-3 for the new model, 5e-5 for one that was loaded)"
    add("--learning_rate", type=float, help=rate_help)
    add("--weight_decay", type=float, default=0.01, help="(default: %(default)s)")
    add("--warmup_ratio", type=float, default=0.1, help="part of the steps (default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    add("--block_size", type=positive, default=64, help="tokens of a block (default: %(default)s)")
    add("--max_eval_samples", type=positive, default=64, help="held-out blocks (default: 64)")
    eval_help = "evaluate every N steps, 0: before and after only (default: %(default)s)"
    add("--eval_every", type=count, default=20, metavar="N", help=eval_help)
    save_help = "save a checkpoint in OUTPUT_DIR/checkpoints every N steps (default: never)"
    add("--checkpoint_every", type=count, default=0, metavar="N", help=save_help)
    resume_help = "a checkpoint to go on from; 'latest' is the one in --output_dir with most steps"
    add("--resume_from_checkpoint", metavar="DIR|latest", help=resume_help)
    add("--seed", type=int, default=0, help="of order, dropout and new weights (default: 0)")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded or written."""
    if args.dataset_name and args.train_file:
        raise fail("give --dataset_name or --train_file, not both")
    if args.validation_file and not args.train_file:
        raise fail("--validation_file needs --train_file")
    if args.dataset_config and not args.dataset_name:
        raise fail("--dataset_config needs --dataset_name")
    if args.block_size < 2:
        raise fail("--block_size 1: a block of one token has no next token to learn")
    for path in filter(None, (args.train_file, args.validation_file)):
        if not path.is_file():
            raise fail(f"no such file: {path}")
        if path.suffix not in (".txt", ".csv", ".json", ".jsonl"):
            raise fail(f"{path}: expected a name that ends in .txt, .csv, .json or .jsonl")
        with path.open("rb") as lines:
            if not any(map(bytes.strip, lines)):
                raise fail(f"{path} is empty")
    if args.learning_rate is None:
        args.learning_rate = 5e-5 if args.model_name_or_path else 1e-3
    check_output(args)


def goes_on(args: argparse.Namespace) -> bool:
    """Whether the run that is resumed is the one in the output directory."""
    given = args.resume_from_checkpoint
    own = (args.output_dir / "checkpoints").resolve()
    return given == "latest" or bool(given and Path(given).resolve().parent == own)


def check_output(args: argparse.Namespace) -> None:
    """Refuse to write over what is not this recipe's, or has not ended."""
    out, saved = args.output_dir, checkpoints(args.output_dir)
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    if args.overwrite_output_dir or goes_on(args):
        return
    ended = (out / RESULT_FILE).is_file()
    if saved and not ended:
        raise fail(f"--output_dir {out} holds a run that has not ended, at step {max(saved)}; pass "
                   "--resume_from_checkpoint latest to go on, or --overwrite_output_dir "
                   "to start afresh")  # fmt: skip
    if out.is_dir() and any(out.iterdir()) and not ended:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip


# --- the data -------------------------------------------------------------------------------------


def texts_of(data: Dataset, source: str, args: argparse.Namespace) -> Dataset:
    """Reduce a data set of the user's to the column of texts."""
    if args.text_column not in data.column_names:
        there = ", ".join(data.column_names)
        raise fail(f"{source} has no column {args.text_column!r}, only: {there} "
                   "(set --text_column)")  # fmt: skip
    return data.select_columns(args.text_column).rename_column(args.text_column, "text")


def read_file(path: Path, args: argparse.Namespace) -> Dataset:
    """Load one file; a .txt file is one text."""
    try:
        if path.suffix == ".txt":
            return Dataset.from_dict({"text": [path.read_text(encoding="utf-8")]})
        if path.suffix == ".csv":  # "NA" and "None" are words, not gaps
            data = load_dataset("csv", data_files=str(path), split="train", keep_default_na=False)
        else:
            data = load_dataset("json", data_files=str(path), split="train")
    except UnicodeDecodeError as error:
        raise fail(f"{path} is not UTF-8 text: {error}") from error
    except DatasetGenerationError as error:
        raise fail(f"{path} cannot be read: {error.__cause__ or error}") from error
    return texts_of(data, str(path), args)


def load_texts(args: argparse.Namespace) -> tuple[Dataset, Dataset | None]:
    """Return the texts to learn from, and the held-out ones if they are a set of their own."""
    if args.train_file:
        held_out = args.validation_file and read_file(args.validation_file, args)
        return read_file(args.train_file, args), held_out
    if not args.dataset_name:
        return Dataset.from_dict({"text": [topics[name] for name in sorted(topics)]}), None
    name = args.dataset_name
    try:
        splits = load_dataset(name, args.dataset_config)
    except (OSError, ValueError) as error:  # not found, no network, no such configuration
        raise fail(f"--dataset_name {name}: {str(error).splitlines()[0]}") from error
    if "train" not in splits:
        raise fail(f"--dataset_name {name} has no split 'train', only: {', '.join(splits)}")
    held_out = next((splits[n] for n in ("validation", "test") if n in splits), None)
    return texts_of(splits["train"], name, args), held_out and texts_of(held_out, name, args)


def cut(texts: Dataset, tokenizer: PreTrainedTokenizerBase, size: int) -> Dataset:
    """Join the tokens of all texts, with an end token after each, and cut them into blocks."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize(rows: dict) -> dict:
        given = [text for text in rows["text"] if text and text.strip()]
        found = tokenizer(given)["input_ids"] if given else []
        tokens = [token for text in found for token in (*text, *end)]
        # What does not fill a block is left out: every block has as many tokens as the others.
        starts = range(0, len(tokens) - size + 1, size)
        return {"input_ids": [tokens[at : at + size] for at in starts]}

    return texts.map(tokenize, batched=True, remove_columns=texts.column_names)


def load_blocks(
    texts: tuple[Dataset, Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
) -> tuple[Dataset, Dataset]:
    """Return the blocks to learn from and the held-out ones: the last tenth, if not given."""
    train, size = cut(texts[0], tokenizer, args.block_size), args.block_size
    if len(train) < 2:
        raise fail(f"the text fills {len(train)} blocks of {size} tokens; two are the least "
                   "(set --block_size)")  # fmt: skip
    if texts[1] is None:
        kept = len(train) - max(1, len(train) // 10)
        train, held_out = train.select(range(kept)), train.select(range(kept, len(train)))
    elif not len(held_out := cut(texts[1], tokenizer, size)):
        raise fail(f"the held-out text does not fill one block of {size} tokens")
    return train, held_out.select(range(min(len(held_out), args.max_eval_samples)))


def micro_batches(accelerator: Accelerator, loader: DataLoader, seen: int) -> Iterator[dict]:
    """Yield batches without end, epoch after epoch; the first ``seen`` are left out."""
    epoch, skipped = divmod(seen, len(loader))
    while True:
        loader.set_epoch(epoch)  # with the seed it decides the order
        yield from accelerator.skip_first_batches(loader, skipped) if skipped else loader
        epoch, skipped = epoch + 1, 0


# --- the model ------------------------------------------------------------------------------------


def load_model(
    args: argparse.Namespace, texts: Dataset
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the named model, or make a small one and its tokenizer."""
    if args.model_name_or_path:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        except (OSError, ValueError) as error:  # ValueError: not a causal language model
            reason = str(error).splitlines()[0]
            raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest and args.block_size > longest:
            raise fail(f"--block_size {args.block_size}: the model takes at most {longest} tokens")
        return model, tokenizer
    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    small.train_from_iterator(filter(None, texts["text"]), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small, eos_token=END, bos_token=END, pad_token=END
    )
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=max(128, args.block_size), n_embd=128, n_layer=2,
        n_head=4, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokenizer


def make_optimizer(
    model: PreTrainedModel, args: argparse.Namespace, steps: int, ranks: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make a fused AdamW and its learning rates: up for the warm-up, then down to zero."""
    rate, decay = args.learning_rate, args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    warmup = int(args.warmup_ratio * steps)
    # A prepared schedule moves once for every rank in a step.
    return optimizer, get_linear_schedule_with_warmup(optimizer, warmup * ranks, steps * ranks)


def load(
    accelerator: Accelerator, args: argparse.Namespace
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[Dataset, Dataset]]:
    """Load model, tokenizer and blocks."""
    refused = None
    with accelerator.main_process_first():  # the others read what it has cached
        try:
            texts = load_texts(args)
            model, tokenizer = load_model(args, texts[0])
            blocks = load_blocks(texts, tokenizer, args)
        except SystemExit as error:  # raised behind the barrier, where no rank waits for this one
            refused = error
    if refused:
        raise refused
    return model, tokenizer, blocks


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass
class Run:
    """Where a run is: what a checkpoint holds besides what `save_state` writes."""

    step: int = 0
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    shape: dict[str, int] = field(default_factory=dict)  # what must not change on the way


def checkpoints(out: Path) -> dict[int, Path]:
    """Return the complete checkpoints of an output directory by their steps."""
    found = (out / "checkpoints").glob(f"step_*/{STATE_FILE}")
    return {int(path.parent.name.removeprefix("step_")): path.parent for path in found}


def find_checkpoint(args: argparse.Namespace) -> tuple[Path | None, Run]:
    """Return the checkpoint to resume from, if any, and where its run was."""
    if not args.resume_from_checkpoint:
        return None, Run()
    if args.resume_from_checkpoint == "latest":
        saved = checkpoints(args.output_dir)
        if not saved:
            raise fail(f"--resume_from_checkpoint latest: no complete checkpoint in "
                       f"{args.output_dir / 'checkpoints'}")  # fmt: skip
        folder = saved[max(saved)]
    else:
        folder = Path(args.resume_from_checkpoint)
    try:
        return folder, Run(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise fail(f"--resume_from_checkpoint {folder} is not a complete checkpoint of this "
                   f"recipe: {STATE_FILE}: {error}") from error  # fmt: skip


def check_resume(run: Run, shape: dict[str, int], steps: int) -> None:
    """Refuse to go on with other data, another order of it, or another model."""
    for name, now in shape.items():
        if run.shape.get(name) != now:
            raise fail(f"the checkpoint was made with {name} {run.shape.get(name)}, this run has "
                       f"{now}; resume with the same")  # fmt: skip
    if run.step >= steps:
        raise fail(f"the checkpoint has made {run.step} steps of {steps}, nothing is left to do")


def save_checkpoint(accelerator: Accelerator, run: Run, out: Path) -> None:
    """Save everything; what is cut off in the middle is never taken for a checkpoint."""
    folder = out / "checkpoints" / f"step_{run.step}"
    if accelerator.is_main_process:
        (folder / STATE_FILE).unlink(missing_ok=True)
        (out / RESULT_FILE).unlink(missing_ok=True)  # an earlier run's: this one has not ended
    accelerator.wait_for_everyone()
    # In the asynchronous modes it waits for the step in hand by itself.
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        draft = folder / f"{STATE_FILE}.draft"
        draft.write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / STATE_FILE)


def start_afresh(accelerator: Accelerator, out: Path) -> None:
    """Remove the checkpoints of an earlier run, lest 'latest' find them."""
    if accelerator.is_main_process:
        for folder in (out / "checkpoints").glob("step_*"):
            shutil.rmtree(folder)
    accelerator.wait_for_everyone()


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Return the mean loss of a token in the held-out blocks of all ranks."""
    model.eval()
    losses = []
    for batch in loader:
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        # Row by row: to share rows out evenly some come twice, and are taken out again here.
        losses.append(accelerator.gather_for_metrics(each.mean(1)))
    model.train()
    return torch.cat(losses).cpu().double().mean().item()


def perplexity(loss: float) -> float:
    """Return exp(loss), inf where that is too large for a number."""
    return math.inf if loss > 700 else math.exp(loss)


def train(
    accelerator: Accelerator,
    prepared: tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler],
    loaders: tuple[DataLoader, DataLoader],
    run: Run,
    steps: int,
    args: argparse.Namespace,
) -> None:
    """Make the optimizer steps that are left. This is the loop to copy."""
    model, optimizer, schedule = prepared
    hidden = not accelerator.is_local_main_process
    progress = tqdm(total=steps, initial=run.step, desc="training", disable=hidden)
    seen = run.step * args.gradient_accumulation_steps
    model.train()  # a loaded model starts in evaluation mode
    for batch in micro_batches(accelerator, loaders[0], seen):
        with accelerator.accumulate(model):
            # Blocks, batches and windows are all full, so the mean of micro-batches and ranks
            # is the mean of tokens.
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            # On every micro-batch: between two steps it leaves the gradients as they are.
            accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            schedule.step()  # stays where it is when the step was skipped
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        run.step += 1
        progress.update()
        last = run.step == steps
        if run.step % SHOW_EVERY == 0 or last:  # reading the loss waits for the device
            progress.set_postfix(loss=f"{loss.item():.3f}", **accelerator.scaler_history.progress())
        if last or (args.eval_every and run.step % args.eval_every == 0):
            run.held_out.append((run.step, held_out_loss(model, loaders[1], accelerator)))
            if accelerator.is_main_process:
                progress.write(describe(run))
        if args.checkpoint_every and run.step % args.checkpoint_every == 0:
            save_checkpoint(accelerator, run, args.output_dir)
        if last:
            break
    progress.close()


def describe(run: Run) -> str:
    """Say what the last evaluation found."""
    step, loss = run.held_out[-1]
    return f"step {step}: held-out loss {loss:.4f}, perplexity {perplexity(loss):.2f}"


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Make the accelerator: fp16, windows that go on across epochs, an order given by the seed."""
    windows = GradientAccumulationPlugin(
        num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
    )
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_plugin=windows, dataloader_config=order
    )
    return attach(accelerator)


def make_loaders(blocks: tuple[Dataset, Dataset], size: int) -> tuple[DataLoader, DataLoader]:
    """Make the loaders. Their own generators leave dropout's numbers alone: a resumed run starts
    an epoch in the middle, and draws as many as the uninterrupted one."""
    common = {"collate_fn": default_data_collator}
    training = DataLoader(blocks[0], size, shuffle=True, drop_last=True,
                          generator=torch.Generator(), **common)  # fmt: skip
    return training, DataLoader(blocks[1], 4 * size, generator=torch.Generator(), **common)


def save_result(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    out: Path,
) -> None:
    """Save the model, the tokenizer and, last, the losses."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(out, state_dict=state)
        tokenizer.save_pretrained(out)
        result = {"steps": run.step, "held_out_loss": run.held_out}
        (out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.print(f"saved to {out}")


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    check_args(args)
    checkpoint, run = find_checkpoint(args)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # Each checkpoint would warn that tied weights are saved once, which is as it should be.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

    accelerator = make_accelerator(args)
    say, ranks = accelerator.print, accelerator.num_processes
    set_seed(args.seed)
    model, tokenizer, blocks = load(accelerator, args)
    a_step = args.per_device_batch_size * args.gradient_accumulation_steps * ranks
    if len(blocks[0]) < args.per_device_batch_size * ranks:
        raise fail(f"{len(blocks[0])} training blocks do not fill one batch of "
                   f"{args.per_device_batch_size} on {ranks} rank(s)")  # fmt: skip
    if args.num_train_epochs:
        steps = max(1, args.num_train_epochs * len(blocks[0]) // a_step)
    else:
        steps = args.max_steps or 60
    shape = {name: getattr(args, name) for name in UNCHANGED}
    shape |= {"ranks": ranks, "training_blocks": len(blocks[0])}
    shape["parameters"] = model.num_parameters()
    if checkpoint:
        check_resume(run, shape, steps)
    run.shape = shape
    optimizer, schedule = make_optimizer(model, args, steps, ranks)
    loaders = make_loaders(blocks, args.per_device_batch_size)
    model, optimizer, schedule, *loaders = accelerator.prepare(model, optimizer, schedule, *loaders)
    set_seed(args.seed, device_specific=True)  # each rank drops units of its own
    say(f"{len(blocks[0])} training blocks of {args.block_size} tokens, {len(blocks[1])} held out")
    say(f"{steps} steps of {a_step} blocks on {ranks} x {accelerator.device.type}")
    if checkpoint:
        accelerator.load_state(str(checkpoint))
        say(f"resumed from {checkpoint}, at step {run.step}")
    else:
        run.held_out.append((0, held_out_loss(model, loaders[1], accelerator)))
        say(describe(run))
    if not goes_on(args):
        start_afresh(accelerator, args.output_dir)
    start, first = time.perf_counter(), run.step
    train(accelerator, (model, optimizer, schedule), loaders, run, steps, args)
    say(f"{run.step - first} steps in {time.perf_counter() - start:.0f} s")
    say(accelerator.scaler_history.summary())
    save_result(accelerator, model, tokenizer, run, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
