"""Train or fine-tune a causal language model in fp16 or bf16, in a raw Accelerate loop, resumable.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/finetune_lm.py

With no arguments it needs no network: a small GPT-2 learns the help texts that come with Python
(`pydoc_data.topics`), with a byte-level tokenizer trained on them. It prints loss and perplexity on
held-out text, and at the end a summary of the scaler. The model lands in --output_dir.

Your own text, and a run that may be cut off and goes on where it was:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/finetune_lm.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --max_steps 500 \
        --checkpoint_every 100 --output_dir out/book
    ... the same command and --resume_from_checkpoint latest

The resumed run equals the uninterrupted one, bit for bit, in either step mode
(ACCEL_SCALER_STEP_MODE=overlap in front of the command), on the same machine and number of ranks.
"""

import json
import logging
import math
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from datasets import Dataset, load_dataset
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase

from accel_scaler import attach

END = "<|endoftext|>"
RESULT_FILE = "finetune_lm.json"  # written last; marks a directory as this recipe's, and ended
STATE_FILE = "finetune_lm_state.json"  # written last; marks a checkpoint as complete


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"finetune_lm: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(
        description="Train a causal language model in fp16 or bf16 with accel_scaler.",
        epilog="Without data arguments it learns the help texts of Python. An earlier result of "
        "this recipe in --output_dir is replaced, a directory with anything else in it is refused. "
        "The scaler's settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new GPT-2)")
    add("--dataset_name", help="hub name or directory with a train split, for load_dataset")
    add("--dataset_config", help="the data set's configuration, where it has several")
    add("--train_file", type=Path, help="your text: .txt, or .csv, or .json/.jsonl by lines")
    add("--validation_file", type=Path, help="held-out text (default: the end of the train file)")
    add("--text_column", default="text", help="column with the text (default: text)")
    add("--output_dir", type=Path, default=Path("out/finetune_lm"), help="(default: %(default)s)")
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--mixed_precision", choices=["fp16", "bf16"], default="fp16", help="(default: fp16)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--max_steps", type=positive, help="optimizer steps (default: 60)")
    length.add_argument("--num_train_epochs", type=positive, help="instead of --max_steps")
    add("--per_device_batch_size", type=positive, default=4, help="(default: 4)")
    add("--gradient_accumulation_steps", type=positive, default=2, help="(default: 2)")
    add("--learning_rate", type=float, help="(default: 1e-3; 5e-5 for a model that was loaded)")
    add("--weight_decay", type=float, default=0.01, help="(default: 0.01)")
    add("--warmup_ratio", type=float, default=0.1, help="part of the steps (default: 0.1)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: 1.0)")
    add("--block_size", type=positive, default=64, help="tokens of a block (default: 64)")
    add("--max_eval_samples", type=positive, default=64, help="held-out blocks (default: 64)")
    add("--eval_every", type=int, default=20, help="steps; 0: before and after (default: 20)")
    add("--checkpoint_every", type=int, default=0, help="steps (default: 0, never)")
    add("--resume_from_checkpoint", help="DIR; 'latest' is the one in --output_dir with most steps")
    add("--seed", type=int, default=0, help="of order, dropout and new weights (default: 0)")
    args = parser.parse_args(argv)
    if min(args.eval_every, args.checkpoint_every) < 0:
        parser.error("argument --eval_every, --checkpoint_every: expected zero or more")
    return args


def read_file(path: Path, column: str) -> Dataset:
    """Load one file; a .txt file is one text."""
    if not path.is_file():
        raise fail(f"no such file: {path}")
    with path.open("rb") as lines:
        if not any(map(bytes.strip, lines)):
            raise fail(f"{path} is empty")
    try:
        if path.suffix == ".txt":
            return Dataset.from_dict({column: [path.read_text(encoding="utf-8")]})
        if path.suffix == ".csv":  # "NA" and "None" are words, not gaps
            return load_dataset("csv", data_files=str(path), split="train", keep_default_na=False)
        if path.suffix in (".json", ".jsonl"):
            return load_dataset("json", data_files=str(path), split="train")
    except (UnicodeDecodeError, datasets.exceptions.DatasetGenerationError) as error:
        raise fail(f"{path} cannot be read: {error.__cause__ or error}") from error
    raise fail(f"{path}: expected a name that ends in .txt, .csv, .json or .jsonl")


