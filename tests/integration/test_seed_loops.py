"""Training loops as tutorials write them, each beside a reference that must agree bit for bit.

The reference is the same loop under torch's scaler, or, where torch has no such method, the loop in
float32 without a scaler: scales are powers of two and the batches finite, so both are exact. Any
order of calls on the scaler: the random histories.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import mlp, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from accel_scaler import GradScaler

Batch = tuple[Tensor, Tensor]
Loop = Callable[[Any, nn.Module, torch.optim.Optimizer, list[Batch]], Any]


def batches(count: int, overflowing: tuple[int, ...] = ()) -> list[Batch]:
    """Regression data; an overflowing batch has a target that makes the loss infinite."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for index in range(count):
        x = torch.randn(4, 8, generator=generator)
        y = x.sum(1, keepdim=True)
        data.append((x, y * float("inf") if index in overflowing else y))
    return data


def run(scaler: Any, loop: Loop, data: list[Batch]) -> tuple[Tensor, Any]:
    """Train a fresh network; its weights, and what the loop returned."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seen = loop(scaler, net, optimizer, data)
    return weights(net), seen


def agree(loop: Loop, data: list[Batch], **settings: Any) -> Any:
    """Run under both scalers; all weights, scales and what the loop saw must be the same."""
    settings = {"init_scale": 1024.0, "growth_interval": 3, **settings}
    stock, ours = torch.amp.GradScaler("cpu", **settings), GradScaler("cpu", **settings)
    expected, theirs = run(stock, loop, data)
    got, mine = run(ours, loop, data)
    assert torch.equal(got, expected)
    assert mine == theirs
    assert not torch.equal(got, weights(mlp())), "the loop trained"
    assert torch.isfinite(got).all()
    state = ours.state_dict()
    assert {key: state[key] for key in stock.state_dict()} == stock.state_dict()
    return mine


def typical(
    scaler: Any, net: nn.Module, optimizer: Any, data: list[Batch], *, autocast: bool = False
) -> list[float]:
    scales = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            out = net(x)
        assert out.dtype is (torch.float16 if autocast else torch.float32)
        scaler.scale(mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_typical_loop_in_real_half_precision() -> None:
    """Scales that only float16 overflows at: the search comes down, then training starts."""
    half = partial(typical, autocast=True)
    scales = agree(half, batches(16), init_scale=2.0**24, growth_interval=4)
    assert scales[0] == 2.0**23, "the first window overflowed"
    assert any(later > earlier for earlier, later in pairwise(scales))


def test_gradient_penalty() -> None:
    """The penalty is made of unscaled gradients, then the sum is scaled as one loss."""

    def penalised(scaler: Any, net: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            scaled = torch.autograd.grad(
                outputs=scaler.scale(loss), inputs=list(net.parameters()), create_graph=True
            )
            inverse = 1.0 / scaler.get_scale()
            norm = torch.stack([(g * inverse).pow(2).sum() for g in scaled]).sum().sqrt()
            scaler.scale(loss + 0.1 * norm).backward()
            scaler.step(optimizer)
            scaler.update()

    agree(penalised, batches(6))
    with_penalty, _ = run(GradScaler("cpu", init_scale=1024.0), penalised, batches(6))
    without, _ = run(GradScaler("cpu", init_scale=1024.0), typical, batches(6))
    assert not torch.equal(with_penalty, without)


def asking(scaler: Any, net: nn.Module, optimizer: Any, data: list[Batch]) -> list[bool]:
    """Look before stepping; after an overflow ask for the factor and back off with it."""
    flags = []
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(mse_loss(net(x), y)).backward()
        flags.append(scaler.get_overflow_flag())
        if not flags[-1]:
            scaler.step(optimizer)
            scaler.update()
        else:
            factor = scaler.get_backoff_factor()
            scaler.backoff(factor)
    return flags


@pytest.mark.parametrize("overflowing", [(), (0, 3, 4)])
def test_the_loop_that_asks_for_the_overflow(overflowing: tuple[int, ...]) -> None:
    data = batches(8, overflowing)
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3, "backoff_factor": 0.25}
    stock, ours = torch.amp.GradScaler("cpu", **settings), GradScaler("cpu", **settings)
    expected, scales = run(stock, typical, data)
    got, flags = run(ours, asking, data)
    assert torch.equal(got, expected)
    assert flags == [index in overflowing for index in range(8)]
    assert ours.get_scale() == scales[-1]
    assert ours._get_growth_tracker() == stock._get_growth_tracker()
    finite = [batch for index, batch in enumerate(data) if index not in overflowing]
    plain, _ = run(torch.amp.GradScaler("cpu", enabled=False), typical, finite)
    assert torch.equal(got, plain), "float32 without a scaler, on the finite batches only"


def roundpipe(scaler: Any, net: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    """The step runs on another thread while this one updates the scale and goes on."""
    scales = []
    for x, y in data:
        scaler.scale(mse_loss(net(x), y)).backward()

        def job() -> None:
            scaler.step(optimizer)
            optimizer.zero_grad()

        thread = threading.Thread(target=scaler.bind(job, optimizer))
        scaler.update()
        scales.append(scaler.get_scale())
        thread.start()
        thread.join(60)
    return scales


@pytest.mark.parametrize("overflowing", [(), (0, 2, 3, 4)])
def test_the_step_on_another_thread(overflowing: tuple[int, ...]) -> None:
    data = batches(9, overflowing)
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
    expected, scales = run(torch.amp.GradScaler("cpu", **settings), typical, data)
    got, mine = run(GradScaler("cpu", **settings), roundpipe, data)
    assert torch.equal(got, expected)
    assert mine == scales, "no lag: the scale after each update is the synchronous one"


@pytest.mark.parametrize("loop", [asking, roundpipe, typical])
def test_a_disabled_scaler_is_no_scaler(loop: Loop) -> None:
    data = batches(5)
    expected, _ = run(torch.amp.GradScaler("cpu", enabled=False), typical, data)
    got, _ = run(GradScaler("cpu", enabled=False), loop, data)
    assert torch.equal(got, expected)
