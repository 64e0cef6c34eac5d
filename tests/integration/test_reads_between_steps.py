"""Parameters that a backward or another thread reads between a step and the next training forward.

The worker updates nothing that nobody waits for (``lazy``). What else reads: the random histories,
and each way to read in tests/unit/async_optimizer/test_pending_parameter.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from async_support import assert_same, lazy
from attached import cpu
from support import mlp, reset
from torch import Tensor

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync offload": {"offload": "cpu"},
    "overlap": {"step_mode": "overlap"},
    "overlap offload": {"step_mode": "overlap", "offload": "cpu"},
    "delayed": {"step_mode": "delayed"},
    "delayed offload": {"step_mode": "delayed", "offload": "cpu"},
    "delayed, no preview": {"step_mode": "delayed", "delay_compensation": "none"},
}
STEPS = 6


class Run:
    """Steps of an attached accelerator; what reads between them comes from outside."""

    def __init__(self, mode: str, dtype: torch.dtype) -> None:
        reset()
        config = ScalerConfig(
            **MODES[mode], init_scale=1024.0, growth_interval=100, optimizer_threads=1
        )
        self.accelerator = attach(cpu(), config)
        model = mlp().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.dtype, self.losses = dtype, list[str]()

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 8, generator=generator).to(self.dtype)
        return self.model(x).float().square().mean() + self.model(x).float().mean()

    def step(self, step: int) -> None:
        loss = self.forward(step)
        self.losses.append(repr(float(loss.detach())))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def newest(self) -> list[Tensor]:
        """The optimizer's masters, in the model's dtype."""
        state = self.optimizer.state_dict()["state"].values()
        return [entry["master"].to(self.dtype, copy=True) for entry in state]


@pytest.fixture
def begin() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any) -> Run:
        made.append(Run(*args))
        return made[-1]

    with lazy():
        yield make
        for run in made:
            detach(run.accelerator)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_backward_needs_is_not_overwritten(begin: Callable[..., Run], mode: str) -> None:
    """A penalty on a weight before the forward: that one sees the newest as well."""
    run, sync = begin(mode, torch.float32), begin("sync", torch.float32)
    for each in (run, sync):
        for step in range(STEPS):
            penalty = each.model[0].weight.square().sum()
            (loss := each.forward(step) + penalty).backward()
            each.losses.append(repr(float(loss.detach())))
            each.optimizer.zero_grad()
            each.step(step)
    if not mode.startswith("delayed"):
        assert run.losses == sync.losses
    # The first of each pair: the newest parameters, in a run whose update is never late.
    assert run.losses[:3] == sync.losses[:3]


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_another_thread_reads_what_a_forward_would(begin: Callable[..., Run], mode: str) -> None:
    """It waits for it, and nothing is published beneath it."""
    run = begin(mode, torch.float16)
    for step in range(STEPS):
        run.step(step)
    seen: dict[str, list[Tensor]] = {}

    def read(who: str) -> None:
        seen[who] = [p.data.clone() for p in run.model.parameters()]

    reader = threading.Thread(target=read, args=("another",))
    reader.start()
    reader.join()
    run.model.register_forward_pre_hook(lambda *_: read("the forward"))
    run.forward(STEPS)
    assert_same(seen["another"], seen["the forward"])
    is_same = [torch.equal(a, b) for a, b in zip(seen["another"], run.newest(), strict=True)]
    assert all(is_same) is (mode == "overlap")
