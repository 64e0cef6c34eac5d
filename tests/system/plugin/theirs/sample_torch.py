"""Tests of gradient scaling as torch's users write them; this file knows nothing of accel_scaler.

Not collected by itself. Stock torch 2.13 passes all but those in ``MENDED``, faults of it.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import GradScaler as OfItsModule

MENDED = ("test_a_fused_step_minds_the_layout_of_a_gradient",)
MAKERS: dict[str, Any] = {
    "torch.amp": partial(torch.amp.GradScaler, "cpu"),
    "torch": partial(torch.GradScaler, device="cpu"),
    "its module": partial(OfItsModule, device="cpu"),
    "torch.cpu.amp": torch.cpu.amp.GradScaler,
    "subclass": lambda **settings: Counted(**settings),
}


class Counted(GradScaler):
    """A user's own, with other arguments."""

    def __init__(self, init_scale: float = 2.0, **settings: Any) -> None:
        self.steps = 0
        super().__init__("cpu", init_scale=init_scale, **settings)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)


def train(scaler: Any, bad: int | None = None) -> list[Tensor]:
    """Four steps of SGD on fixed data; without a scaler, in plain float32."""
    generator = torch.Generator().manual_seed(5)
    net = nn.Linear(6, 2)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = net(torch.randn(3, 6, generator=generator)).square().mean()
        if step == bad:
            if scaler is None:
                continue
            loss = loss * float("inf")
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [p.detach() for p in net.parameters()]


def make(how: str, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return MAKERS[how](**settings)


@pytest.mark.parametrize("bad", [None, 1])
@pytest.mark.parametrize("how", MAKERS)
def test_scaling_changes_no_number(how: str, bad: int | None) -> None:
    scaler = make(how, init_scale=1024.0)
    assert isinstance(scaler, GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    for got, expected in zip(train(scaler, bad), train(None, bad), strict=True):
        assert torch.equal(got, expected)
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)


@pytest.mark.parametrize("how", MAKERS)
@pytest.mark.parametrize("through", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_goes_on(how: str, through: Any) -> None:
    scaler = make(how, init_scale=64.0, growth_interval=1)
    train(scaler)
    again = through(scaler)
    assert type(again) is type(scaler)
    assert again.state_dict() == scaler.state_dict()
    for got, expected in zip(train(again), train(None), strict=True):
        assert torch.equal(got, expected)
    assert again.get_scale() == 64.0 * 2**8


def test_the_subclass_is_still_itself() -> None:
    scaler = Counted()
    train(scaler)
    assert scaler.steps == 4
    assert isinstance(scaler, Counted)
    assert type(scaler).__name__ == "Counted"


def test_the_old_names_warn_and_take_no_device() -> None:
    with pytest.warns(FutureWarning, match=r"torch\.cpu\.amp\.GradScaler\(args\.\.\.\)"):
        scaler = torch.cpu.amp.GradScaler(16.0)
    assert isinstance(scaler, torch.cpu.amp.GradScaler)
    assert scaler.get_scale() == 16.0
    with pytest.warns(FutureWarning, match=r"torch\.cuda\.amp\.GradScaler\(args\.\.\.\)"):
        scaler = torch.cuda.amp.GradScaler(16.0, enabled=False)
    assert isinstance(scaler, torch.cuda.amp.GradScaler)
    assert not scaler.is_enabled()


def test_a_fused_step_minds_the_layout_of_a_gradient() -> None:
    """torch's fused CPU kernels ignore the strides of a gradient (F10 in docs/what-to-expect.md)."""
    after = []
    for fused in (False, True):
        p = nn.Parameter(torch.zeros(3, 4))
        optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
        scaler = GradScaler("cpu", init_scale=4.0)
        weight = torch.arange(12.0).reshape(4, 3).t()
        scaler.scale((p * weight).sum()).backward()
        p.grad = (weight * 4.0).t().contiguous().t()
        scaler.step(optimizer)
        scaler.update()
        after.append(p.detach().clone())
    assert torch.equal(*after)