def load_texts(args: Namespace) -> list[Dataset]:
    """Return the texts to learn from, and the held-out ones if they are a set of their own."""
    column, name = args.text_column, args.dataset_name
    if args.train_file:
        files = filter(None, (args.train_file, args.validation_file))
        found = [read_file(path, column) for path in files]
    elif name:
        try:
            splits = load_dataset(name, args.dataset_config)
        except (OSError, ValueError) as error:  # not found, no network, no such configuration
            raise fail(f"--dataset_name {name}: {str(error).splitlines()[0]}") from error
        if "train" not in splits:
            raise fail(f"--dataset_name {name} has no split 'train', only: {', '.join(splits)}")
        held_out = [splits[split] for split in ("validation", "test") if split in splits]
        found = [splits["train"], *held_out[:1]]
    else:
        found = [Dataset.from_dict({column: [topics[topic] for topic in sorted(topics)]})]
    for data in found:
        if column not in data.column_names:
            there = ", ".join(data.column_names)
            raise fail(f"the data has no column {column!r}, only: {there} (set --text_column)")
    found = [data.select_columns(column) for data in found]
    # A column cannot be renamed to the name it has.
    return found if column == "text" else [data.rename_column(column, "text") for data in found]


def cut(texts: Dataset, tokenizer: TokenizerBase, size: int) -> Dataset:
    """Join the tokens of all texts, with an end token after each, and cut them into blocks."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize(rows: dict) -> dict:
        given = [text for text in rows["text"] if text and text.strip()]
        found = tokenizer(given)["input_ids"] if given else []
        tokens = [token for text in found for token in (*text, *end)]
        # What does not fill a block is left out: every block has as many tokens as the others.
        starts = range(0, len(tokens) - size + 1, size)
        return {"input_ids": [tokens[at : at + size] for at in starts]}

    with PartialState().main_process_first():  # the others read what it has cached
        return texts.map(tokenize, batched=True, remove_columns=texts.column_names)


def load_blocks(texts: list[Dataset], tokenizer: TokenizerBase, args: Namespace) -> list[Dataset]:
    """Return the blocks to learn from and the held-out ones: the last tenth, if not given."""
    train, size = cut(texts[0], tokenizer, args.block_size), args.block_size
    if len(train) < 2:
        raise fail(f"the text fills {len(train)} blocks of {size} tokens (--block_size), not two")
    if len(texts) == 1:
        kept = len(train) - max(1, len(train) // 10)
        train, held_out = train.select(range(kept)), train.select(range(kept, len(train)))
    elif not len(held_out := cut(texts[1], tokenizer, size)):
        raise fail(f"the held-out text does not fill one block of {size} tokens")
    return [train, held_out.select(range(min(len(held_out), args.max_eval_samples)))]


def make_loaders(blocks: Sequence[Dataset], size: int) -> tuple[DataLoader, DataLoader]:
    """Make the loaders. Their own generators leave dropout's numbers alone: a resumed run starts
    an epoch in the middle, and draws as many as the uninterrupted one."""
    own, (train, held_out) = torch.Generator, (part.with_format("torch") for part in blocks)
    train_loader = DataLoader(train, size, shuffle=True, drop_last=True, generator=own())
    return train_loader, DataLoader(held_out, 4 * size, generator=own())


def micro_batches(accelerator: Accelerator, loader: DataLoader, seen: int) -> Iterator[dict]:
    """Yield batches without end, epoch after epoch; the first ``seen`` are left out."""
    epoch, skipped = divmod(seen, len(loader))
    while True:
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)  # with the seed it decides the order
        yield from rest
        epoch, skipped = epoch + 1, 0


def load_model(args: Namespace, texts: Dataset) -> tuple[PreTrainedModel, TokenizerBase]:
    """Load the named model, or make a small one and its tokenizer."""
    if name := args.model_name_or_path:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name)
        except (OSError, ValueError) as error:  # ValueError: not a causal language model
            raise fail(f"--model_name_or_path {name}: {str(error).splitlines()[0]}") from error
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest and args.block_size > longest:
            raise fail(f"--block_size {args.block_size}: the model takes at most {longest} tokens")
        return model, tokenizer
    small = ByteLevelBPETokenizer()
    small.train_from_iterator(texts["text"], 1024, special_tokens=[END], show_progress=False)
    trained = Tokenizer.from_str(small.to_str())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=END, bos_token=END, pad_token=END
    )
    end = tokenizer.eos_token_id
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=max(128, args.block_size), n_embd=128, n_layer=2,
        n_head=4, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokenizer


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


def checkpoints(out: Path) -> dict[int, Path]:
    """Return the complete checkpoints of an output directory by their steps."""
    found = (out / "checkpoints").glob(f"step_*/{STATE_FILE}")
    return {int(path.parent.name.removeprefix("step_")): path.parent for path in found}


def find_checkpoint(given: str | None, out: Path) -> tuple[Path | None, dict]:
    """Return the checkpoint to resume from, if any, and where its run was."""
    if not given:
        return None, {"step": 0, "held_out": [], "shape": {}}
    saved = checkpoints(out)
    if given == "latest" and not saved:
        raise fail(f"--resume_from_checkpoint latest: no complete checkpoint in {out}/checkpoints")
    folder = saved[max(saved)] if given == "latest" else Path(given)
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        return folder, {name: state[name] for name in ("step", "held_out", "shape")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fail(f"{folder} is not a complete checkpoint of this recipe: {error}") from error


def check_output(out: Path) -> None:
    """Refuse to write over files of another origin, or of a run that has not ended."""
    if (out / RESULT_FILE).is_file() or not out.is_dir() or not any(out.iterdir()):
        return
    held = "files of another origin; choose another directory"
    if done := checkpoints(out):
        held = f"a run that has not ended, at step {max(done)}; use --resume_from_checkpoint latest"
    raise fail(f"--output_dir {out} holds {held}, or pass --overwrite_output_dir")


def save_checkpoint(accelerator: Accelerator, out: Path, state: dict) -> None:
    """Save everything; a save that is cut off in the middle is never taken for a checkpoint."""
    folder = out / "checkpoints" / f"step_{state['step']}"
    if accelerator.is_main_process:
        (folder / STATE_FILE).unlink(missing_ok=True)
        (out / RESULT_FILE).unlink(missing_ok=True)  # an earlier run's: this one has not ended
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))  # waits by itself for a step that is still in hand
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        draft = folder / f"{STATE_FILE}.draft"
        draft.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / STATE_FILE)


def make_accelerator(args: Namespace) -> Accelerator:
    """Make the accelerator: steps go on across epochs, and the seed gives the order."""
    number = args.gradient_accumulation_steps
    windows = GradientAccumulationPlugin(num_steps=number, sync_with_dataloader=False)
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_plugin=windows,
        dataloader_config=order,
    )
    return attach(accelerator)


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    out, batch_size = args.output_dir, args.per_device_batch_size
    if args.dataset_name and args.train_file:
        raise fail("give --dataset_name or --train_file, not both")
    for name, needed in (("validation_file", "train_file"), ("dataset_config", "dataset_name")):
        if getattr(args, name) and not getattr(args, needed):
            raise fail(f"--{name} needs --{needed}")
    if args.block_size < 2:
        raise fail("--block_size 1: a block of one token has no next token to learn")
    if args.learning_rate is None:
        args.learning_rate = 5e-5 if args.model_name_or_path else 1e-3
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    checkpoint, state = find_checkpoint(args.resume_from_checkpoint, out)
    goes_on = checkpoint and checkpoint.resolve().parent == (out / "checkpoints").resolve()
    if not goes_on and not args.overwrite_output_dir:
        check_output(out)

    # Quiet, also of tied weights that a checkpoint saves once, which is as it should be.
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

    accelerator = make_accelerator(args)
    say, ranks = accelerator.print, accelerator.num_processes
    set_seed(args.seed)
    texts = load_texts(args)
    model, tokenizer = load_model(args, texts[0])
    blocks = load_blocks(texts, tokenizer, args)
    number = len(blocks[0])
    if number < batch_size * ranks:
        raise fail(f"{number} blocks do not fill one batch of {batch_size} on {ranks} rank(s)")
    a_step = batch_size * args.gradient_accumulation_steps * ranks
    steps = args.max_steps or 60
    if args.num_train_epochs:
        steps = max(1, args.num_train_epochs * number // a_step)

    # A resumed run shares these with its checkpoint: they decide which block comes when.
    names = ("per_device_batch_size", "gradient_accumulation_steps", "block_size", "seed")
    shape = {name: getattr(args, name) for name in names}
    shape |= {"ranks": ranks, "training_blocks": number, "parameters": model.num_parameters()}
    if checkpoint:
        differing = [f"{name} {state['shape'].get(name)}, this run has {now}"
                     for name, now in shape.items() if state["shape"].get(name) != now]  # fmt: skip
        if differing:
            raise fail(f"the checkpoint was made with {'; '.join(differing)}; resume with the same")
        if state["step"] >= steps:
            raise fail(f"the checkpoint has made {state['step']} steps of {steps}: nothing is left")
    state["shape"] = shape

    # AdamW; the learning rate goes up for the warm-up, then down to zero.
    rate, decay = args.learning_rate, args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    # A prepared schedule moves once for every rank in a step.
    warmup = int(args.warmup_ratio * steps) * ranks
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps * ranks)
    parts = model, optimizer, schedule, *make_loaders(blocks, batch_size)
    model, optimizer, schedule, train_loader, held_out_loader = accelerator.prepare(*parts)
    set_seed(args.seed, device_specific=True)  # each rank drops units of its own
    say(f"{number} training blocks of {args.block_size} tokens, {len(blocks[1])} held out")
    say(f"{steps} steps of {a_step} blocks on {ranks} x {accelerator.device.type}")

    def evaluate() -> None:
        loss = held_out_loss(model, held_out_loader, accelerator)
        state["held_out"].append((state["step"], loss))
        if accelerator.is_main_process:
            found = f"held-out loss {loss:.4f}, perplexity {perplexity(loss):.2f}"
            tqdm.write(f"step {state['step']}: {found}")

    if checkpoint:
        accelerator.load_state(str(checkpoint))
        say(f"resumed from {checkpoint}, at step {state['step']}")
    else:
        evaluate()
    if not goes_on and accelerator.is_main_process:  # lest 'latest' find an earlier run's
        for folder in (out / "checkpoints").glob("step_*"):
            shutil.rmtree(folder)
    accelerator.wait_for_everyone()

    # The loop to copy.
    hidden = not accelerator.is_local_main_process
    progress = tqdm(total=steps, initial=state["step"], desc="training", disable=hidden)
    model.train()  # a loaded model starts in evaluation mode
    seen = state["step"] * args.gradient_accumulation_steps
    for batch in micro_batches(accelerator, train_loader, seen):
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
        state["step"] += 1
        progress.update()
        last = state["step"] == steps
        if last or state["step"] % 5 == 0:  # reading the loss waits for the device
            progress.set_postfix(loss=f"{loss.item():.3f}", **accelerator.scaler_history.progress())
        if last or (args.eval_every and state["step"] % args.eval_every == 0):
            evaluate()
        if args.checkpoint_every and state["step"] % args.checkpoint_every == 0:
            save_checkpoint(accelerator, out, state)
        if last:
            break
    progress.close()
    say(accelerator.scaler_history.summary())

    # The model, the tokenizer and, last, the losses.
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(out, state_dict=weights)
        tokenizer.save_pretrained(out)
        result = {"steps": steps, "held_out_loss": state["held_out"]}
        (out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    say(f"saved to {out}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
