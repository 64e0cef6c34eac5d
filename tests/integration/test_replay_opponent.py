"""Models and loops that a replay meets seldom: beside the same run without it, and what is said."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """``middle`` is what each test puts between its layers."""

    def __init__(self, middle: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        if middle is not None:
            self.middle = middle

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


def batch(number: int, factor: float = 1.0) -> Tensor:
    """For a model from 8 numbers."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * factor


class Holder(tuple[Any, ...]):
    """Not made of its elements alone."""

    def __new__(cls, items: Any, name: str) -> Holder:
        return super().__new__(cls, items)


class TakesAnything(Net):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["x"] if hasattr(x, "keys") else x[0])


@pytest.mark.parametrize("how", ["tuple", "mapping"])
def test_inputs_that_cannot_be_copied_train_on(how: str, caplog: Any) -> None:
    """The forward goes on; that the window cannot be run again is told."""
    caplog.set_level("INFO", "accel_scaler")

    def run(find: str) -> list[Tensor]:
        torch.manual_seed(0)
        plain = TakesAnything()
        with attached(init_scale=64.0, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
            for number, factor in enumerate((1.0, 1e9, 1.0)):
                x = batch(number, factor)
                given = Holder([x], "") if how == "tuple" else types.MappingProxyType({"x": x})
                accelerator.backward(model(given).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in plain.parameters()]

    assert_same(run("replay"), run("off"))
    assert "its inputs cannot be copied (TypeError" in caplog.text


class GivesParameter(Net):
    """As a model that returns its temperature beside its features."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.temperature, self.temperature


def test_a_parameter_that_is_given_out_collects_no_hooks() -> None:
    plain = GivesParameter()
    with attached(find_overflow="replay") as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number in range(5):
            y, temperature = model(batch(number))
            accelerator.backward(y.square().mean() + temperature.sum())
            assert len(plain.temperature._backward_hooks or ()) == 1
            optimizer.step()
            optimizer.zero_grad()
    assert not plain.temperature._backward_hooks


def test_a_forward_that_was_interrupted_hides_no_later_one() -> None:
    """A notebook's user stops a cell, and runs the next."""

    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    plain = Net(interrupt)
    with attached(init_scale=64.0, find_overflow="replay") as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        del plain.middle
        for number, factor in enumerate((1.0, 1e9)):
            accelerator.backward(model(batch(number, factor)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found = accelerator.scaler_history.records[-1].first
    assert found["module"] == "first"


def test_an_input_that_was_made_to_require_gradients_later_gets_none() -> None:
    """As for a gradient penalty, after a first forward on the same batch."""

    def run(find: str) -> list[Any]:
        torch.manual_seed(0)
        plain, seen = Net(), []
        with attached(init_scale=2.0**18, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
            for number in range(3):
                x = batch(number)
                y = model(x)
                x.requires_grad_()
                accelerator.backward((y + model(x)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                assert x.grad is not None
                seen.append(x.grad.view(torch.int32).clone())
        return seen

    assert_same(run("replay"), run("off"))
