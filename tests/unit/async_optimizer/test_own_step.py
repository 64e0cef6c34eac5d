"""An optimizer that torch does not ship, on float32 masters: it leaves what it leaves in torch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_scaler import AsyncOptimizer, StepError, UnsupportedError

WAYS = [("sync", "cpu"), ("overlap", "cpu"), ("delayed", "none"), ("delayed", "cpu")]


class Own(Optimizer):
    """Momentum; what a step does besides is each test's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.one(p, self.state[p], group["lr"])

    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        momentum = entry.setdefault("momentum", torch.zeros_like(p))
        p.add_(momentum.mul_(0.9).add_(p.grad), alpha=-lr)


class Precise(Own):
    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        momentum = entry.setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
        p.add_(momentum.mul_(0.9).add_(p.grad).float(), alpha=-lr)


class Rough(Own):
    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        momentum = entry.setdefault("momentum", torch.zeros_like(p, dtype=torch.bfloat16))
        p.add_(momentum.mul_(0.9).add_(p.grad).float(), alpha=-lr)


class Counts(Own):
    def one(self, p: Any, entry: dict[str, Any], lr: float) -> None:
        p.count = getattr(p, "count", 0) + 1
        p.add_(p.grad, alpha=-lr / p.count)


class DropsGradients(Own):
    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        p.add_(p.grad, alpha=-lr)
        p.grad = None


class ZeroesGradients(Own):
    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        p.add_(p.grad, alpha=-lr)
        assert p.grad is not None
        p.grad.zero_()


class DecaysGradients(Own):
    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        assert p.grad is not None
        p.grad.add_(p, alpha=0.01)
        p.add_(p.grad, alpha=-lr)


class TupleOfParameters(Own):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["params"] = tuple(group["params"])
        super().step()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net: nn.Module, optimizer: Any, steps: int, zeroes: bool, start: int = 0) -> None:
    for number in range(start, start + steps):
        net(torch.full((2, 5), 1.0 + number)).square().mean().backward()
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()


@pytest.mark.parametrize(("mode", "offload"), WAYS)
@pytest.mark.parametrize(
    "cls",
    [
        *(Own, Precise, Rough, Counts),
        *(DropsGradients, ZeroesGradients, DecaysGradients, TupleOfParameters),
    ],
)
def test_it_trains_as_alone_and_leaves_what_it_leaves_alone(
    cls: type[Own], mode: str, offload: str
) -> None:
    zeroes = cls in (Own, Precise, Rough, Counts, TupleOfParameters)
    plain, net = model(), model()
    alone, own = cls(plain.parameters()), cls(net.parameters())
    train(plain, alone, 5, zeroes)
    with AsyncOptimizer(own, net, mode=mode, offload=offload, delay_warmup_steps=9) as optimizer:
        train(net, optimizer, 5, zeroes)
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        for key, value in alone.state[theirs].items():
            assert torch.equal(own.state[mine][key], value)
            assert own.state[mine][key].dtype is value.dtype


class FailsHalfWay(Own):
    count = 0

    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        super().one(p, entry, lr)
        self.count += 1
        if self.count == 2:
            raise RuntimeError("half-way")


@pytest.mark.parametrize(("mode", "offload"), WAYS)
def test_what_it_had_updated_when_it_failed_is_in_the_model(mode: str, offload: str) -> None:
    plain, net = model(), model()
    alone, own = FailsHalfWay(plain.parameters()), FailsHalfWay(net.parameters())
    with pytest.raises(RuntimeError, match="half-way"):
        train(plain, alone, 1, True)
    alone.zero_grad()
    with AsyncOptimizer(own, net, mode=mode, offload=offload, delay_warmup_steps=9) as optimizer:
        with pytest.raises(StepError, match="stays updated"):
            train(net, optimizer, 1, True)
        optimizer.zero_grad()
        assert all(map(torch.equal, net.parameters(), plain.parameters()))
        train(plain, alone, 3, True, start=1)
        train(net, optimizer, 3, True, start=1)
        assert all(map(torch.equal, net.parameters(), plain.parameters()))


class Migrates(Own):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entry in self.state.values():
            entry.setdefault("factor", 0.5)

    def one(self, p: Tensor, entry: dict[str, Any], lr: float) -> None:
        super().one(p, entry, lr * (entry["factor"] if "old" in entry else 1.0))


