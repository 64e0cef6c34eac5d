"""bf16 and fp32 on two gloo ranks: stock's numbers, and one rank's bad batch is skipped by both."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from children import on_two_ranks
from support import reset, same
from torch import Tensor
from two_ranks import Net, prepared_shards
from versions import before_torch

from accel_scaler import attach, detach

WINDOWS, BAD = 5, 2


def train(
    precision: str,
    clip: tuple[float, float] | None,
    settings: dict[str, Any] | None,
    factor: float = 1.0,
    dropped: Collection[int] = (),
) -> tuple[list[Tensor], list[bool]]:
    """``settings``: None is stock. ``factor``: on rank 1's loss in the window ``BAD``."""
    reset()
    accelerator: Any = Accelerator(mixed_precision=precision)
    if settings is not None:
        attach(accelerator, **settings)
    torch.manual_seed(1)
    plain, skipped = Net(), []
    model: Any = prepared_shards(accelerator, plain, *plain.blocks, plain.head)
    params = [p for p in plain.parameters() if p.requires_grad]
    optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD(params, lr=0.05, momentum=0.9))
    for window in range(WINDOWS):
        if window in dropped:
            continue
        generator = torch.Generator().manual_seed(10 * window + dist.get_rank())
        loss = model(torch.randn(4, 8, generator=generator)).float().square().mean()
        if window == BAD and dist.get_rank() == 1:
            loss = loss * factor
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(plain.parameters(), *clip)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    detach(accelerator)
    local: Any = [p.to_local().detach().clone() for p in plain.parameters()]
    return local, skipped


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ranks_with_other_gradients_agree_on_a_spike(precision: str, tmp_path: Path) -> None:
    """Split by hand: the norm is of all ranks together, taken before a clip of any kind."""

    def body() -> None:
        for how in ("none", "whole", "parts", "values"):
            reset()
            accelerator: Any = Accelerator(mixed_precision=precision)
            scale = {"init_scale": 8.0} if precision == "fp16" else {}
            attach(accelerator, sharded=True, skip_norm_above=50.0, **scale)
            torch.manual_seed(dist.get_rank())
            net, skipped = torch.nn.Linear(4, 3), []
            optimizer: Any = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=1e-3))
            for factor in (1.0, 100.0 if dist.get_rank() == 1 else 1.0, 1.0):
                accelerator.backward(net(torch.ones(2, 4)).sum() * factor)
                if how == "values":
                    accelerator.clip_grad_value_(net.parameters(), 1.0)
                elif how != "none":
                    size = 1 if how == "parts" else 2
                    for at in range(0, 2, size):
                        accelerator.clip_grad_norm_(list(net.parameters())[at : at + size], 1.0)
                optimizer.step()
                skipped.append(optimizer.step_was_skipped)
                optimizer.zero_grad()
            detach(accelerator)
            assert skipped == [False, True, False], how

    on_two_ranks(body, tmp_path)


def test_the_norm_of_a_spike_is_that_of_the_parts_of_all_ranks(tmp_path: Path) -> None:
    """Of parts with norms of 3 and 4 it is 5."""

    def body() -> None:
        for limit, is_skipped in ((4.9, True), (5.1, False)):
            reset()
            accelerator: Any = attach(
                Accelerator(mixed_precision="no"), sharded=True, skip_norm_above=limit
            )
            part = torch.nn.Parameter(torch.ones(4))
            optimizer: Any = accelerator.prepare(torch.optim.SGD([part], lr=0.5))
            accelerator.backward((part * (3.0 + dist.get_rank())).sum() / 2)
            optimizer.step()
            assert optimizer.step_was_skipped is is_skipped
            detach(accelerator)

    on_two_ranks(body, tmp_path)


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_one_ranks_bad_batch_is_skipped_by_both(precision: str, tmp_path: Path) -> None:
    """In FSDP2; in DDP: test_ddp.py."""

    def body() -> None:
        for clip in (None, (0.1, 1.0)):
            stock = train(precision, clip, None)
            assert same(stock, train(precision, clip, {})), clip
            without = train(precision, clip, {}, dropped=(BAD,))
            for factor, more in ((float("nan"), {}), (1e6, {"skip_norm_above": 1e4})):
                bad = train(precision, clip, more, factor)
                assert same(bad[0], without[0]), (clip, factor)
                assert bad[1] == [window == BAD for window in range(WINDOWS)]

    on_two_ranks(body, tmp_path)
