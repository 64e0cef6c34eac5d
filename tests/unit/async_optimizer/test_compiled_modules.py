"""From the first compile on no step is in flight, for compiled code would not see the update.

The worker is ``lazy``: see ``test_reads_unseen.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_support import lazy
from support import same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from versions import UNGUARDED, before_torch

from accel_scaler import AsyncOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize(
    "how", [compiled, in_place, forward, inner_layer, function, function_of_a_part]
)
def test_compiled_code_sees_the_update(how: Callable[..., Any]) -> None:
    """It is compiled once: no guard ever sees the pending class."""
    counter, model, plain = CompileCounter(), Network(), Network()
    call = how(model, counter)
    given = call if how is compiled else model
    with lazy(), AsyncOptimizer(sgd(model), given, step_mode="overlap") as optimizer:
        losses = train(call, optimizer)
    assert losses == train(plain, sgd(plain))
    assert counter.frame_count == 1


@pytest.mark.parametrize("submits", [False, True])
def test_after_a_compile_of_anything_it_steps_as_in_sync_and_says_so_once(
    submits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Network()
    loss = torch.compile(lambda y: y.square(), backend="eager", fullgraph=True)
    with lazy(), AsyncOptimizer(sgd(model), model, step_mode="overlap") as optimizer:
        for step in range(3):
            loss(model(batch(step))).sum().backward()
            if submits:
                optimizer.submit(optimizer.step)
            else:
                optimizer.step()
            optimizer.zero_grad()
            assert {type(p) for p in model.parameters()} == {nn.Parameter}
    ours = [each.getMessage() for each in caplog.records if each.name == "accel_scaler"]
    assert [message.count("torch.compile") for message in ours] == [1]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adamax])
def test_the_first_compile_and_a_step_take_turns(make: Any) -> None:
    """torch's optimizers ask whether anybody compiles; the step waits until nobody does."""

    def backend(module: Any, _: Any) -> Any:
        threading.Event().wait(0.3)  # a step that does not wait for the compile runs now
        return module

    def weights(compiles: bool) -> list[Tensor]:
        model = Network()
        with AsyncOptimizer(make(model.parameters(), lr=0.1, foreach=True), model) as optimizer:
            model(batch(0)).square().sum().backward()
            optimizer.step()
            if compiles:
                torch.compile(torch.sin, backend=backend)(torch.ones(2))
        return [p.detach() for p in model.parameters()]

    assert same(weights(True), weights(False))


@before_torch(2, 13, UNGUARDED)
def test_a_compile_that_would_wait_for_a_step_is_refused() -> None:
    model = Network()
    with lazy(), AsyncOptimizer(sgd(model), model, step_mode="overlap") as optimizer:
        model(batch(0)).square().sum().backward()
        optimizer.step()
        with pytest.raises(Exception, match=r"optimizer\.synchronize\(\) before the first call"):
            torch.compile(lambda: model.gain * 2, backend="eager")()
        optimizer.synchronize()
        torch.compile(lambda: model.gain * 2, backend="eager")()
