"""An average of the weights, as docs/averages.md writes it, beside a loop without the bad batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from places import ROOT
from references import GROWTH_INTERVAL, INIT_SCALE, OPTIMIZERS, Reference, loss_of, network
from support import reset, same, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import IterableDataset
from trainer_support import examples, gpt2, make, train
from transformers import TrainerCallback

from accel_scaler import AsyncOptimizer, GradScaler, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

MADE, AFTER, BY_HAND, LATER, ALONE, CALLBACK = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/averages.md").read_text("utf-8"), re.DOTALL
)
DECAY, BAD, WINDOWS = 0.9, 3, 9
FP16 = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def names_for(**more: Any) -> dict[str, Any]:
    """What the page's lines may name."""
    known = {"AveragedModel": AveragedModel, "get_ema_multi_avg_fn": get_ema_multi_avg_fn}
    return {**known, "decay": DECAY, "torch": torch, "TrainerCallback": TrainerCallback, **more}


def outcome(net: Any, average: Any) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in each.parameters()] for each in (net, average)]


def attached(
    precision: str, lines: str, kind: str, accumulation: int = 1, late: bool = False, **mode: Any
) -> list[list[Tensor]]:
    """Weights and average of a run in which one micro-batch of a window is bad.

    ``late``: the model is averaged as ``prepare`` returns it.
    """
    reset()
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation),
        {**(FP16 if precision == "fp16" else {}), **mode},
    )
    net = network()
    optimizer: Any = OPTIMIZERS[kind](net.parameters())
    names = names_for(accelerator=accelerator, model=net)
    if not late:
        make_average(names, lines)
    names["model"], optimizer = accelerator.prepare(net, optimizer)
    if late:
        make_average(names, lines)
    skipped = []
    for step in range(WINDOWS * accumulation):
        with accelerator.accumulate(names["model"]):
            bad = step == BAD * accumulation
            names |= {"optimizer": optimizer, "loss": loss_of(names["model"], step, bad)}
            exec(lines, names)
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
    if lines == LATER:
        names["average"].update_parameters(names["model"])
    found = outcome(net, names["average"])
    detach(accelerator)
    assert [window for window, each in enumerate(skipped) if each] == [BAD]
    return found


def make_average(names: dict[str, Any], lines: str) -> None:
    if lines == BY_HAND:
        names["average"] = copy.deepcopy(names["model"])
    else:
        exec(MADE, names)


def plain(precision: str, lines: str, kind: str, accumulation: int = 1) -> list[list[Tensor]]:
    """The same in torch alone, without that window."""
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    names = names_for(model=model)
    make_average(names, lines)
    average = names["average"]
    scale = INIT_SCALE if precision == "fp16" else 1.0  # small gradients would be lost without
    if lines == LATER:
        average.update_parameters(model)
    for window in range(WINDOWS):
        if window == BAD:
            continue
        for micro in range(accumulation):
            with torch.autocast("cpu", DTYPES.get(precision), enabled=precision in DTYPES):
                loss = loss_of(model, window * accumulation + micro)
            (loss / accumulation * scale).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(average, AveragedModel):
            average.update_parameters(model)
        else:
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 1 - DECAY)
    return outcome(model, average)


@pytest.mark.parametrize(
    ("mode", "precision", "accumulation", "kind"),
    [
        ("sync", "no", 1, "fused adamw"),
        ("overlap", "bf16", 2, "sgd"),
        ("sync", "fp16", 2, "sgd"),
        ("overlap", "fp16", 1, "fused adamw"),
    ],
)
def test_an_average_right_after_the_step(
    mode: str, precision: str, accumulation: int, kind: str
) -> None:
    for lines in (AFTER, BY_HAND):
        expected = plain(precision, lines, kind, accumulation)
        for late in (False, True):
            ours = attached(precision, lines, kind, accumulation, late, step_mode=mode)
            assert same(ours, expected)


@pytest.mark.parametrize(
    ("precision", "accumulation", "kind"),
    [("no", 2, "sgd"), ("bf16", 1, "fused adamw"), ("fp16", 2, "sgd")],
)
def test_an_average_before_the_next_step_has_the_same_numbers(
    precision: str, accumulation: int, kind: str
) -> None:
    expected = plain(precision, LATER, kind, accumulation)
    retry = {"on_overflow": "retry", "init_scale": 2.0**26} if precision == "fp16" else {}
    for mode in (retry, {}, {"step_mode": "overlap"}):
        assert same(attached(precision, LATER, kind, accumulation, **mode), expected)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_of_narrow_weights_the_average_is_float32(mode: str, dtype: torch.dtype) -> None:
    """That of the weights as they are rounded; in their own dtype most of it stays."""
    slow, expected = copy.deepcopy(network(dtype)).float(), copy.deepcopy(network(dtype)).float()
    own = copy.deepcopy(network(dtype))
    model, plain_model = network(dtype), network(dtype)
    reference = Reference(plain_model.parameters(), OPTIMIZERS["sgd"])
    accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), {**FP16, "step_mode": mode})
    inner = OPTIMIZERS["sgd"](model.parameters())
    names = names_for(accelerator=accelerator, average=slow, decay=0.999)
    names["model"], names["optimizer"] = accelerator.prepare(model, inner)
    for step in range(WINDOWS):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(plain_model, step, step == BAD)
        (loss * reference.scale).backward()
        if reference.boundary():
            with torch.no_grad():
                for average, fast in [(expected, plain_model), (own, plain_model)]:
                    for a, b in zip(average.parameters(), fast.parameters(), strict=True):
                        a.lerp_(b.to(a.dtype), 1 - 0.999)
        exec(BY_HAND, names | {"loss": loss_of(names["model"], step, step == BAD)})
    detach(accelerator)
    assert same(outcome(model, slow), outcome(plain_model, expected))
    start = weights(network(dtype))
    lost = weights(own) == start
    assert lost.float().mean() > 0.5
    assert (weights(expected) != start.float())[lost].float().mean() > 0.9


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_beside_an_async_optimizer(mode: str) -> None:
    model = network()
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)
    names = names_for(scaler=scaler, model=model)
    make_average(names, ALONE)
    inner = OPTIMIZERS["sgd"](model.parameters())
    with AsyncOptimizer(inner, model, scaler=scaler, step_mode=mode) as optimizer:
        for step in range(WINDOWS):
            exec(ALONE, names | {"optimizer": optimizer, "loss": loss_of(model, step, step == BAD)})
    assert same(outcome(model, names["average"]), plain("no", ALONE, "sgd"))


class InOrder(IterableDataset[dict[str, Tensor]]):
    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


def test_in_a_trainer(tmp_path: Path) -> None:
    """Beside the run whose bad batch is not in its data."""

    def run(overflows: Collection[int], rows: list[Any]) -> Any:
        reset()
        model = gpt2(overflows)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # a batch that is left out would shift its random numbers
        steps = {"max_steps": len(rows) // 2, "gradient_accumulation_steps": 1}
        rate = {"lr_scheduler_type": "constant", "warmup_steps": 0}
        trainer, recorder = make(tmp_path, model=model, fp16=False, **steps, **rate)
        trainer.train_dataset = InOrder(rows)
        attach(trainer, step_mode="overlap")
        names = names_for(model=trainer.model, trainer=trainer)
        exec(MADE + CALLBACK, names)
        trainer.add_callback(names["Average"])
        train(trainer)
        assert recorder.skipped.count(True) == len(overflows)
        return outcome(trainer.model, names["average"])

    rows = examples(8)
    assert same(run((1,), rows), run((), rows[:2] + rows[4:]))
