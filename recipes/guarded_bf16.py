"""bf16 training that survives a poisoned batch and a spike of the gradient norm; stock beside it.

    python recipes/guarded_bf16.py
    accelerate launch recipes/guarded_bf16.py          # on a GPU

A small network learns a function of eight numbers in bf16. One batch holds a NaN, as a broken file
or a division by an empty mask makes it; the targets of another are ten thousand times too large.
Stock Accelerate takes both steps: after the first every weight is NaN. With `attach` the first
window is skipped, and with `skip_norm_above="4x"` the second one, too: parameters, optimizer state
and learning rate stay as they were, and the run ends as one without these two batches.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from accel_scaler import attach, detach


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="bf16 with a poisoned batch and a spike.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: 400)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--poisoned", type=int, default=200, help="the step with a NaN")
    parser.add_argument("--spike", type=int, default=300, help="the step with huge targets")
    parser.add_argument("--skip_norm_above", default="4x", help="a norm, or a factor on the median")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    return parser.parse_args(argv)


def batches(args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Inputs (batch_size, 8) and targets (batch_size, 1), the same on each call."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(args.steps):
        x = torch.randn(args.batch_size, 8, generator=generator)
        y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        if step == args.poisoned:
            x[3, 5] = float("nan")
        if step == args.spike:
            y = y * 1e4
        found.append((x, y))
    return found


def train(name: str, args: argparse.Namespace, settings: dict[str, Any] | None) -> float:
    """Returns the loss on batches that were not trained on."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=args.cpu)
    if settings is not None:
        attach(accelerator, settings)
    else:
        detach(accelerator)  # `accel-scaler launch` attaches every one
    set_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    for x, y in batches(args):
        x, y = x.to(accelerator.device), y.to(accelerator.device)
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(2)).to(accelerator.device)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    with torch.no_grad():
        final = float((model(x) - y).square().mean())
    accelerator.print(f"{name:34} loss at the end {final:.4f}")
    if settings is not None:
        accelerator.print(accelerator.scaler_history.summary().splitlines()[0])
    accelerator.end_training()
    return final


def main(argv: list[str] | None = None) -> list[float]:
    args = parse(argv)
    spikes = {"skip_norm_above": args.skip_norm_above}
    losses = [
        train("stock", args, None),
        train("attach", args, {"skip_norm_above": None}),
        train(f"attach, skip_norm_above={args.skip_norm_above}", args, spikes),
    ]
    args.poisoned = args.spike = -1
    return [*losses, train("stock, without the two batches", args, None)]


if __name__ == "__main__":
    main()
