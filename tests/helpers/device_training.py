"""A training loop on the device under test; the same loop on a CPU is its reference.

A simulated device has the CPU's numbers, and reports accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerators import DEVICE, assert_same, current_stream, fused_adamw, on, sleep
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.scaling import local

STEPS, OVERFLOW = 8, 5
CYCLES = 5_000_000
"""Some 3 ms."""


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
        scaled: with a scaler, whose loss overflows in step ``OVERFLOW``.
        model: makes the model, the same on each call.
        shard: shards it.
        settings: of ``AsyncOptimizer``.
    """

    def __init__(
        self,
        *,
        device: str = DEVICE,
        dtype: torch.dtype = torch.float32,
        make: Callable[[Any], Any] = fused_adamw,
        scaled: bool = True,
        model: Callable[[], nn.Module] = Branched,
        shard: Callable[[Any], object] | None = None,
        **settings: Any,
    ) -> None:
        self.device, self.make = device, make
        self.settings = {"step_mode": "sync"} | settings
        self.seen: list[Tensor] = []
        torch.manual_seed(0)
        with torch.device("cpu"):  # under a default device its own generator draws other numbers
            made = model()
        self.model: Any = made.to(device, dtype)
        if shard is not None:
            shard(self.model)
        self.params = list(self.model.parameters())
        self.scaler: Any = None
        if scaled:
            kind = torch.device(device).type
            self.scaler = GradScaler(kind, init_scale=1024.0, growth_interval=3)
        self.wrap()

    def wrap(self) -> None:
        """A new optimizer of the same parameters."""
        self.inner = self.make(self.params)
        self.optimizer: Any = AsyncOptimizer(
            self.inner, self.model, scaler=self.scaler, **self.settings
        )

    def forward(self, step: int) -> Tensor:
        x = torch.randn(16, 8, device="cpu", generator=torch.Generator().manual_seed(step))
        out: Tensor = self.model(x.to(self.device, self.params[0].dtype))
        return out

    def backward(self, step: int) -> None:
        loss = self.forward(step).float().square().mean()
        self.seen.append(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss * float("inf") if step == OVERFLOW else loss)
        loss.backward()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.busy()
            self.optimizer.clip_grad_norm_(0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def streams(self, count: int) -> list[Any]:
        """Streams of the user's; a CPU has none."""
        return [None if self.device == "cpu" else torch.Stream(self.device) for _ in range(count)]

    def beside(self, stream: Any, work: Callable[[], object]) -> None:
        """Do this on ``stream``, after all that the present one has by now, and before the rest."""
        if stream is None:
            work()
            return
        home = current_stream()
        stream.wait_stream(home)
        with on(stream):
            work()
        home.wait_stream(stream)

    def busy(self) -> None:
        """Work that the present stream gets from here on comes late."""
        if self.device != "cpu":
            sleep(CYCLES)

    def litter(self) -> None:
        """Take memory of small sizes and of the parameters', write to it, give it back."""
        sizes = (1, 8, 64, 512, 4096)
        kept = [torch.full((n,), 7.0, device=self.device) for n in sizes for _ in range(4)]
        del kept

    def finish(self) -> list[Tensor]:
        """``seen``, state and parameters, on the CPU, once the device has done all."""
        self.optimizer.synchronize()
        saved = self.optimizer.state_dict()["state"]
        names = sorted({name for entry in saved.values() for name in entry} - {"master"})
        self.seen += [e[n] for e in saved.values() for n in names if isinstance(e[n], Tensor)]
        self.optimizer.close()
        if self.device != "cpu":
            torch.accelerator.synchronize(self.device)
        return [local(t.detach()).cpu().clone() for t in (*self.seen, *self.params)]


Program = Callable[[Training], None]


def run(program: Program, **settings: Any) -> list[Tensor]:
    training = Training(**settings)
    program(training)
    return training.finish()


def assert_as_on_a_cpu(program: Program, *, offload: str = "none", **settings: Any) -> None:
    """The program gives the same numbers on the device and on a CPU."""
    mine = run(program, offload=offload, **settings)
    expected = run(program, device="cpu", **settings)
    assert_same(mine, expected)
    assert all(bool(t.isfinite().all()) for t in expected)