@pytest.mark.parametrize(("mode", "offload"), WAYS)
def test_what_it_makes_of_a_loaded_state_is_what_it_steps_with(mode: str, offload: str) -> None:
    plain, net = model(), model()
    alone, own = Migrates(plain.parameters()), Migrates(net.parameters())
    train(plain, alone, 1, True)
    saved = alone.state_dict()
    for entry in saved["state"].values():
        entry["old"] = 1.0
        entry.pop("factor", None)
    net.load_state_dict(plain.state_dict())
    alone.load_state_dict(copy.deepcopy(saved))  # torch shares the tensors
    with AsyncOptimizer(own, net, mode=mode, offload=offload, delay_warmup_steps=9) as optimizer:
        optimizer.load_state_dict(saved)
        train(plain, alone, 3, True)
        train(net, optimizer, 3, True)
        assert all(map(torch.equal, net.parameters(), plain.parameters()))


class BareState(Own):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                held: Any = self.state
                held[p] = held[p] if isinstance(held[p], Tensor) else torch.zeros_like(p)
                p.add_(held[p].mul_(0.9).add_(p.grad), alpha=-0.1)


def test_a_tensor_as_the_whole_state_of_a_parameter() -> None:
    plain, net = model(), model()
    alone, own = BareState(plain.parameters()), BareState(net.parameters())
    train(plain, alone, 3, True)
    with AsyncOptimizer(own, net) as optimizer:
        train(net, optimizer, 3, True)
        assert all(map(torch.equal, net.parameters(), plain.parameters()))
        saved, theirs = optimizer.state_dict()["state"], alone.state_dict()["state"]
        assert all(torch.equal(saved[key], theirs[key]) for key in theirs)
    assert all(
        torch.equal(own.state[p], alone.state[q])
        for p, q in zip(net.parameters(), plain.parameters(), strict=True)
    )
    with pytest.raises(UnsupportedError, match="holds a tensor for a parameter"):
        AsyncOptimizer(own, net, offload="cpu")
    half = model().half()
    with AsyncOptimizer(BareState(half.parameters()), half) as optimizer:
        half(torch.ones(2, 5).half()).sum().backward()
        optimizer.step()
        with pytest.raises(UnsupportedError, match="holds a tensor for a parameter"):
            optimizer.state_dict()


# Interrupts: as a handler of a signal raises, between any two lines.


def lines_of(names: set[str]) -> Iterator[tuple[str, int]]:
    """``(function, how many lines of them came before)`` for one step, by a run of it."""
    seen: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_qualname not in names:
            return trace if frame.f_code.co_filename.endswith(".py") else None
        if event == "line":
            seen.append(frame.f_code.co_qualname)
        return trace

    net = model()
    with AsyncOptimizer(Own(net.parameters()), net, offload="cpu") as optimizer:
        net(torch.ones(2, 5)).square().mean().backward()
        sys.settrace(trace)
        try:
            optimizer.step()
        finally:
            sys.settrace(None)
    return iter([(name, number) for number, name in enumerate(seen)])


WHERE = {"Task.execute", "Replica._exchange", "Replica._on_masters", "Replica.return_groups"}


def test_an_interrupt_anywhere_in_an_inline_step_leaves_an_optimizer_that_steps_its_model() -> None:
    for name, place in lines_of(WHERE):
        net = model()
        own = Own(net.parameters())
        count = -1

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code.co_qualname in WHERE and event == "line":
                count += 1
                if count == place:  # noqa: B023
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        with AsyncOptimizer(own, net, offload="cpu") as optimizer:
            net(torch.ones(2, 5)).square().mean().backward()
            sys.settrace(trace)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            optimizer.zero_grad()
            assert own.param_groups[0]["params"] == list(net.parameters()), (name, place)
            assert set(own.state) <= set(net.parameters()), (name, place)
            before = [p.detach().clone() for p in net.parameters()]
            train(net, optimizer, 1, False, start=1)
            for p, old in zip(net.parameters(), before, strict=True):
                assert not torch.equal(p, old), (name, place)
                assert p.grad is not None
                assert torch.allclose(p, old - 0.1 * own.state[p]["momentum"], atol=1e-6), (
                    name,
                    place,
                )
        assert own.param_groups[0]["params"] == list(net.parameters())
