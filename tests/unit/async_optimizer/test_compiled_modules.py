"""Compiled code beside a step in flight: it sees the update.

The worker is ``lazy``: see ``test_reads_unseen.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from async_support import lazy
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from versions import release

from accel_scaler import AsyncOptimizer
from accel_scaler.async_optimizer.pending_parameter import PendingParameter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Linear):
    """Not torch's own, which a compiler would skip if it is compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Network(nn.Module):
    """Layers, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.a, self.b = Layer(3, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)) * self.gain)
        return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def batch(step: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3) + step


def train(call: Callable[[Tensor], Tensor], optimizer: Any) -> list[float]:
    losses = []
    for step in range(5):
        loss = call(batch(step)).square().sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compiled(code: Any, backend: Any) -> Any:
    return torch.compile(code, backend=backend, fullgraph=True)


def in_place(model: Network, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def forward(model: Any, backend: Any) -> Any:
    model.forward = compiled(model.forward, backend)
    return model


def inner_layer(model: Network, backend: Any) -> Any:
    model.a.compile(backend=backend, fullgraph=True)
    return model


def function(model: Network, backend: Any) -> Any:
    return compiled(lambda x: model(x), backend)


def function_of_a_part(model: Network, backend: Any) -> Any:
    part = compiled(lambda x: model.a(x), backend)
    return lambda x: model.b(torch.tanh(part(x)) * model.gain)


COMPILED = {
    **dict.fromkeys((compiled, in_place, forward, inner_layer), 1),
    **dict.fromkeys((function, function_of_a_part), 2),
}
"""How often each is compiled: once where the optimizer can know of it before the first call, so
that no guard ever sees the pending class."""


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_code_sees_the_update(how: Callable[..., Any]) -> None:
    counter, model, plain = CompileCounter(), Network(), Network()
    call = how(model, counter)
    given = call if how is compiled else model
    with lazy(), AsyncOptimizer(sgd(model), given, step_mode="overlap") as optimizer:
        losses = train(call, optimizer)
    assert losses == train(plain, sgd(plain))
    # Before 2.13 no function meets a pending parameter: see ``versions.UNGUARDED``.
    assert counter.frame_count == (COMPILED[how] if release("torch") >= (2, 13) else 1)


def test_a_compiled_function_of_something_else_costs_no_overlap() -> None:
    model = Network()
    loss = torch.compile(lambda y: y.square(), backend="eager", fullgraph=True)
    with lazy(), AsyncOptimizer(sgd(model), model, step_mode="overlap") as optimizer:
        for step in range(3):
            loss(model(batch(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert {type(p) for p in model.parameters()} == {PendingParameter}
