"""``on_overflow="retry"`` on two gloo ranks: all make a window again, or none does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from async_support import assert_same
from children import everywhere, on_two_ranks
from support import reset
from torch import Tensor, nn
from two_ranks import prepared_shards
from versions import before_torch

from accel_scaler import ScalerConfig, attach, detach

EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])


class Net(nn.Module):
    """Loud on one rank only; its statistics are the first rank's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.after = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 32), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.after(self.norm(self.before(x).float())).float()
        return out if y is None else (out - y).square().mean() * 64


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(4, 8, generator=generator)
    return x, torch.full((4, 1), 3.0) * dist.get_rank()


def train(
    scale: float,
    is_sharded: bool = False,
    by_script: bool = False,
    bad: int = -1,
    drifts: bool = False,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """Two micro-batches a window, of which the last reduces. ``bad``: the first rank's batch with
    inf in it. ``drifts``: on the other rank a forward gives another output the second time."""
    reset()
    accelerator: Any = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    attach(accelerator, ScalerConfig(init_scale=scale, **settings))
    plain = Net()
    if is_sharded:
        model: Any = prepared_shards(accelerator, plain, plain.before, plain.after)
    else:
        model = accelerator.prepare_model(plain)
    optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD(plain.parameters(), lr=1e-3))
    losses, calls = [], list[int]()

    def drift(_: nn.Module, args: Any) -> Any:
        calls.append(len(calls))
        return (args[0] * len(calls),)

    if drifts and dist.get_rank() == 1:
        plain.after.register_forward_pre_hook(drift)
    for number in range(8):
        calls.clear()
        is_last = number % 2 == 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        for module in plain.modules() if is_sharded else ():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(is_last, recurse=False)
        if not is_sharded:
            model.require_backward_grad_sync = is_last
        x, y = batch(number)
        if number == bad and dist.get_rank() == 0:
            x = x / 0
        loss = (model(x) - y).square().mean() * 64 if by_script else model(x, y)
        accelerator.backward(loss)
        losses.append(loss.item())
        if is_last:
            accelerator.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    end = {
        "parameters": [getattr(p, "_local_tensor", p).detach().clone() for p in plain.parameters()],
        "buffers": [b.clone() for b in plain.buffers()],
        "losses": losses,
    }
    records = list(accelerator.scaler_history.records)
    accelerator.scaler.abandon_window()
    detach(accelerator)
    return end, records


@pytest.mark.parametrize("by_script", [False, True])
@EACH_MODE
def test_ddp(mode: str, by_script: bool, tmp_path: Path) -> None:
    def body() -> None:
        given: dict[str, Any] = {"by_script": by_script, "step_mode": mode}
        high, records = train(2.0**16, on_overflow="retry", **given)
        assert records[-1].scale < 2.0**16
        low, plain = train(records[-1].scale, **given)
        assert not any(r.skipped for r in (*records, *plain))
        assert_same(high, low)
        one, other = everywhere(high["parameters"])
        assert_same(one, other)

    on_two_ranks(body, tmp_path)


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("by_script", [False, True])
def test_fsdp2(by_script: bool, tmp_path: Path) -> None:
    def body() -> None:
        given: Any = {"is_sharded": True, "by_script": by_script, "sharded": True}
        high, records = train(2.0**16, on_overflow="retry", **given)
        assert records[-1].scale < 2.0**16
        low, plain = train(records[-1].scale, **given)
        assert not any(r.skipped for r in (*records, *plain))
        assert_same(high, low)

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=before_torch(2, 7, ""))])
def test_data_that_are_not_finite_on_one_rank_are_one_skip(
    is_sharded: bool, tmp_path: Path
) -> None:
    def body() -> None:
        given: Any = {"is_sharded": is_sharded, "sharded": is_sharded, "bad": 5}
        _, records = train(64.0, on_overflow="retry", **given)
        assert [r.skipped for r in records] == [False, False, True, False]
        assert [r.scale for r in records] == [64.0, 64.0, 64.0, 32.0]

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=before_torch(2, 7, ""))])
def test_a_forward_that_differs_on_one_rank_is_an_ordinary_skip_on_both(
    is_sharded: bool, tmp_path: Path
) -> None:
    def body() -> None:
        given: Any = {"is_sharded": is_sharded, "sharded": is_sharded, "drifts": True}
        ours, records = train(2.0**16, on_overflow="retry", **given)
        theirs, plain = train(2.0**16, **given)
        assert [r.skipped for r in records] == [r.skipped for r in plain]
        assert [r.next_scale for r in records] == [r.next_scale for r in plain]
        assert [r.skipped for r in plain] == [True, True, True, True]
        assert_same(ours, theirs)

    on_two_ranks(body, tmp_path)


def test_one_rank_that_has_other_settings_is_not_waited_for(tmp_path: Path) -> None:
    def body() -> None:
        how = "skip" if dist.get_rank() == 0 else "retry"
        _, records = train(2.0**16, on_overflow=how, growth_interval=2)
        assert records[0].skipped
        (one, two) = everywhere([r.scale for r in records])
        assert one == two

    on_two_ranks(body, tmp_path)
