"""A small GPT-2 in bf16 with its optimizer in host memory; the same run without it beside it.

    python recipes/offload_bf16.py                       # float32 weights, bf16 autocast
    python recipes/offload_bf16.py --weights bfloat16    # bfloat16 weights, float32 masters
    accelerate launch recipes/offload_bf16.py            # on one GPU
    python recipes/offload_bf16.py --width 1280 --layers 21 --block_size 1024    # larger than a toy

It learns the help texts that come with Python, one byte a token, with four micro-batches a step and
gradient clipping. Three runs: stock; attached, with masters for bfloat16 weights and all of it on
the device; the same with `offload="cpu"`. On a GPU AdamW's state, and the masters, then rest in
host memory and pass through the device to be stepped there, so the last two runs have the same
losses, bit for bit. On a CPU nothing has to be moved, and they have, too. Stock updates bfloat16
weights in place, where small updates are rounded away; the masters lose none. Half-way the whole
state lands in --output_dir/checkpoint; `--resume` does the second half again, to the same loss.
The state of the small model is smaller than the memory that it passes through, so its peak says
little; try a larger one (the last command).
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel

from accel_scaler import attach, detach

RESULT_FILE = "offload_bf16.json"  # marks a directory as this recipe's
MICRO_BATCHES = 4
RUNS = {"stock": None, "not offloaded": {"master_weights": "fp32"}, "offload": {"offload": "cpu"}}
"""Of each run: what `attach` is given; None: it is not attached."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="bf16 with the optimizer in host memory.")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max_steps", type=int, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--batch_size", type=int, default=4, help="of a micro-batch (default: 4)")
    parser.add_argument("--block_size", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--output_dir", type=Path, default=Path("out/offload_bf16"))
    parser.add_argument("--resume", action="store_true", help="from --output_dir/checkpoint")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    has_gpu = found is not None and found.type != "mps"  # whose memory is the host's
    parser.add_argument("--cpu", action="store_true", default=not has_gpu)
    args = parser.parse_args(argv)
    out = args.output_dir
    if out.is_dir() and any(out.iterdir()) and not (out / RESULT_FILE).is_file():
        raise SystemExit(f"offload_bf16: error: {out} holds files of another origin")
    if args.resume and not (out / "checkpoint").is_dir():
        raise SystemExit(f"offload_bf16: error: --resume: no checkpoint in {out}")
    return args


def batch(tokens: torch.Tensor, args: argparse.Namespace, seed: int) -> torch.Tensor:
    """Blocks from random places, (batch_size, block_size), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - args.block_size, (args.batch_size,), generator=generator)
    return torch.stack([tokens[start : start + args.block_size] for start in starts])


def bytes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, offloads: bool) -> dict:
    """Bytes that a GPU holds, and those that rest in host memory: weights, gradients, state."""
    parameters = list(model.parameters())
    entries = optimizer.state_dict()["state"].values()
    state = [value for entry in entries for value in entry.values() if value.numel() > 1]
    moved = sum(each.numel() * each.element_size() for each in state)
    held = 2 * sum(each.numel() * each.element_size() for each in parameters)
    return {
        "parameters": sum(each.numel() for each in parameters),
        "device_bytes": held if offloads else held + moved,
        "host_bytes": moved if offloads else 0,
    }


def train(args: argparse.Namespace, name: str) -> dict:
    """One of ``RUNS``. Losses, memory and speed."""
    settings = RUNS[name]
    gc.collect()  # the run before
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=args.cpu, gradient_accumulation_steps=MICRO_BATCHES
    )
    if settings is None:
        detach(accelerator)  # `accel-scaler launch` attaches every one
    else:
        attach(accelerator, **{"offload": "none", **settings})
    offloads, device = name == "offload", accelerator.device
    backend = torch.get_device_module(device)
    counts_memory = hasattr(backend, "max_memory_allocated")  # a CPU does not
    if counts_memory:
        backend.reset_peak_memory_stats(device)

    set_seed(0)
    sizes = {"n_positions": args.block_size, "n_embd": args.width, "n_layer": args.layers}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**ends, **sizes, **drop, n_head=args.width // 32)
    model = GPT2LMHeadModel(config).to(device, getattr(torch, args.weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    checkpoint, half = args.output_dir / "checkpoint", args.max_steps // 2
    first = 0
    if offloads and args.resume:
        accelerator.load_state(checkpoint)
        first = half

    tokens = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    learned, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    losses, times = [], []
    for step in range(first, args.max_steps):
        start = time.perf_counter()
        for micro in range(MICRO_BATCHES):
            block = batch(learned, args, seed=step * MICRO_BATCHES + micro).to(device)
            with accelerator.accumulate(model):
                loss = model(input_ids=block, labels=block).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if offloads and not args.resume and step + 1 == half:
            accelerator.save_state(checkpoint)

    found = {"losses": losses, **bytes_of(model, optimizer, offloads)}
    if counts_memory:
        found["peak_bytes"] = backend.max_memory_allocated(device)
    tokens_a_step = MICRO_BATCHES * args.batch_size * args.block_size
    found["tokens_per_s"] = tokens_a_step / statistics.median(times[2:] or times)
    model.eval()
    with torch.no_grad():
        blocks = [batch(held_out, args, seed).to(device) for seed in range(8)]
        found["held_out"] = sum(float(model(input_ids=x, labels=x).loss) for x in blocks) / 8
    if offloads:
        accelerator.print(accelerator.scaler_history.summary())
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    accelerator.end_training()
    return found


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    result = args.output_dir / RESULT_FILE
    earlier = json.loads(result.read_text()) if args.resume else {}
    result.write_text("{}")
    runs = {name: earlier.get(name) or train(args, name) for name in list(RUNS)[:2]}
    runs["offload"] = train(args, "offload")
    # A CPU's memory is all one, so for it the share that a GPU would hold is told.
    where = "a GPU would hold" if args.cpu else "on the device"
    for name, run in runs.items():
        peak = f" (peak {run['peak_bytes'] / 1e9:.3f})" if "peak_bytes" in run else ""
        loss, speed = f"held-out loss {run['held_out']:.6f}", f"{run['tokens_per_s']:,.0f} tokens/s"
        device, host = (f"{run[f'{place}_bytes'] / 1e9:.3f} GB" for place in ("device", "host"))
        print(f"{name:13} {loss}, {speed}, {where} {device}{peak}, in host memory {host}")
    losses = runs["offload"]["losses"]
    for name, whose in (("stock", "stock's"), ("not offloaded", "those without offload")):
        is_equal = runs[name]["losses"][-len(losses) :] == losses
        answer = "yes" if is_equal else "no"
        if name == "stock" and not is_equal and args.weights == "bfloat16":
            answer += ", as expected: stock rounds small updates of bfloat16 weights away"
        print(f"losses equal to {whose}, bit for bit: {answer}")
    result.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
