"""LoRA adapters in 16 bits with float32 masters, beside float32 adapters and 16 bits in place.

    python recipes/lora_16bit_adapters.py
    python recipes/lora_16bit_adapters.py --gradient_accumulation_steps 4
    python recipes/lora_16bit_adapters.py --precision fp16
    python recipes/lora_16bit_adapters.py --precision no     # bf16 weights, without autocast
    accelerate launch recipes/lora_16bit_adapters.py --model_name_or_path Qwen/Qwen2.5-0.5B \
        --block_size 1024 --learning_rate 1e-4               # on one GPU

peft casts adapters to float32, and each of them makes its own copy of the layer's input. With
`autocast_adapter_dtype=False` (look for it) they stay in the model's 16 bits and share the input.
Updated in place, they lose small updates to rounding; `master_weights="fp32"` lets the optimizer
update float32 copies, the masters, instead. Three runs from the same adapters on the same batches.
For each it prints the held-out loss, the norm of the adapters, their distance from the float32
run's, and the bytes that forward saves for backward; on a GPU also the peak of memory. docs/bf16.md
says what to expect. The adapters with masters land in --output_dir.

With no arguments it needs no network: a small Llama first learns the help texts that come with
Python, one byte a token; its adapters then learn docstrings of the standard library.
"""

import argparse
import gc
import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from stdlib_docstrings import standard_library
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from accel_scaler import attach, detach

RESULT_FILE = "lora_16bit_adapters.json"  # marks a directory as this recipe's
RUNS = {
    "float32": {},
    "16 bits, masters": {"master_weights": "fp32"},
    "16 bits, in place": None,
}
"""Of each run: what `attach` is given; None: stock Accelerate."""
BASE_STEPS, BASE_LEARNING_RATE = 300, 2e-3


def fail(message: str) -> SystemExit:
    """Make the one-line error that ends the run with status 1."""
    return SystemExit(f"lora_16bit_adapters: error: {message}")


def positive(text: str) -> int:
    """Read a whole number above zero from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above zero")
    return number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line, and refuse a directory with other files."""
    parser = argparse.ArgumentParser(description="Train LoRA adapters in 16 bits, with masters.")
    add = parser.add_argument
    add("--model_name_or_path", help="hub name or directory (default: a small new Llama)")
    kinds, kinds_help = ("bf16", "fp16", "no"), "mixed precision; no: bf16 weights, no autocast"
    add("--precision", choices=kinds, default="bf16", help=f"{kinds_help} (default: bf16)")
    add("--max_steps", type=positive, default=60, help="optimizer steps (default: %(default)s)")
    add("--gradient_accumulation_steps", type=positive, default=1, help="(default: %(default)s)")
    add("--per_device_batch_size", type=positive, default=4, help="(default: %(default)s)")
    add("--block_size", type=positive, default=32, help="tokens of a block (default: %(default)s)")
    add("--learning_rate", type=float, default=5e-4, help="at its peak (default: %(default)s)")
    add("--max_grad_norm", type=float, default=1.0, help="clip to this (default: %(default)s)")
    add("--rank", type=positive, default=8, help="of the adapters (default: %(default)s)")
    add("--max_eval_samples", type=positive, default=64, help="blocks (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--output_dir", type=Path, default=Path("out/lora_16bit_adapters"))
    args = parser.parse_args(argv)
    out = args.output_dir
    if out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file():
        raise fail(f"--output_dir {out} holds files of another origin; choose another directory")
    return args


# --- model and data -------------------------------------------------------------------------------


def batch(tokens: Tensor, size: int, args: argparse.Namespace, seed: int) -> Tensor:
    """Blocks from random places, (size, block_size), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - args.block_size, (size,), generator=generator)
    return torch.stack([tokens[start : start + args.block_size] for start in starts])


def small_base(args: argparse.Namespace) -> PreTrainedModel:
    """Make a Llama of 0.16 million parameters that knows Python's help texts, byte by byte."""
    set_seed(args.seed)
    config = LlamaConfig(
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "max_position_embeddings": args.block_size},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LEARNING_RATE)
    tokens = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    for step in range(BASE_STEPS):
        block = batch(tokens, 8, args, seed=step)
        model(input_ids=block, labels=block).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def load_base(args: argparse.Namespace, folder: Path) -> Path | str:
    """Return where the base model lies; the small one is made there first."""
    if args.model_name_or_path:
        return args.model_name_or_path
    small_base(args).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load_tokens(args: argparse.Namespace) -> list[Tensor]:
    """Return the tokens to learn from and the held-out ones."""
    data = standard_library(args.seed)
    texts = ["\n".join(data[split]["text"]) for split in ("train", "validation")]
    if not args.model_name_or_path:
        return [torch.tensor(list(text.encode())) for text in texts]
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise fail(f"--model_name_or_path {args.model_name_or_path}: {reason}") from error
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]


