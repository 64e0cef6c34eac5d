"""An ordinary transformers.Trainer script with one line added.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/trainer_swap.py

It trains a small GPT-2 from scratch, in fp16, on the help texts that come with Python
(`pydoc_data.topics`), with a byte-level tokenizer trained on the same texts. It prints the loss on
held-out texts before and after and a summary of the scaler, and saves a model that
`AutoModelForCausalLM.from_pretrained` loads. Look for "the one added line".

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/trainer_swap.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --max_steps 500
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from accel_scaler import attach

END = "<|endoftext|>"
RESULT_FILE = "trainer_swap.txt"  # marks a directory as this recipe's


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"trainer_swap: error: {message}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model with the Trainer.")
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new GPT-2)")
    add("--train_file", type=Path, help="text file (default: the help texts of Python)")
    out_help = "where the model goes (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/trainer_swap"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--max_steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    add("--per_device_batch_size", type=int, default=4, help="(default: %(default)s)")
    add("--gradient_accumulation_steps", type=int, default=2, help="(default: %(default)s)")
    add("--learning_rate", type=float, default=3e-3, help="at its peak (default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    add("--block_size", type=int, default=64, help="tokens of one example (default: %(default)s)")
    add("--max_eval_samples", type=int, default=64, help="held-out blocks (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
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


def load_model(
    args: argparse.Namespace, texts: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the named model, or make a small one and its tokenizer."""
    if args.model_name_or_path:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            return AutoModelForCausalLM.from_pretrained(args.model_name_or_path), tokenizer
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error
    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[END], initial_alphabet=letters, show_progress=False
    )
    small.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small, eos_token=END, bos_token=END, pad_token=END
    )
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=max(128, args.block_size), n_embd=128, n_layer=2,
        n_head=4, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokenizer


def blocks(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> tuple[Dataset, Dataset]:
    """Join the tokens of all texts and cut them; the last tenth is held out."""
    end, size = tokenizer.eos_token_id, args.block_size
    tokens = [token for text in texts for token in (*tokenizer(text)["input_ids"], end)]
    cut = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    if len(cut) < 2:
        raise fail(f"the text has {len(tokens)} tokens; two blocks of {size} are the least")
    held_out = max(1, len(cut) // 10)
    train = Dataset.from_dict({"input_ids": cut[:-held_out], "labels": cut[:-held_out]})
    chosen = cut[-held_out:][: args.max_eval_samples]
    return train, Dataset.from_dict({"input_ids": chosen, "labels": chosen})


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """The Trainer's arguments. fp16=True is all that fp16 takes."""
    return TrainingArguments(
        output_dir=str(args.output_dir),
        fp16=True,
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_batch_size,
        per_device_eval_batch_size=4 * args.per_device_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        max_grad_norm=args.max_grad_norm,
        warmup_steps=max(1, args.max_steps // 10),
        logging_steps=max(1, args.max_steps // 4),
        save_strategy="no",
        # Not trainer.evaluate() before trainer.train(): on several ranks the model is then prepared
        # without DDP, and stays so. Each rank would train alone.
        eval_on_start=True,
        report_to="none",
        seed=args.seed,
    )


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    texts = read_texts(args)
    set_seed(args.seed)
    model, tokenizer = load_model(args, texts)
    train_set, held_out = blocks(texts, tokenizer, args)
    trainer = Trainer(
        model=model,
        args=training_arguments(args),
        train_dataset=train_set,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer = attach(trainer)  # <- the one added line, with its import at the top

    say = trainer.accelerator.print
    trainer.train()
    before = trainer.state.log_history[0]["eval_loss"]
    say(f"held-out loss before: {before:.3f} ({len(held_out)} blocks)")
    after = trainer.evaluate()["eval_loss"]
    say(f"held-out loss after: {after:.3f} ({args.max_steps} steps)")
    summary = trainer.accelerator.scaler_history.summary()
    say(summary)
    trainer.save_model()
    if trainer.is_world_process_zero():
        (args.output_dir / RESULT_FILE).write_text(f"loss {before} -> {after}\n{summary}\n")
    say(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
