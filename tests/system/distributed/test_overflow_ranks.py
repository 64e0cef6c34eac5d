"""An overflow on two gloo ranks: all watch, run the window again or heal alike, or none does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from children import everywhere, on_two_ranks
from support import Loud
from torch import Tensor, nn
from two_ranks import prepared_shards
from versions import before_torch

from accel_scaler import ScalerConfig, attach, detach


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before, self.sick = nn.Linear(8, 16), Loud(16, 16)
        self.after = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.sick(self.before(x)))
        return (out.float() - 1).square().mean() / 8


def batch(number: int, quiet: bool) -> Tensor:
    """A quiet one is beyond float16 nowhere."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 8, generator=generator) * (1e-5 if quiet else 1.0)


def attached(**settings: Any) -> Any:
    return attach(Accelerator(mixed_precision="fp16"), ScalerConfig(init_scale=256.0, **settings))


def finish(accelerator: Any) -> None:
    accelerator.scaler.abandon_window()
    detach(accelerator)


def prepared(accelerator: Any) -> tuple[Any, Any, Net]:
    """The first layer is frozen, so what is quiet stays quiet."""
    plain = Net()
    plain.before.requires_grad_(False).bias.zero_()
    trained = [p for p in plain.parameters() if p.requires_grad]
    return *accelerator.prepare(plain, torch.optim.SGD(trained, lr=0.01)), plain


@pytest.mark.parametrize(("loud", "mode"), [((0,), "sync"), ((1,), "overlap"), ((0, 1), "sync")])
def test_ddp(loud: tuple[int, ...], mode: str, tmp_path: Path) -> None:
    def body() -> None:
        accelerator = attached(heal=True, step_mode=mode)
        model, optimizer, plain = prepared(accelerator)
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        for number in range(4):
            accelerator.backward(model(batch(number, dist.get_rank() not in loud)))
            optimizer.step()
            optimizer.zero_grad()
        records = accelerator.scaler_history.records
        assert [r.skipped for r in records] == [True, False, False, False]
        assert [r.healed for r in records] == [("sick",), (), (), ()]
        first: Any = records[0].first
        assert first["module"] == "sick"
        assert first["text"].endswith(f"(rank {loud[0]})")
        optimizer.synchronize()
        one, other = everywhere([p.detach() for p in plain.parameters()])
        assert all(map(torch.equal, one, other))
        finish(accelerator)

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("loud", [(0,), (1,)])
def test_ddp_watches_the_next_window(loud: tuple[int, ...], tmp_path: Path) -> None:
    """Both ranks name the module of the one that overflows."""

    def body() -> None:
        accelerator = attached(max_consecutive_skips=9)
        model, optimizer, _ = prepared(accelerator)
        for number in range(4):
            accelerator.backward(model(batch(number, dist.get_rank() not in loud)))
            optimizer.step()
            optimizer.zero_grad()
        records = accelerator.scaler_history.records
        assert [r.first and r.first["module"] for r in records] == [None, "sick", None, None]
        first: Any = records[1].first
        assert first["text"].endswith(f"(rank {loud[0]})")
        finish(accelerator)

    on_two_ranks(body, tmp_path)


def test_ranks_that_step_alone_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Under ``no_sync``, as LocalSGD trains: one rank overflows, the other knows nothing of it."""

    def body() -> None:
        accelerator = attached(find_overflow="replay")
        model, optimizer, _ = prepared(accelerator)
        with model.no_sync():
            for number in range(3):
                accelerator.backward(model(batch(number, quiet=dist.get_rank() == 0)))
                optimizer.step()
                optimizer.zero_grad()
        records = accelerator.scaler_history.records
        assert {r.skipped for r in records} == {dist.get_rank() == 1}
        found = [r.first["module"] for r in records if r.first]
        assert found == (["sick"] if dist.get_rank() == 1 else [])
        finish(accelerator)

    on_two_ranks(body, tmp_path)


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp2(accumulation: int, tmp_path: Path) -> None:
    """Its parameters are sharded on a CPU mesh: with ``heal``, and beside the run with the line in
    its settings that leaves out the window that was lost."""

    def train(heals: bool, skips_first: bool = False) -> tuple[list[Tensor], Any, Any]:
        more: dict[str, Any] = {"heal": True} if heals else {"fp32_modules": ["sick"]}
        accelerator = attached(sharded=True, **more)
        plain = Net()
        model: Any = prepared_shards(accelerator, plain, plain.before, plain.sick, plain.after)
        optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD(plain.parameters(), lr=0.1))
        for number in range(4 * accumulation):
            is_last = number % accumulation == accumulation - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            accelerator.backward(model(batch(number, quiet=False)))
            if not is_last:
                continue
            if skips_first and number < accumulation:
                accelerator.scaler.abandon_window()
            else:
                optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        seen: Any = [p.to_local().detach().clone() for p in plain.parameters()]
        records = list(accelerator.scaler_history.records)
        finish(accelerator)
        return seen, records, plain

    def body() -> None:
        healed, records, plain = train(heals=True)
        assert [r.skipped for r in records] == [True, False, False, False]
        assert [r.healed for r in records] == [("sick",), (), (), ()]
        assert not any("forward" in vars(m) for m in plain.modules() if m is not plain)
        named, _, _ = train(heals=False, skips_first=True)
        assert all(map(torch.equal, healed, named))

    logging.disable(logging.WARNING)
    try:
        on_two_ranks(body, tmp_path)
    finally:
        logging.disable(logging.NOTSET)


def test_ranks_decide_alike_what_to_heal(tmp_path: Path) -> None:
    """Rank 0 has a large model of its own, beside which the module that is healed is small."""

    def body() -> None:
        accelerator = attached(heal=True)
        plain = Net()
        plain.before.requires_grad_(False)
        plain.sick.requires_grad_(False)
        plain.after = nn.Linear(16, 1)  # the sick one is most of the model
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        if dist.get_rank() == 0:
            accelerator.prepare_model(nn.Linear(64, 64), evaluation_mode=True)
        for number in range(3):
            accelerator.backward(model(batch(number, quiet=False)))
            optimizer.step()
            optimizer.zero_grad()
        assert not any(r.healed for r in accelerator.scaler_history.records)
        finish(accelerator)

    on_two_ranks(body, tmp_path, limit_s=30)
