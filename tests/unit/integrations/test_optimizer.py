"""Prepared optimizers: one boundary for all, masters, gradients from before ``attach``."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from async_support import lazy, values
from attached import cpu, prepared, train
from boundary_support import one
from support import LR, Linear, mlp, reset, stock, weights
from torch import nn
from torch.optim import SGD

from accel_scaler import OrderError, ScalerConfig, StepError, UnsupportedError, attach, detach
from accel_scaler.integrations.optimizer import ScaledOptimizer
from accel_scaler.optimizer_step.replica import Replica

INF = float("inf")


def test_a_schedule_made_over_a_prepared_optimizer_goes_along() -> None:
    """It replaces ``step`` on the instance, in front of the class that attach changes."""
    accelerator = stock()
    model, optimizer = prepared(accelerator)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    attach(accelerator, ScalerConfig())
    train(accelerator, model, optimizer, 2)
    assert accelerator.scaler_history.boundaries == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        schedule.step()
    detach(accelerator)
    before = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer, 1)), before)


@pytest.mark.parametrize("first_is_detached", ["first", "last"])
def test_an_optimizer_that_another_accelerator_took_over_is_given_back_by_that_one(
    first_is_detached: str,
) -> None:
    first, second = (attach(cpu(), ScalerConfig()) for _ in range(2))
    _, optimizer = prepared(first)
    second.prepare(optimizer)
    if first_is_detached == "first":
        detach(first)
        assert type(optimizer) is ScaledOptimizer
        assert optimizer.scaler is second.scaler
    detach(second)
    assert type(optimizer) is AcceleratedOptimizer
    assert type(detach(first)) is Accelerator


def test_end_training_waits_for_the_last_step_and_raises_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody may read the model after it."""
    accelerator = attach(cpu(), step_mode="overlap", init_scale=16.0)
    model, optimizer = one(accelerator)
    with lazy():
        for moved in (1.0, 2.0):
            accelerator.backward(model(1.0))
            optimizer.step()
            assert values(model)[0].tolist() == [1.0 - LR * (moved - 1.0)] * 4
            accelerator.end_training()
            assert values(model)[0].tolist() == [1.0 - LR * moved] * 4
            optimizer.zero_grad()

    def fail(self: Any, *args: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Replica, "step_part", fail)
    accelerator.backward(model(1.0))
    optimizer.step()
    with pytest.raises(StepError, match="planted"):
        accelerator.end_training()
    detach(accelerator)


def test_gradients_from_before_load_state_are_not_stepped(tmp_path: Path) -> None:
    accelerator = attach(cpu(), init_scale=16.0)
    model, optimizer = one(accelerator)
    accelerator.save_state(str(tmp_path))
    accelerator.backward(model(1.0))
    accelerator.load_state(str(tmp_path))
    with pytest.raises(OrderError, match="load"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(1.0))
    optimizer.step()
    assert model.moved == 1.0


