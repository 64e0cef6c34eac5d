"""Train a model whose weights are fp16, through float32 master weights.

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/fp16_weights.py

Stock PyTorch refuses this: "Attempting to unscale FP16 gradients". Here the optimizer steps float32
masters, so that updates too small for fp16 are not lost, and the model holds their rounded copies.
With no arguments it needs no network: a small GPT-2, made in fp16, learns the help texts that come
with Python (`pydoc_data.topics`), one byte a token. It prints the held-out loss before and after
and the peak memory, both beside a run with fp32 weights, which it makes first, in a
process of its own. The model lands in --output_dir in fp16, and the whole state of the training in
--output_dir/checkpoint, masters included; --resume_from_checkpoint goes on from there:

    accelerate launch --config_file accelerate_configs/cpu_fp16.yaml recipes/fp16_weights.py \
        --resume_from_checkpoint out/fp16_weights/checkpoint --max_steps 60

With a model from elsewhere, and masters and optimizer state in host memory, the GPU holds 4 bytes a
parameter (fp16 weights and gradients) instead of the 16 of fp32 weights, gradients and AdamW:

    accelerate launch --config_file accelerate_configs/gpu_fp16.yaml recipes/fp16_weights.py \
        --model_name_or_path gpt2 --train_file book.txt --block_size 512 --offload cpu \
        --output_dir out/mine
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import psutil
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_scaler import ScalerConfig, attach

RESULT_FILE = "fp16_weights.json"  # marks a directory as this recipe's
CHECKPOINT, BESIDE = "checkpoint", "fp32_weights.json"  # in --output_dir
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
MIB = 2**20


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"fp16_weights: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train fp16 weights through float32 masters, and show the memory it takes.",
        epilog="The scaler's other settings are read from ACCEL_SCALER_* in the environment.",
    )
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new GPT-2)")
    add("--train_file", type=Path, help="text file (default: the help texts of Python)")
    add("--weights", choices=DTYPES, default="fp16", help="the dtype in which the model is loaded "
        "(default: %(default)s); fp32 is for comparison")  # fmt: skip
    add("--offload", choices=("none", "cpu"), help="where masters and optimizer state rest "
        "(default: ACCEL_SCALER_OFFLOAD, or none: with the model)")  # fmt: skip
    add("--step_mode", choices=("sync", "overlap"), help="when parameters are updated "
        "(default: ACCEL_SCALER_STEP_MODE, or sync)")  # fmt: skip
    add("--no_comparison", action="store_true", help="leave out the run with fp32 weights")
    out_help = "where the model goes (default: %(default)s); an earlier result of this recipe is "
    out_help += "replaced, a directory with anything else in it is refused"
    add("--output_dir", type=Path, default=Path("out/fp16_weights"), help=out_help)
    add("--overwrite_output_dir", action="store_true", help="write into any directory")
    add("--resume_from_checkpoint", type=Path, metavar="DIR", help="a checkpoint of this recipe")
    add("--max_steps", type=positive, default=30, help="optimizer steps (default: %(default)s)")
    add("--per_device_batch_size", type=positive, default=4, help="(default: %(default)s)")
    add("--learning_rate", type=float, default=1e-3, help="(default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    block_help = "tokens of one example (default: %(default)s)"
    add("--block_size", type=positive, default=32, help=block_help)
    add("--max_eval_samples", type=positive, default=32, help="held-out blocks (default: 32)")
    add("--seed", type=int, default=0, help="of weights and order (default: 0)")
    return parser.parse_args(argv)


def read_texts(args: argparse.Namespace) -> list[str]:
    """Check the paths and return the texts."""
    out, checkpoint = args.output_dir, args.resume_from_checkpoint
    if out.exists() and not out.is_dir():
        raise fail(f"--output_dir {out} is a file")
    foreign = out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file()
    if foreign and not args.overwrite_output_dir:
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory "
                   "or pass --overwrite_output_dir")  # fmt: skip
    if checkpoint and not (checkpoint / "optimizer.bin").is_file():
        raise fail(f"--resume_from_checkpoint {checkpoint}: no optimizer.bin there, expected the "
                   f"directory {CHECKPOINT!r} of an earlier --output_dir")  # fmt: skip
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
    """Load the named model or make a small one, in the dtype asked for: fp16 for all weights."""
    dtype = DTYPES[args.weights]
    if not args.model_name_or_path:
        length = max(128, args.block_size)
        sizes = {"n_positions": length, "n_embd": 256, "n_layer": 4, "n_head": 4}
        ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=tokens, **sizes, **ends)).to(dtype)
    try:
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error


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


def make_loader(learned: Tensor, accelerator: Accelerator, args: argparse.Namespace) -> DataLoader:
    """Make one pass over the blocks of all steps; a longer run begins as a shorter one."""
    size = args.per_device_batch_size
    random = torch.Generator().manual_seed(args.seed)
    drawn = [
        torch.randint(len(learned), (size,), generator=random)
        for _ in range(args.max_steps * accelerator.num_processes)
    ]
    return plain_loader(Subset(TensorDataset(learned), torch.cat(drawn).tolist()), size)


def plain_loader(data: Dataset, size: int) -> DataLoader:
    """Make a loader that has random numbers of its own: a resumed run continues with them."""
    return DataLoader(data, batch_size=size, generator=torch.Generator())


# --- memory ---------------------------------------------------------------------------------------


class Peak:
    """The most memory this process took from now on, in MiB, and what kind of memory that is.

    On a GPU, the memory that torch allocated. On a CPU, the growth of the resident set: the
    weights, gradients, masters and optimizer state, and all else that training makes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # What importing took for a moment does not count, so the peak must rise above it.
        self.before, self.floor = psutil.Process().memory_info().rss, _peak_resident()

    def read(self) -> tuple[float | None, str]:
        """Return the peak, None where it cannot be told, and the kind."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / MIB, "GPU memory"
        peak = _peak_resident()
        return ((peak - self.before) / MIB if peak > self.floor else None), "resident memory"


def _peak_resident() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where ru_maxrss begins with that of the process that started us
        lines = status.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_with_fp32_weights(argv: list[str], args: argparse.Namespace) -> dict | None:
    """Make the run to compare with, in a process of its own, so that neither sees the other."""
    where = args.output_dir / BESIDE
    where.unlink(missing_ok=True)
    plain = ["--weights", "fp32", "--offload", "none", "--step_mode", "sync", "--no_comparison"]
    # The telemetry file is that of the run that was asked for.
    environment = {k: v for k, v in os.environ.items() if k != "ACCEL_SCALER_TELEMETRY"}
    ran = subprocess.run([sys.executable, __file__, *argv, *plain], env=environment, check=False)
    if ran.returncode or not where.is_file():
        print(f"the run with fp32 weights ended with status {ran.returncode}: nothing to compare")
        return None
    return json.loads(where.read_text())


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Return the mean loss."""
    model.eval()
    losses = []
    for (block,) in loader:
        loss = model(input_ids=block, labels=block).loss.float()
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(block))))
    model.train()
    return torch.cat(losses).mean().item()


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    done: int,
    args: argparse.Namespace,
) -> None:
    """Make the optimizer steps that are left. Nothing in it knows of masters."""
    bar = tqdm(
        total=args.max_steps,
        initial=done,
        desc=f"{args.weights} weights",
        disable=not accelerator.is_local_main_process,
    )
    for (block,) in accelerator.skip_first_batches(loader, done):
        loss = model(input_ids=block, labels=block).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        bar.update()
        if bar.n % 5 == 0 or bar.n == args.max_steps:  # reading the loss waits for the device
            shown = {"loss": f"{loss.item():.3f}"}
            bar.set_postfix(shown | accelerator.scaler_history.progress())
    bar.close()


