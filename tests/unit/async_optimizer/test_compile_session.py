"""Compiles beside a step in flight, of what reads its parameters and of anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from async_support import lazy
from support import same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from versions import UNGUARDED, before_torch

from accel_scaler import AsyncOptimizer
from accel_scaler.async_optimizer import inflight_step
from accel_scaler.async_optimizer.pending_parameter import PendingParameter

pytestmark = pytest.mark.timeout(60)

LAYERS = 12
"""More than dynamo compiles variants of one function."""

PAUSE_S = 0.3
"""Longer than any step here."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def adamax(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adamax(params, lr=0.01, foreach=True)


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(8, 8, generator=generator) / 3) for _ in range(LAYERS)]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.tanh(x @ w)


def train(
    params: list[nn.Parameter], optimizer: Any, call: Any = layer, steps: int = 4
) -> list[Tensor]:
    for step in range(steps):
        x = torch.linspace(-1.0, 1.0, 16).reshape(2, 8) + step
        for w in params:
            x = call(x, w)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return params


def expected(make: Any) -> list[Tensor]:
    params = weights()
    return train(params, make(params))


@pytest.mark.parametrize("make", [adamw, adamax])
def test_a_step_beside_a_compile_of_something_else(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's optimizers ask whether anybody compiles; the step waits until nobody does."""
    gate, taken = threading.Event(), inflight_step.beside_no_compile

    def stepping() -> Any:
        assert gate.wait(30.0)
        return taken()

    def backend(module: Any, _: Any) -> Any:
        gate.set()
        threading.Event().wait(PAUSE_S)  # a step that does not wait for the compile runs now
        return module

    params = weights()
    monkeypatch.setattr(inflight_step, "beside_no_compile", stepping)
    with AsyncOptimizer(make(params)) as optimizer:
        for step in range(4):
            x = torch.linspace(-1.0, 1.0, 16).reshape(2, 8) + step
            for w in params:
                x = layer(x, w)
            x.square().mean().backward()
            gate.clear()
            optimizer.step()
            optimizer.zero_grad()
            torch._dynamo.reset()
            torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert same(list(params), expected(make))


def test_a_compile_that_waits_for_the_step() -> None:
    """A function that is met by each of many pending parameters is compiled once more, not as often
    as there are some: dynamo would give it up, and run it uncompiled."""
    counter, params = CompileCounter(), weights()
    call = torch.compile(layer, backend=counter, fullgraph=True)
    with lazy(), AsyncOptimizer(adamw(params)) as optimizer:
        train(params, optimizer, call)
    assert same(list(params), expected(adamw))
    # For an input without gradients and one with, and one of them again.
    assert counter.frame_count == 3


@before_torch(2, 13, UNGUARDED)
def test_a_function_that_is_not_compiled_any_more_is_waited_for_at_the_step() -> None:
    """Past its limit dynamo runs a function uncompiled for a parameter that is pending: once, for
    from the next step on none is."""
    params = weights()
    call, pending = torch.compile(layer, backend="eager"), []
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        lazy(),
        AsyncOptimizer(torch.optim.SGD(params, lr=0.1)) as optimizer,
    ):
        for _ in range(4):
            train(params, optimizer, call, steps=1)
            pending.append(any(type(p) is PendingParameter for p in params))
    assert pending == [True, False, False, False]
