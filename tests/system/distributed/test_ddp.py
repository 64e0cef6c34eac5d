"""DDP on two gloo ranks: torch's numbers, bit for bit, in every mode, raw and through Accelerate.

The references are torch's own scaler, clipping and optimizer, on the same two ranks, with the
one-step delay of ``delayed`` written out by hand. The optimizer thread updates a part when somebody
waits for it, so a wait that is missing shows.
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
    DELAYED,
    EVERY,
    OFFLOAD,
    OVERLAP,
    PREVIEW,
    SCALER,
    SHOWN,
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
from accel_scaler.optimizer_step.stepper import async_stepper_of

BUCKETS: dict[str, dict[str, Any]] = {
    # Gradients are views of buckets that the next backward overwrites.
    "views": {"gradient_as_bucket_view": True},
    # One parameter a bucket: its gradient is all of the bucket's memory.
    "views, one each": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
    "copies": {"gradient_as_bucket_view": False},
}
RUNS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("sgd", "views"): EVERY | SHOWN,
    ("sgd", "views, one each"): {
        **{"delayed": DELAYED, "delayed offload": DELAYED | OFFLOAD},
        **{"preview": PREVIEW, "preview offload": PREVIEW | OFFLOAD},
    },
    ("sgd", "copies"): {"overlap": OVERLAP, "preview": PREVIEW},
    ("adamw", "views"): {"overlap offload": OVERLAP | OFFLOAD, **SHOWN},
    ("fused", "views"): {"overlap": OVERLAP},
}


@pytest.mark.parametrize(("kind", "buckets"), RUNS)
def test_every_mode_equals_torch_on_the_same_ranks(kind: str, buckets: str, tmp_path: Path) -> None:
    """An overflow on one rank is one skip on both; no collective leaves the training thread."""
    wrap = partial(DistributedDataParallel, **BUCKETS[buckets])
    on_two_ranks(lambda: compare(RUNS[kind, buckets], wrap, kind), tmp_path)


PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": None}


def attached(
    kind: str,
    mode: Any,
    offload: Any = "none",
    warmup: int = 0,
    late: bool = False,
    delay_compensation: Any = "none",
    precision: str = "fp16",
) -> Result:
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
    config = ScalerConfig(
        step_mode=mode,
        offload=offload,
        delay_warmup_steps=warmup,
        delay_compensation=delay_compensation,
        optimizer_threads=1,
    )
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


@pytest.mark.parametrize("name", [*EVERY, *SHOWN, "sync", "attached late"])
def test_every_mode_through_accelerate_equals_torch_on_the_same_ranks(
    name: str, tmp_path: Path
) -> None:
    settings = (EVERY | SHOWN).get(name, {"mode": "sync", "late": name == "attached late"})
    stale = settings.get("warmup", 0) if settings["mode"] == "delayed" else None
    late: Any = {"stale_after": stale}
    if stale is not None:
        late["delay_compensation"] = settings["delay_compensation"]

    def body() -> None:
        wrap, watch = partial(DistributedDataParallel, **BUCKETS["views"]), Watch()
        for precision, half in PRECISIONS.items():
            given: Any = {"half": half, "scaled": precision == "fp16", "guards": True}
            expected = reference(wrap, "sgd", **given, **late)
            watch.take()
            with lazy():
                mine = attached("sgd", precision=precision, **settings)
            names, elsewhere = watch.take()
            assert "allreduce_" in names
            assert elsewhere == 0
            check(mine, expected, f"{name}, {precision}")

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
        config = ScalerConfig(step_mode=mode, delay_compensation="none", optimizer_threads=1)
        accelerator = attach(plain, config)
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
                if mode == "delayed":
                    stepper: Any = async_stepper_of(inner)
                    assert stepper.wait()
                    stepped = everywhere(weights(p.stepped for p in stepper.replica.pairs))
                local.step()
            if (window + 1) % every == 0:
                seen.append(weights(layers.parameters()))
                assert torch.equal(*everywhere(seen[-1]))
                if mode == "delayed":
                    torch.testing.assert_close(seen[-1], (stepped[0] + stepped[1]) / 2)
    if mode is not None:
        detach(accelerator)
    return [*seen, weights(layers.parameters())]


def test_local_sgd_averages_the_newest_parameters(tmp_path: Path) -> None:
    """Between two averages ``delayed`` has its delay; an average is of what was stepped."""

    def body() -> None:
        newest = local_sgd(None)
        with lazy():
            for mode in ("sync", "overlap"):
                assert all(map(torch.equal, local_sgd(mode), newest)), mode
            assert not torch.equal(local_sgd("delayed")[0], newest[0])

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
        for settings in ({"mode": "sync"}, OVERLAP, {"mode": "sync"} | OFFLOAD, DELAYED):
            refuse(partial(AsyncOptimizer, inner, model, **settings))
        accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
        attach(accelerator, ScalerConfig(step_mode="overlap"))
        refuse(lambda: accelerator.prepare_optimizer(inner))
        detach(accelerator)
        inner.__dict__.pop("step", None)  # Accelerate leaves it there
        assert vars(inner) == before

    on_two_ranks(body, tmp_path)
