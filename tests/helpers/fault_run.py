"""The training run that tests of faults and checkpoints disturb: all that has to be brought back.

Dropout, numbers from ``random`` and NumPy, a shuffled data loader entered in the middle of an
epoch, momentum, a schedule, overflows, growth, accumulation, a counter of the user's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs, set_seed
from support import reset, stock_fp16_on_cpu
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_scaler import ScalerConfig, attach, detach

WINDOWS = 12
AN_EPOCH = 3
"""Windows of an epoch; checkpoints are made in the middle of one."""
ACCUMULATION = 2
SAVED = (1, 4, 7, 10)
"""Windows after which ``save_state`` is called."""
OVERFLOWS = (2, 6, 7)

STOCK = "stock"
"""In place of a mode: Accelerate's own wrapper, and torch's scaler."""
MODES = ("sync", "overlap")


def momentum(params: Any, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(params, lr=0.1, momentum=0.9)
    return made


class Progress:
    """The number of the next window, as a user's script keeps it."""

    def __init__(self) -> None:
        self.window = 0

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window = state["window"]


class Run:
    """One model under one accelerator, as a training script has it."""

    def __init__(self, mode: str, optimizer: Any = momentum, **settings: Any) -> None:
        set_seed(5)
        self.mode = mode
        rule: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
        self.accelerator: Any = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            gradient_accumulation_steps=ACCUMULATION,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11),
            kwargs_handlers=[GradScalerKwargs(**rule)],
        )
        if mode == STOCK:
            stock_fp16_on_cpu(self.accelerator)
        else:
            config = {"step_mode": mode} | rule | settings
            attach(self.accelerator, ScalerConfig(**config))
        layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        inner = optimizer(layers.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + n))
        rows = torch.arange(4.0 * ACCUMULATION * AN_EPOCH * 2).reshape(-1, 4)
        # With a generator of its own, to begin an epoch takes no number from the model's.
        own = torch.Generator().manual_seed(11)
        loader = DataLoader(rows, batch_size=2, shuffle=True, generator=own)  # type: ignore[arg-type]
        self.layers = layers
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            layers, inner, schedule, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.seen: list[tuple[Any, ...]] = []
        self.around_step: AbstractContextManager[Any] = nullcontext()

    def loss(self, rows: Tensor) -> Tensor:
        x = torch.sin(rows) * random.choice((-1.0, 1.0)) + float(np.random.rand())
        out: Tensor = self.model(x)
        return nn.functional.mse_loss(out.float(), x[:, :2])

    def train(self, end: int = WINDOWS, after: Callable[[Run], None] = lambda run: None) -> Run:
        """Go on from where ``progress`` is; ``after`` is called behind each window."""
        while self.progress.window < end:
            epoch, done = divmod(self.progress.window, AN_EPOCH)
            self.loader.set_epoch(epoch)
            rest = self.accelerator.skip_first_batches(self.loader, done * ACCUMULATION)
            rows_seen: list[float] = []
            for rows in rest:
                with self.accelerator.accumulate(self.model):
                    loss = self.loss(rows)
                    rows_seen += rows[:, 0].tolist()
                    overflows = self.progress.window in OVERFLOWS
                    self.accelerator.backward(loss * float("inf") if overflows else loss)
                    ends = self.accelerator.sync_gradients
                    if ends:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    with self.around_step if ends else nullcontext():
                        self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if ends:
                    scale = self.accelerator.scaler.get_scale()
                    skipped = self.optimizer.step_was_skipped
                    self.seen.append((self.progress.window, tuple(rows_seen), scale, skipped))
                    self.progress.window, rows_seen = self.progress.window + 1, []
                    after(self)
                    if self.progress.window == end:
                        return self
        return self

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and scaler, copied."""
        if self.mode != STOCK:
            self.optimizer.synchronize()
        saved = self.optimizer.state_dict()
        return {
            "weights": [p.detach().clone() for p in self.layers.parameters()],
            "state": [
                value.clone()
                for index in sorted(saved["state"])
                for _, value in sorted(saved["state"][index].items())
                if isinstance(value, Tensor)
            ],
            "rates": [group["lr"] for group in saved["param_groups"]],
            "schedule": self.schedule.state_dict()["last_epoch"],
            "scaler": self.accelerator.scaler.state_dict(),
        }

    def result(self) -> dict[str, Any]:
        """Everything that a run leaves, the next random numbers too."""
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {**self.state(), "random": numbers, "seen": self.seen}

    def close(self) -> None:
        """Detach, and leave Accelerate as a fresh process has it."""
        if self.mode != STOCK:
            self.accelerator.scaler.abandon_window()
            detach(self.accelerator)
        reset()


def saver(folder: Path) -> Callable[[Run], None]:
    """``save_state`` behind each window of ``SAVED``; once it is done the folder gets its name."""

    def after(run: Run) -> None:
        if run.progress.window - 1 in SAVED:
            written, complete = folder / "written", folder / f"after_{run.progress.window:02}"
            run.accelerator.save_state(str(written))
            if not complete.exists():
                written.rename(complete)

    return after


def resume(mode: str, folder: Path) -> Run:
    """From the newest complete checkpoint; from the beginning, where there is none."""
    run = Run(mode)
    for path in sorted(folder.glob("after_*"))[-1:]:
        run.accelerator.load_state(str(path))
    return run
