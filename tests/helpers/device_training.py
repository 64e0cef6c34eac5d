"""A training loop on the device under test, and the same on one queue, which is its reference.

On one queue, as MPS has, every kernel and copy runs in the order of the program; the numbers must
not depend on whether there are side streams. A simulated device reports accesses that nothing
orders by itself; on others busy streams make a missing wait show in the numbers.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from accelerators import DEVICE, assert_same, current_stream, fused_adamw, on, sleep
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer import streams as streams_module
from accel_scaler.devices import Streams
from accel_scaler.scaling import local

STEPS, OVERFLOW = 8, 5
SHORT = 5_000_000
"""Cycles: some 3 ms."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "overlap": {"mode": "overlap"},
    "delayed": {"mode": "delayed", "delay_compensation": "none"},
    "preview": {"mode": "delayed", "delay_compensation": "preview"},
}


class Branched(nn.Module):
    """Some layers, and one that takes part only while ``is_used``."""

    def __init__(self) -> None:
        super().__init__()
        inner = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(8, 64), *inner, nn.Linear(64, 1))
        self.branch, self.is_used = nn.Linear(8, 1), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + self.branch(x) if self.is_used else out


class Training:
    """A model, its optimizer and scaler; ``seen`` collects what is compared.

    Args:
        in_order: this is the reference, on one queue.
        watched: the optimizer is given the model.
        cycles: how long :meth:`busy` keeps a stream.
        settings: those of ``AsyncOptimizer``.
    """

    def __init__(
        self,
        in_order: bool,
        *,
        dtype: torch.dtype = torch.float32,
        make: Callable[[Any], Any] = fused_adamw,
        scaled: bool = True,
        watched: bool = True,
        model: Callable[[], nn.Module] = Branched,
        shard: Callable[[Any], object] | None = None,
        cycles: int = SHORT,
        device: str = DEVICE,
        **settings: Any,
    ) -> None:
        self.in_order, self.make, self.settings, self.device = in_order, make, settings, device
        self.dtype, self.shard, self.module = dtype, shard, model
        kind = torch.device(device).type
        self.build()
        self.scaler: Any = (
            GradScaler(kind, init_scale=1024.0, growth_interval=3) if scaled else None
        )
        self.cycles = cycles
        self.watched, self.seen = watched, list[Tensor]()
        self.work: Any = None
        self.down: Any = None
        self.wrap()

    def build(self) -> None:
        """A new model, the same on each call."""
        torch.manual_seed(0)
        with torch.device("cpu"):  # under a default device its own generator draws other numbers
            model = self.module()
        self.model: Any = model.to(self.device, self.dtype)
        if self.shard is not None:
            self.shard(self.model)
        self.params = list(self.model.parameters())

    def wrap(self) -> None:
        """A new optimizer, of the same parameters; ``work`` and ``down`` are its side streams."""
        made, new = [], Streams.new

        def noted(streams: Streams) -> torch.Stream:
            made.append(new(streams))
            return made[-1]

        self.inner = self.make(self.params)
        with mock.patch.object(Streams, "new", noted):
            self.optimizer: Any = AsyncOptimizer(
                self.inner,
                self.model if self.watched else None,
                scaler=self.scaler,
                **self.settings,
            )
        if made:
            self.work, self.down = made

    def forward(self, step: int = 99) -> Tensor:
        x = torch.randn(16, 8, device="cpu", generator=torch.Generator().manual_seed(step))
        out: Tensor = self.model(x.to(self.device, self.params[0].dtype))
        return out

    def backward(self, step: int) -> None:
        loss = self.forward(step).float().square().mean()
        self.seen.append(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss * float("inf") if step == OVERFLOW else loss)
        loss.backward()

    def train(self, *steps: int, zero: bool = True) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            if zero:
                self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.forward().clone())
        self.model.train()

    def look(self) -> None:
        """Copy what a checkpoint of the model has."""
        self.seen += [t.clone() for t in self.model.state_dict().values()]

    def streams(self, count: int) -> list[torch.Stream]:
        """Streams of the user's; on one queue they are that queue."""
        return [current_stream() if self.in_order else torch.Stream(DEVICE) for _ in range(count)]

    def busy(self, *streams: Any) -> None:
        """What these streams, or the present one, are given from here on comes late."""
        for stream in streams or [current_stream()]:
            if stream is not None and not self.in_order:
                with on(stream):
                    sleep(self.cycles)

    def litter(self) -> None:
        """Take memory of small sizes and of the parameters', write to it, give it back."""
        sizes = (1, 8, 64, 512, 4096)
        kept = [torch.full((n,), 7.0, device=self.device) for n in sizes for _ in range(4)]
        del kept

    def drop(self, *, with_model: bool = False) -> None:
        """Let go of the optimizer without closing it, until its thread has ended."""
        self.optimizer = self.inner = None
        if with_model:
            self.model, self.params = None, []
        end = time.monotonic() + 10
        gc.collect()
        if self.settings["mode"] == "delayed" and not with_model:
            return  # the model keeps what has its newest values, until it is read
        while any("accel_scaler" in t.name for t in threading.enumerate()):
            assert time.monotonic() < end, "something keeps the optimizer"
            time.sleep(0.02)
            gc.collect()

    def finish(self) -> list[Tensor]:
        """``seen``, state and parameters, on the CPU, once the device has done all."""
        if self.optimizer is not None:
            self.optimizer.synchronize()
            entries = self.optimizer.state_dict()["state"].values()
            self.seen += [v for e in entries for v in e.values() if isinstance(v, Tensor)]
            self.optimizer.close()
        if self.device != "cpu":
            torch.accelerator.synchronize(self.device)
        return [local(t.detach()).cpu().clone() for t in (*self.seen, *self.params)]


Program = Callable[[Training], None]


@contextmanager
def one_queue() -> Iterator[None]:
    """Optimizers that are made here take the device for one without side streams."""
    with mock.patch.object(streams_module, "streams_of", return_value=None):
        yield


def run(program: Program, in_order: bool, **settings: Any) -> list[Tensor]:
    with one_queue() if in_order else nullcontext():
        training = Training(in_order, **settings)
        program(training)
        return training.finish()


def assert_in_order(program: Program, **settings: Any) -> None:
    """The program gives with side streams what it gives on one queue."""
    mine, expected = (run(program, in_order, **settings) for in_order in (False, True))
    assert_same(mine, expected)
    assert all(bool(t.isfinite().all()) for t in expected)
