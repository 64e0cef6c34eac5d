"""``offloaded(cls)`` beside ``cls`` on the same device: bits, memory, and a model that moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import DEVICE, peak_bytes
from offloaded_loops import (
    PLAYS,
    STEPS,
    Loop,
    assert_checkpoints_interchange,
    assert_play_as_stock,
    scheduled,
)
from offloaded_trainer import assert_trainers_are_equal
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop

from accel_scaler import AsyncOptimizer, attach, offloaded
from accel_scaler.optimizer_step.ring import Ring

EVERY: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 0.05}),
    (AdamW, {"lr": 0.05, "fused": True, "amsgrad": True}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": True}),
    (RMSprop, {"lr": 0.01, "centered": True}),
    (Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    (NAdam, {"lr": 0.05}),
]


@pytest.mark.parametrize("play", PLAYS)
def test_a_loop_gives_the_numbers_of_the_class(play: Callable[[Loop], None]) -> None:
    assert_play_as_stock(play, AdamW, DEVICE, lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize(("cls", "kwargs"), EVERY)
def test_each_class_gives_its_numbers(cls: Any, kwargs: dict[str, Any]) -> None:
    assert_play_as_stock(scheduled, cls, DEVICE, **kwargs)


@pytest.mark.parametrize(("cls", "kwargs"), EVERY)
def test_checkpoints_interchange_with_the_class(cls: Any, kwargs: dict[str, Any]) -> None:
    assert_checkpoints_interchange(DEVICE, cls, **kwargs)


def test_a_trainer_without_attach(tmp_path: Path) -> None:
    assert_trainers_are_equal(tmp_path, use_cpu=False)


def test_bfloat16_parameters_are_stepped_through_masters() -> None:
    """The reference is the optimizer with float32 masters on the device."""
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = nn.Linear(32, 32)
        net = net.to(DEVICE, torch.bfloat16)
        optimizer: Any
        if offload:
            optimizer = offloaded(AdamW)(net.parameters(), lr=1e-3)
        else:
            inner = AdamW(net.parameters(), lr=1e-3)
            optimizer = AsyncOptimizer(inner, net, step_mode="sync", master_weights="fp32")
        x = torch.linspace(-1.0, 1.0, 32 * 8).view(8, 32).to(DEVICE, torch.bfloat16)
        for _ in range(STEPS):
            net(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        entries = optimizer.state_dict()["state"].values()
        found.append([*net.parameters(), *[entry["master"] for entry in entries]])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("memory_counter")
def test_state_takes_no_memory_of_the_device() -> None:
    """Two moments of 32 MiB each; of them four slots of 8 MiB are there, within the step alone."""
    peaks, kept = [], []
    for cls in (AdamW, offloaded(AdamW)):
        with peak_bytes() as taken:
            p = nn.Parameter(torch.zeros(8 << 20, device=DEVICE))
            optimizer = cls([p], lr=0.1, fused=True)
            for _ in range(3):
                p.grad = torch.ones_like(p)
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(taken())
            kept.append(torch.accelerator.memory_allocated(DEVICE))
        del p, optimizer
    assert peaks[0] - peaks[1] > 31 << 20
    assert kept[0] - kept[1] > 60 << 20


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("watched", [False, True])
def test_state_comes_up_in_the_backward_where_the_model_is_given(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [0], Ring.load

    def counted(self: Ring, *args: Any) -> None:
        loads[0] += 1
        load(self, *args)

    monkeypatch.setattr(Ring, "load", counted)
    torch.empty(1 << 20, device=DEVICE)  # a peak that leaves room for slots
    loop = Loop(AdamW, DEVICE, offload=True, watched=watched, lr=0.05)
    for step in range(4):
        loop.step(step)
    assert loads == [3], "one stretch, which the first step makes"
    loop.loss(4).backward()  # type: ignore[no-untyped-call]
    assert loads == [4 if watched else 3]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_model_may_move_to_the_device_after_the_optimizer_was_made(
    steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``accelerator.prepare`` moves it; a simulated device needs torch's other way to move."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    stock, mine = (Loop(AdamW, "cpu", offload=offload, lr=0.05) for offload in (False, True))
    for step in range(steps_before):
        stock.step(step)
        mine.step(step)
    for loop in (stock, mine):
        loop.net.to(DEVICE)
        loop.device = torch.device(DEVICE)
    stock.load(stock.saved())  # torch leaves the state where it was
    for step in range(steps_before, STEPS):
        stock.step(step)
        mine.step(step)
    for a, b in zip(mine.net.parameters(), stock.net.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
    assert mine.own[0].device.type == torch.device(DEVICE).type
    moments = [entry["exp_avg"].device.type for entry in mine.optimizer.state.values()]
    assert moments == ["cpu"] * len(mine.own)


def test_an_accelerator_that_is_attached_steps_it() -> None:
    from accelerate import Accelerator

    found = []
    for cls in (AdamW, offloaded(AdamW)):
        loop = Loop(AdamW, DEVICE, offload=False, lr=0.05)
        accelerator = attach(Accelerator())
        net, optimizer = accelerator.prepare(loop.net, cls(loop.net.parameters(), lr=0.05))
        for step in range(STEPS):
            accelerator.backward(loop.loss(step) * (float("nan") if step == 4 else 1.0))
            accelerator.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped == (step == 4)
        found.append([p.detach().cpu() for p in loop.net.parameters()])
    assert all(map(torch.equal, *found))
