"""An average of the weights that is the target network; one batch is poisoned; stock beside it.

    python recipes/ema.py
    accelerate launch recipes/ema.py          # on a GPU

A mean teacher: a small network learns a function from labelled batches and, on unlabelled ones,
from the answers of its own average (EMA), as networks in reinforcement learning and
self-distillation learn from their target network. One batch holds a NaN. Stock Accelerate takes
that step in bf16: weights and average are NaN from then on. With `attach` nothing moves at that
step, the average neither, since `optimizer.step_was_skipped` says so: the run ends with the average
of one without that batch, bit for bit.

ACCEL_SCALER_STEP_MODE=overlap in front of the first command changes no number. An average that is
the target of the next batch has to wait for the update. Other averages can be taken later:
docs/averages.md.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_scaler import attach, detach


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An average that is the target network, in bf16.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: 400)")
    parser.add_argument("--batch_size", type=int, default=16, help="labelled rows (default: 16)")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.98, help="EMA decay (default: 0.98)")
    parser.add_argument("--consistency", type=float, default=0.5, help="of the unlabelled loss")
    parser.add_argument("--poisoned", type=int, default=200, help="the step with a NaN")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    return parser.parse_args(argv)


def answers(x: Tensor) -> Tensor:
    """What is to be learned: (batch, 8) to (batch, 1)."""
    return torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def batches(args: argparse.Namespace) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, answers and four times as many unlabelled inputs, the same on each call."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(args.steps):
        x, more = torch.randn(5 * args.batch_size, 8, generator=generator).tensor_split(
            [args.batch_size]
        )
        y = answers(x)
        if step == args.poisoned:
            x[3, 5] = float("nan")
        found.append((x, y, more))
    return found


def train(name: str, args: argparse.Namespace, is_attached: bool, left_out: int = -1) -> float:
    """Returns the average's loss on batches that were not trained on."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=args.cpu)
    if is_attached:
        attach(accelerator)
    else:
        detach(accelerator)  # `accel-scaler launch` attaches every one
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.decay))

    for step, batch in enumerate(batches(args)):
        if step == left_out:
            continue
        x, y, more = (each.to(accelerator.device) for each in batch)
        with torch.no_grad(), accelerator.autocast():
            target = average(more)
        loss = (model(x) - y).square().mean()
        loss = loss + args.consistency * (model(more) - target).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not optimizer.step_was_skipped:
            average.update_parameters(model)
        optimizer.zero_grad()

    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = average.module(x.to(accelerator.device)).float().cpu()
    final = float((found - answers(x)).square().mean())
    steps = int(average.n_averaged)
    accelerator.print(f"{name:30} {steps} steps averaged, the average's loss {final:.4f}")
    if is_attached:
        accelerator.print(accelerator.scaler_history.summary().splitlines()[0])
    accelerator.end_training()
    return final


def main(argv: list[str] | None = None) -> list[float]:
    args = parse(argv)
    return [
        train("stock", args, is_attached=False),
        train("attach", args, is_attached=True),
        train("stock, without the bad batch", args, is_attached=False, left_out=args.poisoned),
    ]


if __name__ == "__main__":
    main()
