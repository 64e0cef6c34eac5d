"""The host's time of a whole window beside stock Accelerate: many small parameters, nothing else.

    python benchmarks/window.py                     # about five minutes on two cores
    python benchmarks/window.py --sizes 148         # GPT-2's number of parameters alone
    python benchmarks/window.py --loop trainer      # the same windows inside the Trainer

Each parameter has ten elements, so that what is measured is Python and the calls of kernels: on a
GPU the part of a step in which the device may have to wait for the host. A window is forward,
backward, clip, AdamW, schedule and zero_grad, with one micro-batch or four. Variants run in turn in
one process; numbers are CPU time of all threads, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_scaler import attach
from accel_scaler.integrations import cpu_float16

LENGTH = 10
"""Elements of a parameter."""
WARM_UP = 4
"""Windows of each variant before the first timed one."""
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "sync": {},
    "overlap": {"step_mode": "overlap"},
}


class Model(nn.Module):
    """Parameters whose sum, weighted by the batch, is the loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        values = torch.randn(count, LENGTH).unbind()
        self.weights = [nn.Parameter(value.clone()) for value in values]
        for number, weight in enumerate(self.weights):
            self.register_parameter(f"weight_{number}", weight)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": (torch.cat(self.weights) * x.mean()).square().mean()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_window(
    count: int, precision: str, accumulation: int, settings: dict[str, Any] | None
) -> Callable[[], None]:
    """A window of a loop on an Accelerator."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    if settings is not None:
        attach(accelerator, **settings)
    elif precision == "fp16":  # stock has autocast and a scaler on a GPU alone
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    model = Model(count)
    inner = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    batch = torch.ones(2)

    def window() -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return window


class Ones(Dataset[dict[str, Tensor]]):
    """Batches for the Trainer."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(()), "labels": torch.zeros(())}


def trainer_times(
    count: int, precision: str, accumulation: int, settings: dict[str, Any] | None, windows: int
) -> list[float]:
    """Seconds of each window of a Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []

    class Clock(TrainerCallback):
        begin = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time() - self.begin)

    AcceleratorState._reset_state()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            bf16=precision == "bf16",
            max_steps=windows,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            optim="adamw_torch_fused",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(Model(count), arguments, train_dataset=Ones(), callbacks=[Clock()])
        if settings is not None:
            attach(trainer, **settings)
        trainer.train()
    return times[WARM_UP:]


def in_turn(windows: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each variant's windows."""
    times: dict[str, list[float]] = {name: [] for name in windows}
    for turn in range(WARM_UP + repeats):
        for name, window in windows.items():
            start = time.process_time()
            window()
            if turn >= WARM_UP:
                times[name].append(time.process_time() - start)
    return times


def rows(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """The name of a row, and each variant's seconds."""
    for count, accumulation, precision in product(args.sizes, args.accumulation, args.precisions):
        label = f"{args.loop:<8}{count:>6}{precision:>6}{accumulation:>4}"
        if args.loop == "plain":
            case = (count, precision, accumulation)
            made = {name: plain_window(*case, given) for name, given in VARIANTS.items()}
            yield label, in_turn(made, args.repeats)
        elif precision != "fp16":  # on a CPU stock's Trainer has none
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            run = partial(trainer_times, count, precision, accumulation)
            for _, (name, given) in product(range(3), VARIANTS.items()):
                times[name] += run(given, WARM_UP + args.repeats // 3)
            yield label, times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--loop", choices=("plain", "trainer"), default="plain")
    add("--sizes", type=int, nargs="+", default=[148, 400, 2000], help="numbers of parameters")
    add("--precisions", nargs="+", default=["fp16", "bf16", "no"], choices=("fp16", "bf16", "no"))
    add("--accumulation", type=int, nargs="+", default=[1, 4])
    add("--repeats", type=int, default=60, help="timed windows of each variant")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    # The model has no products, so there are none to emulate where a CPU has no float16.
    cpu_float16.has_float16_kernels = lambda: True
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    heads = "".join(f"{name:>9}" for name in VARIANTS)
    print(f"{'loop':<8}{'number':>6}{'prec.':>6}{'acc':>4}{heads}   (stock in ms, ratios to it)")
    for label, times in rows(args):
        gc.collect()
        medians = {name: statistics.median(values) for name, values in times.items()}
        cells = [f"{medians['stock'] * 1e3:>9.2f}"]
        cells += [f"{m / medians['stock']:>9.2f}" for n, m in medians.items() if n != "stock"]
        print(label + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
