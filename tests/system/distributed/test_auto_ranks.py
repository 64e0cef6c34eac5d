"""``step_mode="auto"`` on two gloo ranks: what rank 0 measures decides, the numbers stay."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from async_support import Clock
from children import everywhere, on_two_ranks
from support import reset
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Net, prepared_shards, whole
from versions import before_torch

from accel_scaler import AsyncOptimizer, attach, detach
from accel_scaler.async_optimizer import async_stepper
from accel_scaler.optimizer_step import stepper_of

WINDOWS = 45
OLD = "torch 2.6: fully_shard wants the streams of a device"


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def train(mode: Any, sharded: bool, clock: Clock | None = None) -> list[Tensor]:
    reset()
    accelerator: Any = attach(Accelerator(mixed_precision="no"), step_mode=mode)
    torch.manual_seed(1)
    plain = Net()
    if sharded:
        model: Any = prepared_shards(accelerator, plain, *plain.blocks, plain.head)
    else:
        model = accelerator.prepare_model(plain)
    params = [p for p in plain.parameters() if p.requires_grad]
    optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD(params, lr=0.05, momentum=0.9))
    if clock is not None:
        clock.stepper = stepper_of(optimizer)
    for window in range(WINDOWS):
        loss = model(batch(window)).float().square().mean()
        if (window, dist.get_rank()) == (9, 1):
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        assert optimizer.step_was_skipped == (window == 9)
        optimizer.zero_grad()
    detach(accelerator)
    return [whole(p).detach().clone() for p in plain.parameters()]


@pytest.mark.parametrize(
    "sharded",
    [False, pytest.param(True, marks=before_torch(2, 7, OLD))],
    ids=["DDP", "FSDP2"],
)
@pytest.mark.parametrize("beside", [0.8, 1.25])
def test_both_ranks_choose_what_rank_0_has_measured(
    beside: float, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        expected = train("sync", sharded)
        clock = Clock(beside if dist.get_rank() == 0 else 1.0 / beside)
        monkeypatch.setattr(async_stepper, "clock", clock)
        found = train("auto", sharded, clock)
        assert all(map(torch.equal, found, expected))
        one, other = everywhere(clock.modes)
        assert one == other
        assert (len(one), set(one)) == (WINDOWS, {False, True})
        assert set(one[-8:]) == {beside < 1.0}

    on_two_ranks(body, tmp_path)


def test_a_rank_that_is_out_of_inputs_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only answers DDP's own collectives, so from ``Join`` on every window runs in sync."""

    def train_unevenly(mode: Any, clock: Clock | None = None) -> list[Tensor]:
        reset()
        accelerator: Any = attach(Accelerator(mixed_precision="no"), step_mode=mode)
        torch.manual_seed(1)
        plain = Net()
        params = [p for p in plain.parameters() if p.requires_grad]
        inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        model, optimizer = accelerator.prepare(plain, inner)
        if clock is not None:
            clock.stepper = stepper_of(optimizer)
        for joined in (False, True, True):
            with Join([model]) if joined else nullcontext():
                for window in range(WINDOWS + 9 * dist.get_rank() * joined):
                    accelerator.backward(model(batch(window)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    if clock is not None and joined:
                        assert not clock.stepper.is_beside
        detach(accelerator)
        return [p.detach().clone() for p in params]

    def body() -> None:
        expected, clock = train_unevenly("sync"), Clock(0.8)
        monkeypatch.setattr(async_stepper, "clock", clock)
        found = train_unevenly("auto", clock)
        assert all(map(torch.equal, found, expected))
        assert len(clock.modes) == WINDOWS
        assert clock.modes[-1]

    on_two_ranks(body, tmp_path)


def test_the_ranks_of_a_group_choose_without_the_others(tmp_path: Path) -> None:
    """Actor and critic on ranks of their own, which step as often as they like."""

    def train_alone(mode: str, group: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(8, 1), process_group=group)
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with AsyncOptimizer(inner, model, step_mode=mode) as optimizer:
            for window in range(WINDOWS - 40 * dist.get_rank()):
                model(batch(window)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def body() -> None:
        groups = [dist.new_group([rank]) for rank in range(2)]
        mine = groups[dist.get_rank()]
        assert all(map(torch.equal, train_alone("auto", mine), train_alone("sync", mine)))

    on_two_ranks(body, tmp_path)
