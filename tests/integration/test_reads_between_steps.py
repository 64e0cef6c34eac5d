"""Parameters that are read or written between a step and the next training forward, however that is
done: the newest in every mode. ``delayed`` then goes on from what was read.

The worker updates nothing that nobody waits for (``lazy``).
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from async_support import assert_same, lazy
from attached import cpu
from support import mlp, reset
from torch import Tensor, nn

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
DTYPES = {"float16": torch.float16, "float32": torch.float32}
STEPS = 6
SCALE = 1024.0


def pickled(p: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def into_another(p: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.zeros_like(p, requires_grad=False).copy_(p)


@torch.no_grad()
def there_and_back(p: Tensor) -> Tensor:
    return p.to(torch.float64).to(p.dtype)


def mixed_in(p: Tensor) -> Tensor:
    """As TRL's SyncRefModelCallback does, with all of the new."""
    reference = torch.ones_like(p.data)
    return reference.mul_(0.0).add_(p.data, alpha=1.0)


READS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    ".data": lambda model: [p.data.clone() for _, p in model.named_parameters()],
    "detach": lambda model: [p.detach().clone() for p in model.parameters()],
    "state_dict": lambda model: [v.clone() for v in model.state_dict().values()],
    "copy_": lambda model: list(map(into_another, model.parameters())),
    "mixed in": lambda model: list(map(mixed_in, model.parameters())),
    "to": lambda model: list(map(there_and_back, model.parameters())),
    "deepcopy": lambda model: [p.detach() for p in copy.deepcopy(model).parameters()],
    "torch.save": lambda model: [pickled(p).detach() for p in model.parameters()],
    "one alone": lambda model: [list(model.parameters())[-1].data.clone()],
    "evaluation": lambda model: [evaluated(model)],
}


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(torch.linspace(-1.0, 1.0, 8, dtype=dtype)[None]).clone()


class Run:
    """Steps of an attached accelerator; what reads between them comes from outside."""

    def __init__(self, mode: str, dtype: torch.dtype, **settings: Any) -> None:
        reset()
        config = ScalerConfig(
            **MODES[mode], **settings, init_scale=SCALE, growth_interval=100, optimizer_threads=1
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
        """What the optimizer has, in the model's dtype: its masters, where it has some."""
        state = self.optimizer.state_dict()["state"]
        params = list(self.model.parameters())
        return [
            state[i]["master"].to(self.dtype, copy=True)
            if "master" in state[i]
            else p.detach().clone()
            for i, p in enumerate(params)
        ]


@pytest.fixture
def begin() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, **kwargs))
        return made[-1]

    with lazy():
        yield make
        for run in made:
            detach(run.accelerator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", READS)
def test_a_read_sees_the_newest(
    begin: Callable[..., Run], read: str, mode: str, dtype: str
) -> None:
    """And, but for ``delayed``, changes nothing of what comes after."""
    run, seen = begin(mode, DTYPES[dtype]), []
    for step in range(STEPS):
        run.step(step)
        if step % 2:
            seen.append(READS[read](run.model))
            if read != "evaluation":
                assert_same(seen[-1], run.newest()[-len(seen[-1]) :])
    assert len(seen) == STEPS // 2
    assert not torch.equal(seen[0][-1], seen[-1][-1])
    losses, final = run.losses, run.newest()
    detach(run.accelerator)
    if not mode.startswith("delayed"):
        alone = begin(mode, DTYPES[dtype])
        for step in range(STEPS):
            alone.step(step)
        assert losses == alone.losses
        assert_same(final, alone.newest())
        detach(alone.accelerator)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_backward_needs_is_not_overwritten(begin: Callable[..., Run], mode: str) -> None:
    """A penalty on a weight before the forward: that one sees the newest as well."""
    run = begin(mode, torch.float32)
    for step in range(STEPS):
        penalty = run.model[0].weight.square().sum()
        (loss := run.forward(step) + penalty).backward()
        run.losses.append(repr(float(loss.detach())))
        run.optimizer.zero_grad()
        run.step(step)
    sync = begin("sync", torch.float32)
    for step in range(STEPS):
        penalty = sync.model[0].weight.square().sum()
        (loss := sync.forward(step) + penalty).backward()
        sync.losses.append(repr(float(loss.detach())))
        sync.optimizer.zero_grad()
        sync.step(step)
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
