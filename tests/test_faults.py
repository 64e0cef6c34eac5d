"""Each fault of the stock stack beside the right number.

``stock()`` is Accelerate's own fp16 machinery with torch's scaler, switched on on a CPU. F8 to F10
are torch's and stand in test_scaler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import LR, Linear, stock
from torch import nn
from torch.optim import SGD

from accel_scaler import OverflowStreakError, ScalerConfig, attach

OVERFLOW = float("inf")


def ours(**kwargs: Any) -> Any:
    return attach(Accelerator(cpu=True, mixed_precision="fp16", **kwargs), ScalerConfig())


def pair(accelerator: Any) -> tuple[list[Linear], list[Any]]:
    """Two models with an optimizer each, all prepared."""
    models = [Linear(), Linear()]
    optimizers = [accelerator.prepare(SGD(model.parameters(), lr=LR)) for model in models]
    return [accelerator.prepare(model) for model in models], optimizers


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("build", "skipped", "lr"), [(stock, False, LR / 2), (ours, True, LR)], ids=["stock", "ours"]
)
def test_f1_a_skip_inside_the_kernel(build: Any, skipped: bool, lr: float, kind: Any) -> None:
    """Stock calls a skipped fused step done, and the LR schedule advances."""
    accelerator = build()
    model = Linear()
    optimizer = kind(model.parameters(), lr=LR, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(OVERFLOW))
    optimizer.step()
    schedule.step()
    assert model.moved == 0
    assert accelerator.scaler.get_scale() == 2.0**15
    assert optimizer.step_was_skipped is skipped
    assert optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize(
    ("build", "second"), [(stock, 2.0**-16), (ours, 1.0)], ids=["stock", "ours"]
)
def test_f2_two_optimizers_and_a_clip(build: Any, second: float) -> None:
    """Stock unscales the second optimizer's gradients twice."""
    accelerator = build()
    models, optimizers = pair(accelerator)
    accelerator.backward(models[0](1.0) + models[1](1.0))
    norm = accelerator.clip_grad_norm_([m.w for m in models], 1e6)
    for optimizer in optimizers:
        optimizer.step()
    assert norm == pytest.approx(8**0.5)
    assert models[0].moved == 1.0
    # 1/65536 of 1/8 is lost next to a weight of 1, so look at the gradient.
    assert models[1].w.grad is not None
    assert models[1].w.grad.tolist() == [second] * 4


@pytest.mark.parametrize(("build", "second"), [(stock, 2.0), (ours, 1.0)], ids=["stock", "ours"])
def test_f3_overflow_in_the_first_only(build: Any, second: float) -> None:
    """Stock unscales the second optimizer by the scale that the first one's overflow halved."""
    accelerator = build()
    models, optimizers = pair(accelerator)
    accelerator.backward(models[0](OVERFLOW) + models[1](1.0))
    for optimizer in optimizers:
        optimizer.step()
    assert [m.moved for m in models] == [0.0, second]
    assert [o.step_was_skipped for o in optimizers] == [True, False]
    assert accelerator.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(
    ("build", "scale", "tracker"), [(stock, 2.0**14, 2), (ours, 2.0**15, 1)], ids=["stock", "ours"]
)
def test_f4_two_updates_a_window(build: Any, scale: float, tracker: int) -> None:
    """Stock counts a window, and backs off, once for each optimizer."""
    accelerator = build()
    models, optimizers = pair(accelerator)
    for gradient in (OVERFLOW, 1.0):
        accelerator.backward(models[0](gradient) + models[1](gradient))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.scaler.get_scale() == scale
    assert accelerator.scaler._get_growth_tracker() == tracker


def accumulate_two(accelerator: Any, clip_on: Callable[[bool], bool]) -> Linear:
    """A window of two micro-batches, each with a gradient of 1; clip where ``clip_on`` says."""
    model = Linear()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(1.0))
            if clip_on(accelerator.sync_gradients):
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_f5_clip_on_every_micro_batch() -> None:
    """Stock raises on the second one; ours clips once, at the end."""
    with pytest.raises(RuntimeError, match="already been called"):
        accumulate_two(stock(gradient_accumulation_steps=2), lambda last: True)


def test_f5_clip_on_every_micro_batch_ours() -> None:
    assert accumulate_two(ours(gradient_accumulation_steps=2), lambda last: True).moved == 1.0


@pytest.mark.parametrize(
    ("build", "moved"), [(stock, 0.5 + 2.0**15), (ours, 1.0)], ids=["stock", "ours"]
)
def test_f5_clip_before_the_last_micro_batch(build: Any, moved: float) -> None:
    """Stock adds scaled gradients to unscaled ones, and steps on the sum."""
    accelerator = build(gradient_accumulation_steps=2)
    assert accumulate_two(accelerator, lambda last: not last).moved == moved


def output_dtype(accelerator: Any) -> tuple[Any, list[torch.dtype]]:
    """Train a step; the optimizer, and the dtypes that a layer inside the model put out."""
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    accelerator.backward(model(torch.ones(2, 4)).mean() / 8)
    optimizer.step()
    return optimizer, seen


def test_f6_fp16_on_a_cpu() -> None:
    """Stock trains in float32 without a word; ours autocasts to float16 and scales."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert (accelerator.mixed_precision, accelerator.scaler) == ("fp16", None)
    optimizer, seen = output_dtype(accelerator)
    assert seen == [torch.float32]
    assert optimizer.scaler is None
    attach(accelerator, ScalerConfig())
    optimizer, seen = output_dtype(accelerator)
    assert seen == [torch.float16]
    assert optimizer.scaler is accelerator.scaler
    assert accelerator.scaler.get_scale() == 2.0**16


def test_f6_fp16_on_a_cpu_in_a_trainer(tmp_path: Any) -> None:
    """``fp16=True, use_cpu=True`` is the same, one layer up."""
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), fp16=True, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(nn.Linear(4, 1), args)
    assert trainer.accelerator.mixed_precision == "fp16"
    assert (trainer.accelerator.scaler, trainer.accelerator.native_amp) == (None, False)
    attach(trainer, ScalerConfig())
    assert trainer.accelerator.native_amp is True
    assert trainer.accelerator.scaler.get_scale() == 2.0**16


def overflow(accelerator: Any, times: int) -> Linear:
    model = Linear()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=LR))
    for _ in range(times):
        accelerator.backward(model(OVERFLOW))
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_f11_a_run_of_skips_in_stock_ends_at_a_scale_of_zero() -> None:
    accelerator = stock()
    overflow(accelerator, 170)
    assert accelerator.scaler.get_scale() == 0.0


def test_f11_a_run_of_skips_ends_with_the_name_of_the_tensor() -> None:
    """Ours keeps a minimum scale, and raises after as many skips as it was told."""
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"),
        ScalerConfig(min_scale=128.0, max_consecutive_skips=20),
    )
    overflow(accelerator, 20)
    assert accelerator.scaler.get_scale() == 128.0
    with pytest.raises(OverflowStreakError, match=r"21 windows in a row.*Non-finite.*: w\."):
        overflow(accelerator, 1)
