"""Models and loops that a replay meets seldom: beside the same run without it, and what is said."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd
from torch import Tensor, nn

from accel_scaler.overflow_finder import ranges

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
        with attached(init_scale=2.0**14, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), lr=1e-4))
            for number in range(3):
                x = batch(number, 2e4)
                y = model(x)
                x.requires_grad_()
                accelerator.backward((y + model(x)).mean())
                optimizer.step()
                optimizer.zero_grad()
                assert x.grad is not None
                assert x.grad.isfinite().all()
                seen.append(x.grad.clone())
            assert accelerator.scaler_history.records[0].found_inf
        return seen

    assert_same(run("replay"), run("off"))


everywhere = {"forwards": 0}
forwards = 0


class Writer(Net):
    """Its forward writes to what :meth:`make` gives, and reads it."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.state = self.make()

    def make(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.move()

    def move(self) -> Any:
        """A factor near 1."""
        raise NotImplementedError


class OwnGenerator(Writer):
    def make(self) -> Any:
        return torch.Generator().manual_seed(1)

    def move(self) -> Any:
        return 1 + torch.rand((), generator=self.state) / 8


class NumpyGenerator(Writer):
    def make(self) -> Any:
        return numpy.random.default_rng(1)

    def move(self) -> Any:
        return 1 + self.state.random() / 8


class NumpyState(NumpyGenerator):
    def make(self) -> Any:
        return numpy.random.RandomState(1)

    def move(self) -> Any:
        return 1 + self.state.rand() / 8


class PythonGenerator(NumpyGenerator):
    def make(self) -> Any:
        return random.Random(1)


class Array(Writer):
    def make(self) -> Any:
        return numpy.zeros(2)

    def move(self) -> Any:
        self.state += 1 / 64
        return 1 + self.state[0]


class Nested(Writer):
    def make(self) -> Any:
        return {"lists": ([],)}

    def move(self) -> Any:
        self.state["lists"][0].append(1)
        return 1 + len(self.state["lists"][0]) / 64


class Counted(Writer):
    def make(self) -> Any:
        return collections.Counter()

    def move(self) -> Any:
        self.state["n"] += 1
        return 1 + self.state["n"] / 64


class Config:
    forwards = 0


class Configured(Writer):
    def make(self) -> Any:
        return Config()

    def move(self) -> Any:
        self.state.forwards += 1
        return 1 + self.state.forwards / 64


@dataclasses.dataclass(slots=True)
class Slots:
    forwards: int = 0


class Slotted(Configured):
    def make(self) -> Any:
        return Slots()


class OfClass(Writer):
    def move(self) -> Any:
        type(self).count += 1
        return 1 + type(self).count / 64


class InGlobals(Writer):
    def move(self) -> Any:
        global forwards
        forwards += 1
        everywhere["forwards"] += 1
        return 1 + (forwards + everywhere["forwards"]) / 64


class TensorInList(Writer):
    def make(self) -> Any:
        return [[torch.zeros(())]]

    def move(self) -> Any:
        self.state[0][0].add_(1 / 64)
        return 1 + self.state[0][0]


class FrozenParameter(Writer):
    def make(self) -> Any:
        return nn.Parameter(torch.zeros(()), requires_grad=False)

    def move(self) -> Any:
        self.state += 1 / 64
        return 1 + self.state


class OwnWeights(Writer):
    def move(self) -> Any:
        with torch.no_grad():
            self.last.weight.mul_(0.99)
        self.first.weight.data *= 0.99
        torch.mul(self.first.bias.data, 0.99, out=self.first.bias.data)
        return 1


class Hidden(Writer):
    """A teacher that is in no ``modules()``, with running statistics."""

    def make(self) -> Any:
        return [nn.BatchNorm1d(2)]

    def move(self) -> Any:
        return 1 + self.state[0](torch.tensor([[1.0, 2.0], [2.0, 5.0]])).mean()


WRITERS = [
    *(
        OwnGenerator,
        NumpyGenerator,
        NumpyState,
        PythonGenerator,
        Array,
        Nested,
        Counted,
        Configured,
    ),
    *(OfClass, InGlobals, TensorInList, FrozenParameter, OwnWeights, Hidden),
]


def state_of(value: Any) -> Any:
    """Comparable, whatever a writer writes to."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state["state"]
    if isinstance(value, numpy.random.RandomState):
        return value.get_state()[1].tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, list) and isinstance(value[0], nn.Module):
        return value[0].state_dict()
    if isinstance(value, nn.Module):
        return value.state_dict()
    if isinstance(value, Slots):
        return value.forwards
    if isinstance(value, Config):
        return vars(value)
    return value


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_forward_writes_to_is_put_back(kind: type[Writer], accumulation: int) -> None:
    """Wherever that is: the run goes on with the same numbers."""
    global forwards

    def run(find: str) -> Any:
        global forwards
        torch.manual_seed(0)
        kind.count = everywhere["forwards"] = forwards = 0
        plain = kind()
        with attached(init_scale=64.0, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), lr=0.01))
            for number, factor in enumerate((1.0, 1e9, 1.0, 1e9, 1.0)):
                for micro in range(accumulation):
                    accelerator.backward(model(batch(2 * number + micro, factor)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        counts = kind.count, forwards, everywhere["forwards"]
        return plain.state_dict(), counts, state_of(plain.state)

    assert_same(run("replay"), run("off"))


def test_hooks_that_collect_have_nothing_more() -> None:
    """As who looks at activations writes it: into a list around the hook, or counting."""

    def run(find: str) -> Any:
        torch.manual_seed(0)
        plain, seen, count = Net(), [], 0

        def collect(module: nn.Module, args: Any, output: Tensor) -> None:
            nonlocal count
            count += 1
            seen.append(count)

        plain.first.register_forward_hook(collect)
        with attached(init_scale=64.0, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
            for number, factor in enumerate((1.0, 1e9, 1.0)):
                accelerator.backward(model(batch(number, factor)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return seen, count

    assert run("replay") == run("off") == ([1, 2, 3], 3)


@pytest.mark.parametrize("where", ["closure", "attribute", "list"])
def test_leaves_that_are_no_parameters_get_no_gradients(where: str) -> None:
    """As architecture weights beside a network; they are stepped by others, later."""

    def run(find: str) -> list[Any]:
        torch.manual_seed(0)
        leaf = torch.ones(1, requires_grad=True)
        plain: Any = Net()
        if where == "closure":
            plain.last = nn.Sequential(plain.last)
            plain.last.register_forward_hook(lambda module, args, out: out + leaf)
        else:
            plain.leaf = leaf if where == "attribute" else [leaf]
            own = (lambda: plain.leaf) if where == "attribute" else (lambda: plain.leaf[0])
            plain.last.register_forward_hook(lambda module, args, out: out + own())
        with attached(init_scale=2.0**14, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), lr=1e-4))
            seen = []
            for number, factor in enumerate((1.0, 2e4, 1.0)):
                accelerator.backward(model(batch(number, factor)).mean())
                optimizer.step()
                optimizer.zero_grad()
                assert leaf.grad is not None
                assert leaf.grad.isfinite().all()
                seen.append(leaf.grad.clone())
            skipped = [r.found_inf for r in accelerator.scaler_history.records]
        assert skipped == [False, True, False]
        return seen

    assert_same(run("replay"), run("off"))


def test_thousands_of_texts_are_not_looked_at_one_by_one(monkeypatch: Any) -> None:
    """A forward that is given its tokens in words costs no more with them."""
    looked = 0
    as_it_is = ranges.tensors_in

    def counted(*given: Any) -> Any:
        nonlocal looked
        looked += 1
        return as_it_is(*given)

    monkeypatch.setattr(ranges, "tensors_in", counted)
    texts, x = ["word"] * 5000, torch.ones(2)
    found = list(ranges.tensors_in({"texts": texts, "x": [1, x]}))
    assert [path for path, _ in found] == ["x.1"]
    assert looked < 10
    changed = ranges.with_tensors((texts, x), lambda tensor: tensor + 1)
    assert changed[0] == texts
    assert changed[0] is not texts
    assert changed[1].tolist() == [2, 2]


class Squares(nn.Module):
    """Too large for float16 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 3e3 + 3e3) * (x * 3e3 + 3e3) / 9e6


def test_a_model_that_was_compiled_before_it_was_prepared() -> None:
    """Its autocast is around the compiler's module, and is entered again too."""

    def run(**settings: Any) -> tuple[list[Tensor], list[Any], list[bool]]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), Squares(), nn.Linear(8, 1))
        with attached(init_scale=64.0, **settings) as accelerator:
            compiled = torch.compile(plain, backend="eager")
            model, optimizer = accelerator.prepare(compiled, sgd(plain.parameters(), lr=0.01))
            for number in range(4):
                accelerator.backward(model(batch(number)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            records = accelerator.scaler_history.records
        weights = [p.detach() for p in plain.parameters()]
        return weights, [r.first for r in records], [r.found_inf for r in records]

    _, firsts, _ = run(find_overflow="replay")
    assert (firsts[0]["where"], firsts[0]["module"]) == ("forward", "1")
    healed, _, skipped = run(heal=True)
    assert skipped == [True, False, False, False]
    _, _, skipped = run(fp32_modules=["1"])
    assert not any(skipped)
    assert all(weight.isfinite().all() for weight in healed)
