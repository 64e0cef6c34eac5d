"""A small GPT-2 in bf16 with its optimizer in host memory; stock Accelerate beside it.

    python recipes/offload_bf16.py                       # float32 weights, bf16 autocast
    python recipes/offload_bf16.py --weights bfloat16    # bfloat16 weights, float32 masters
    accelerate launch recipes/offload_bf16.py            # on one GPU

It learns the help texts that come with Python, one byte a token, with four micro-batches a step and
gradient clipping. First stock trains, then `attach` with `offload="cpu"`: on a GPU AdamW's state,
and the masters, live in host memory, where the optimizer steps. On a CPU nothing has to be moved,
and with float32 weights both runs have the same losses, bit for bit. With bfloat16 weights stock
updates them in place, where small updates are rounded away; the masters lose none. Half-way the
whole state lands in --output_dir/checkpoint; `--resume` does the second half again, to the same
loss.
"""

import argparse
import json
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


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="bf16 with the optimizer in host memory.")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max_steps", type=int, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--batch_size", type=int, default=4, help="of a micro-batch (default: 4)")
    parser.add_argument("--block_size", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--output_dir", type=Path, default=Path("out/offload_bf16"))
    parser.add_argument("--resume", action="store_true", help="from --output_dir/checkpoint")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
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


def bytes_on_device(model: torch.nn.Module, optimizer: torch.optim.Optimizer, host: bool) -> float:
    """Bytes a parameter that a GPU holds: weights, gradients, and, unless it lives in host memory,
    optimizer state."""
    parameters = list(model.parameters())
    entries = [] if host else optimizer.state_dict()["state"].values()
    state = [value for entry in entries for value in entry.values() if value.numel() > 1]
    held = sum(each.numel() * each.element_size() for each in [*parameters, *parameters, *state])
    return held / sum(each.numel() for each in parameters)


def train(args: argparse.Namespace, offloads: bool) -> dict:
    """One run: stock, or with the optimizer in host memory. Losses and memory."""
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=args.cpu, gradient_accumulation_steps=MICRO_BATCHES
    )
    if offloads:
        attach(accelerator, offload="cpu")
    else:
        detach(accelerator)  # `accel-scaler launch` attaches every one
    device = accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    set_seed(0)
    sizes = {"n_positions": args.block_size, "n_embd": 128, "n_layer": 4, "n_head": 4}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes, **drop)
    model = GPT2LMHeadModel(config).to(getattr(torch, args.weights))
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
    losses = []
    for step in range(first, args.max_steps):
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
        losses.append(loss.detach())
        if offloads and not args.resume and step + 1 == half:
            accelerator.save_state(checkpoint)

    model.eval()
    with torch.no_grad():
        blocks = [batch(held_out, args, seed).to(device) for seed in range(8)]
        final = sum(float(model(input_ids=each, labels=each).loss) for each in blocks) / 8
    found = {"held_out": final, "losses": torch.stack(losses).tolist()}
    found["bytes"] = bytes_on_device(model, optimizer, host=offloads)
    if device.type == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
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
    runs = {"stock": earlier.get("stock") or train(args, offloads=False)}
    runs["offload"] = train(args, offloads=True)
    for name, run in runs.items():
        peak = f", peak {run['peak_mib']:.0f} MiB" if "peak_mib" in run else ""
        print(f"{name:8} held-out loss {run['held_out']:.6f}, on the device "
              f"{run['bytes']:.0f} bytes a parameter{peak}")  # fmt: skip
    beside = runs["stock"]["losses"][-len(runs["offload"]["losses"]) :]
    print(f"losses equal, bit for bit: {'yes' if beside == runs['offload']['losses'] else 'no'}")
    result.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