class Progress:
    """How many steps are done; part of the checkpoint."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the state of a checkpoint."""
        self.done = state["done"]


def master_count(optimizer: torch.optim.Optimizer) -> int:
    """Return how many elements of float32 masters the optimizer's checkpoint holds."""
    entries = optimizer.state_dict()["state"].values()
    return sum(entry["master"].numel() for entry in entries if "master" in entry)


def save(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
) -> None:
    """Write the model in the dtype of its weights, and the checkpoint."""
    accelerator.save_state(args.output_dir / CHECKPOINT)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        tokenizer.save_pretrained(args.output_dir)


def table(result: dict, other: dict | None, set_up: str) -> str:
    """Put this run and the one with fp32 weights side by side."""
    lines = [f"{'weights':<32}held-out loss before  after  peak of {result['kind']}"]
    for name, each in ((set_up, result), ("fp32, stepped in place", other)):
        if each is not None:
            mib = each["peak_mib"]
            peak = "not above what importing took" if mib is None else f"{mib:.0f} MiB"
            before, after = each["loss_before"], each["loss_after"]
            lines.append(f"{name:<32}{before:20.3f}{after:7.3f}  {peak}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    texts = read_texts(args)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    asked = {"offload": args.offload, "step_mode": args.step_mode}
    config = replace(ScalerConfig.from_env(), **{k: v for k, v in asked.items() if v})
    accelerator = attach(Accelerator(mixed_precision="fp16"), config)
    say, processes = accelerator.print, accelerator.num_processes
    tokenizer = load_tokenizer(args)
    learned, held_out = blocks(texts, tokenizer, args)

    other = None
    comparing = not args.no_comparison and not args.resume_from_checkpoint and processes == 1
    if accelerator.is_main_process and args.weights == "fp16":
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / RESULT_FILE).write_text("{}\n")
        other = run_with_fp32_weights(argv, args) if comparing else None

    set_seed(args.seed)
    peak = Peak(accelerator.device)
    model = load_model(args, len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = make_loader(learned, accelerator, args)
    evaluation = plain_loader(TensorDataset(held_out), 2 * args.per_device_batch_size)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        if progress.done >= args.max_steps:
            raise fail(f"the checkpoint has done {progress.done} steps, --max_steps is "
                       f"{args.max_steps}; pass more")  # fmt: skip
        say(f"going on after step {progress.done}")
    before = held_out_loss(model, evaluation, accelerator)
    train(accelerator, model, optimizer, loader, progress.done, args)
    progress.done = args.max_steps
    after = held_out_loss(model, evaluation, accelerator)
    mib, kind = peak.read()
    result = {"loss_before": before, "loss_after": after, "peak_mib": mib, "kind": kind}
    say(accelerator.scaler_history.summary())
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.weights == "fp32":
        where = args.output_dir / BESIDE
    else:
        where = args.output_dir / RESULT_FILE
        where_to = "host memory" if config.offload == "cpu" else "the model's memory"
        say(f"{master_count(optimizer)} float32 master weights in {where_to}")
        say(table(result, other, f"fp16, offload={config.offload}, {config.step_mode}"))
        save(accelerator, model, tokenizer, args)
        say(f"saved to {args.output_dir}, checkpoint in {args.output_dir / CHECKPOINT}")
    if accelerator.is_main_process:
        where.write_text(json.dumps(result | {"fp32_weights": other}, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