def test_after_detach_no_step_counts_as_skipped() -> None:
    """Without a scaler nothing ever says again that one was not; a scheduler asks."""
    accelerator = attach(Accelerator(cpu=True), ScalerConfig())
    p = nn.Parameter(torch.ones(2))
    optimizer: Any = accelerator.prepare(SGD([p], lr=0.5))
    accelerator.backward((p * INF).sum())
    optimizer.step()
    assert optimizer.step_was_skipped is True
    detach(accelerator)
    assert optimizer.step_was_skipped is False
    optimizer.zero_grad()
    accelerator.backward(p.sum())
    optimizer.step()
    assert (p.tolist(), optimizer.step_was_skipped) == ([0.5, 0.5], False)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_float16_parameters_train_through_masters(mode: Any) -> None:
    """Attached before or after prepare; each step is too small for float16, their sum is not."""
    ends = []
    for late in (False, True):
        accelerator, model = cpu(), mlp().half()
        start = weights(model)
        if not late:
            attach(accelerator, ScalerConfig(step_mode=mode))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.004))
        attach(accelerator, ScalerConfig(step_mode=mode))
        train(accelerator, model, optimizer, 30)
        assert optimizer.step_was_skipped is False
        detach(accelerator)
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert type(optimizer) is AcceleratedOptimizer
        assert not any("accel_scaler" in name for name in vars(optimizer.optimizer))
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], start)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_refused_prepare_can_be_repeated(mode: Any) -> None:
    """Registered twice, the schedule would ask the wrapper that does not step about skips."""
    accelerator, model = attach(cpu(), ScalerConfig(step_mode=mode, init_scale=8.0)), mlp()
    inner = SGD(model.parameters(), lr=0.1)
    memory = torch.ones(4, 4, dtype=torch.float16)
    refused = [nn.Parameter(memory[:, :2]), nn.Parameter(memory[:, 1:3])]
    with pytest.raises(UnsupportedError):
        accelerator.prepare(model, inner, SGD(refused, lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    for factor in (INF, 1.0):
        accelerator.backward(model(torch.ones(2, 8)).mean() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert inner.param_groups[0]["lr"] == 0.05
    detach(accelerator)


def _last_micro_batch(accelerator: Any, model: Any) -> None:
    accelerator.backward(model(torch.ones(4, 8)).float().square().mean())


@pytest.mark.parametrize(
    ("come", "call", "mode"),
    [
        ("attach on a CPU", "step", "sync"),
        ("attach on a CPU", "clip", "overlap"),
        ("attach as on a GPU", "unscale", "sync"),
        ("prepare", "step", "overlap"),
    ],
)
def test_gradients_from_before_attach_are_not_added_to(come: str, call: str, mode: Any) -> None:
    """Not scaled, or by another scaler: what they were scaled by cannot be known.

    It moved 1,000 times too little, or too far.
    """
    config = ScalerConfig(init_scale=1024.0, step_mode=mode)
    accelerator = stock() if come == "attach as on a GPU" else cpu()
    model: Any = mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if come == "prepare":
        attach(accelerator, config)
        model = accelerator.prepare(model)
        model(torch.ones(4, 8)).float().square().mean().backward()  # a look at the gradients, say
        optimizer = accelerator.prepare(inner)
    else:
        model, optimizer = accelerator.prepare(model, inner)
        _last_micro_batch(accelerator, model)  # of two, half of the window
        attach(accelerator, config)
        optimizer = accelerator._optimizers[0]
    before = weights(model)
    _last_micro_batch(accelerator, model)
    with pytest.raises(OrderError, match="had gradients before it was given to this scaler"):
        {
            "step": optimizer.step,
            "clip": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
            "unscale": accelerator.unscale_gradients,
        }[call]()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    train(accelerator, model, optimizer)
    optimizer.synchronize()
    assert not torch.equal(weights(model), before)


def test_what_is_attached_is_neither_pickled_nor_copied() -> None:
    accelerator = attach(cpu(), ScalerConfig())
    _, optimizer = prepared(accelerator)
    for call, thing in (
        (pickle.dumps, accelerator),
        (pickle.dumps, optimizer),
        (copy.deepcopy, optimizer),
    ):
        with pytest.raises(UnsupportedError, match=r"detach\(accelerator\)"):
            call(thing)
    detach(accelerator)
    copy.deepcopy(optimizer)


def accumulated(precision: str, order: str, windows: int) -> tuple[Any, list[int]]:
    """An attached accelerator after windows of four micro-batches, whose calls come in this order;
    how far the weights went in each, in micro-batches."""
    kwargs: Any = {"cpu": True, "mixed_precision": precision, "gradient_accumulation_steps": 4}
    a, plain = attach(Accelerator(**kwargs)), Linear()
    model, optimizer = a.prepare(plain, SGD(plain.parameters(), lr=LR))
    spare = a.prepare(SGD([nn.Parameter(torch.ones(1))], lr=LR))
    before, moved = 0.0, []
    for number in range(4 * windows):
        with a.accumulate(model):
            for call in order.split():
                if call == "backward":
                    a.backward(model(1.0))
                elif call == "zero":
                    optimizer.zero_grad()
                elif call == "spare":
                    spare.zero_grad()
                elif call == "odd" and number // 4 % 2 and a.sync_gradients:
                    optimizer.zero_grad()
                    break
                elif call == "none" and a.sync_gradients:
                    optimizer.zero_grad(set_to_none=False)
                elif call == "step":
                    optimizer.step()
        if number % 4 == 3:
            moved.append(round(4 * (plain.moved - before)))
            before = plain.moved
    return a, moved


def count(caplog: pytest.LogCaptureFixture) -> int:
    texts = [text for text in caplog.messages if text.endswith("(Logged once.)")]
    return sum("zero_grad() after optimizer.step()" in text for text in texts)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("order", ["zero backward step", "none backward step"])
def test_a_zero_grad_that_drops_micro_batches_is_named(
    precision: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in its second window. One micro-batch of four trains, as in stock."""
    a, moved = accumulated(precision, order, windows=1)
    assert (moved, count(caplog)) == ([1], 0)
    reset()
    a, moved = accumulated(precision, order, windows=5)
    assert (moved, count(caplog)) == ([1] * 5, 1)
    assert "drops the gradients of 3 backwards" in a.scaler_history.summary()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("backward step zero", [4] * 5),
        ("spare backward step zero spare", [4] * 5),
        ("odd backward step zero", [4, 0, 4, 0, 4]),  # a batch is dropped on purpose
        ("backward odd step zero", [4, 0, 4, 0, 4]),
        ("backward zero step", [0] * 5),  # no step either: nothing trains on a part
        ("backward none step", [0] * 5),
    ],
)
def test_what_is_dropped_on_purpose_is_not_named(
    order: str, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    _, moved = accumulated("fp16", order, windows=5)
    assert (moved, count(caplog)) == (expected, 0)


def test_without_accumulation_no_zero_grad_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """First in the loop; and between two backwards, as SAM and GANs have it."""
    a = attach(cpu(), init_scale=1024.0)
    model, optimizer = prepared(a)
    for _ in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            a.backward(model(torch.ones(2, 8)).mean())
        optimizer.step()
    assert count(caplog) == 0
