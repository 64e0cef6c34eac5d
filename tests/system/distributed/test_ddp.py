"""DDP on two gloo ranks: torch's numbers, bit for bit, in both modes, raw and through Accelerate.

The references are torch's own scaler, clipping and optimizer, on the same two ranks. The optimizer
thread updates a part when somebody waits for it, so a wait that is missing shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from async_support import lazy
from children import everywhere, on_two_ranks
from support import reset, stock
from support import weights as weights_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from trainer_support import CONFIG, as_stock, logs, make, train
from two_ranks import (
    ACCUMULATION,
    CLIP,
    OVERLAP,
    SCALER,
    WINDOWS,
    Loop,
    Result,
    Watch,
    batch,
    check,
    compare,
    net,
    optimizer_of,
    reference,
    schedule_of,
    weights,
)

from accel_scaler import AsyncOptimizer, ScalerConfig, UnsupportedError, attach, detach

BUCKETS: dict[str, dict[str, Any]] = {
    # Gradients are views of buckets that the next backward overwrites.
    "views": {"gradient_as_bucket_view": True},
    "copies": {"gradient_as_bucket_view": False},
}


@pytest.mark.parametrize(
    ("kind", "buckets"),
    [("sgd", "views"), ("sgd", "copies"), ("adamw", "views"), ("fused", "views")],
)
def test_both_modes_equal_torch_on_the_same_ranks(kind: str, buckets: str, tmp_path: Path) -> None:
    """An overflow on one rank is one skip on both; no collective leaves the training thread."""
    wrap = partial(DistributedDataParallel, **BUCKETS[buckets])
    on_two_ranks(lambda: compare({"overlap": OVERLAP}, wrap, kind), tmp_path)


PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": None}


def attached(kind: str, mode: Any, late: bool, precision: str) -> Result:
    """The same through Accelerate, under DDP.

    ``late``: attached after ``prepare``, when a schedule has wrapped the optimizer's ``step``.
    """
    reset()
    plain = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATION,
        # Else the schedule is stepped once for each rank.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[
            GradScalerKwargs(**SCALER),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    config = ScalerConfig(step_mode=mode)
    accelerator: Any = plain if late else attach(plain, config)
    loop = Loop(accelerator.prepare)
    inner = optimizer_of(kind, loop.params)
    optimizer, schedule = accelerator.prepare(inner, schedule_of(inner))
    if late:
        attach(accelerator, config)
    scaler = accelerator.scaler or torch.amp.GradScaler(enabled=False)
    for window in range(WINDOWS):
        for index in range(ACCUMULATION):
            with accelerator.accumulate(loop.model):
                accelerator.backward(loop.loss(window, index) * ACCUMULATION)
                if accelerator.sync_gradients:
                    loop.norms.append(float(accelerator.clip_grad_norm_(loop.params, CLIP)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        loop.note(optimizer.step_was_skipped, scaler, schedule)
    optimizer.synchronize()
    result = loop.result(optimizer, scaler)
    detach(accelerator)
    return result


@pytest.mark.parametrize(("mode", "late"), [("sync", False), ("overlap", False), ("sync", True)])
def test_both_modes_through_accelerate_equal_torch_on_the_same_ranks(
    mode: str, late: bool, tmp_path: Path
) -> None:
    def body() -> None:
        wrap, watch = partial(DistributedDataParallel, **BUCKETS["views"]), Watch()
        for precision, half in PRECISIONS.items():
            given: Any = {"half": half, "scaled": precision == "fp16", "guards": True}
            expected = reference(wrap, "sgd", **given)
            watch.take()
            with lazy():
                mine = attached("sgd", mode, late, precision)
            names, elsewhere = watch.take()
            assert "allreduce_" in names
            assert elsewhere == 0
            check(mine, expected, precision)

    on_two_ranks(body, tmp_path)


def test_a_trainer_equals_the_stock_trainer(tmp_path: Path) -> None:
    """One rank overflows, both skip; numbers are stock's."""

    def body() -> None:
        # The first micro-batch of step 1, on rank 1 only.
        overflows = (4,) if dist.get_rank() == 1 else ()
        results = []
        for name in ("stock", "attached"):
            trainer, recorder = make(tmp_path / name, overflows, max_steps=4, ddp_backend="gloo")
            train(as_stock(trainer) if name == "stock" else attach(trainer, CONFIG))
            assert isinstance(trainer.model_wrapped, DistributedDataParallel)
            assert recorder.skipped == [False, True, False, False]
            results.append((recorder.scales, logs(trainer), weights_of(trainer.model)))
        assert results[0][:2] == results[1][:2]
        assert torch.equal(results[0][2], results[1][2])
        assert torch.equal(*everywhere(results[1][2]))

    on_two_ranks(body, tmp_path)


def local_sgd(mode: Any) -> list[Any]:
    """``by_feature/local_sgd.py``; ``mode`` None: stock."""
    every, windows = 3, 7
    handlers = [GradScalerKwargs(**SCALER)]
    if mode is None:
        accelerator = stock(kwargs_handlers=handlers)
    else:
        plain = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
        accelerator = attach(plain, ScalerConfig(step_mode=mode))
    layers = net()
    inner = optimizer_of("sgd", layers.parameters())
    model, optimizer = accelerator.prepare(layers, inner)
    seen: list[Any] = []
    with LocalSGD(accelerator, model=model, local_sgd_steps=every, enabled=True) as local:
        for window in range(windows):
            x, y = batch(window, 0)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            if (window + 1) % every == 0:
                seen.append(weights(layers.parameters()))
                assert torch.equal(*everywhere(seen[-1]))
    if mode is not None:
        detach(accelerator)
    return [*seen, weights(layers.parameters())]


def test_local_sgd_averages_the_newest_parameters(tmp_path: Path) -> None:
    def body() -> None:
        newest = local_sgd(None)
        with lazy():
            for mode in ("sync", "overlap"):
                assert all(map(torch.equal, local_sgd(mode), newest)), mode

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_is_refused_before_anything_is_changed(original: bool, tmp_path: Path) -> None:
    def refuse(act: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedError, match=r"FSDP1.*FSDP2"):
            act()

    def body() -> None:
        cpu, plain = torch.device("cpu"), net().requires_grad_()
        model = FullyShardedDataParallel(plain, use_orig_params=original, device_id=cpu)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        before = dict(vars(inner))
        for mode in ("sync", "overlap"):
            refuse(partial(AsyncOptimizer, inner, model, step_mode=mode))
        accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
        attach(accelerator, ScalerConfig(step_mode="overlap"))
        refuse(lambda: accelerator.prepare_optimizer(inner))
        detach(accelerator)
        inner.__dict__.pop("step", None)  # Accelerate leaves it there
        assert vars(inner) == before

    on_two_ranks(body, tmp_path)