# --- training -------------------------------------------------------------------------------------


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that a forward keeps for backward, without the parameters'."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[int, int] = {}
        """Bytes of each piece of memory, by its address: several tensors may share one."""
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in known:
                self.found[memory.data_ptr()] = memory.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def train(
    args: argparse.Namespace, name: str, base: Path | str, tokens: list[Tensor]
) -> tuple[dict, list[Tensor], list[Tensor]]:
    """Make one of ``RUNS``; return what it found, and the adapters before and after in float32."""
    settings = RUNS[name]
    gc.collect()  # the run before
    micro_batches = args.gradient_accumulation_steps
    accelerator = Accelerator(
        mixed_precision=args.precision, gradient_accumulation_steps=micro_batches
    )
    if settings is None:
        detach(accelerator)  # `accel-scaler launch` attaches every one
    else:
        attach(accelerator, **settings)  # <- the added line, with its import at the top
    device = accelerator.device
    backend = torch.get_device_module(device)
    counts_memory = hasattr(backend, "reset_peak_memory_stats")  # a CPU does not

    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    set_seed(args.seed)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"
    )
    model = get_peft_model(model, config, autocast_adapter_dtype=name == "float32").to(device)
    adapters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().to("cpu", torch.float32, copy=True) for p in adapters]
    optimizer = torch.optim.AdamW(adapters, lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    if counts_memory:
        backend.reset_peak_memory_stats(device)
    model.train()
    losses = []
    for step in range(args.max_steps):
        for micro in range(micro_batches):
            seed = step * micro_batches + micro
            block = batch(tokens[0], args.per_device_batch_size, args, seed).to(device)
            with accelerator.accumulate(model):
                saved = SavedBytes(model)
                with saved:
                    loss = model(input_ids=block, labels=block).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(adapters, args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        losses.append(loss.detach())

    found = {"losses": [float(loss) for loss in losses], "saved_bytes": sum(saved.found.values())}
    if counts_memory:
        found["peak_bytes"] = backend.max_memory_allocated(device)
    model.eval()
    with torch.no_grad():
        held_out = batch(tokens[1], args.max_eval_samples, args, args.seed)
        parts = held_out.to(device).split(args.per_device_batch_size)
        sums = [len(each) * float(model(input_ids=each, labels=each).loss) for each in parts]
    found["held_out"] = sum(sums) / len(held_out)
    entries = list(optimizer.state_dict()["state"].values())
    found["masters"] = sum(entry["master"].numel() for entry in entries if "master" in entry)
    end = [
        entry.get("master", p).detach().float().cpu()
        for p, entry in zip(adapters, entries, strict=True)
    ]
    if name == "16 bits, masters":
        accelerator.print(accelerator.scaler_history.summary())
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    accelerator.end_training()
    return found, start, end


def distance(these: list[Tensor], those: list[Tensor]) -> float:
    """The norm of the difference."""
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(these, those, strict=True)]
    return float(sum(squares)) ** 0.5


def main(argv: list[str] | None = None) -> None:
    """Run the recipe."""
    args = parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokens = load_tokens(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result = args.output_dir / RESULT_FILE
    result.write_text("{}\n")
    base = load_base(args, args.output_dir / "base")
    runs: dict[str, dict] = {}
    for name, settings in RUNS.items():
        if settings is None and args.precision == "fp16":
            continue  # torch's scaler refuses gradients in float16
        found, start, end = train(args, name, base, tokens)
        if name == "float32":
            before, reference = start, end
        found["norm"] = distance(end, [torch.zeros_like(each) for each in end])
        found["distance"] = distance(end, reference) / distance(reference, before)
        runs[name] = found
    print("adapters           held-out loss     norm  distance  saved for backward")
    for name, run in runs.items():
        peak = f", peak {run['peak_bytes'] / 1e9:.3f} GB" if "peak_bytes" in run else ""
        print(
            f"{name:18} {run['held_out']:13.6f} {run['norm']:8.4f} {run['distance']:9.1e}  "
            f"{run['saved_bytes'] / 1e6:.3f} MB{peak}"
        )
    equal = runs["float32"]["losses"] == runs["16 bits, masters"]["losses"]
    print("distance: from the float32 adapters, divided by the distance that these moved")
    print(f"losses with masters equal to those of float32, bit for bit: {'yes' if equal else 'no'}")
    result.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
