"""A window that overflowed is run again: what it says, what is put back, loops met seldom."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from async_support import assert_same
from telemetry_runs import attached, sgd, windows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
MODES = pytest.mark.parametrize(
    "mode",
    [
        {},
        {"step_mode": "overlap"},
        {"step_mode": "overlap", "offload": "cpu"},
        {"step_mode": "delayed"},
        {"step_mode": "delayed", "offload": "cpu", "delay_compensation": "none"},
        {"fold_unscale": True},
    ],
    ids=lambda mode: "-".join(map(str, mode.values())) or "sync",
)


class Layer(nn.Module):
    """Parameters, buffers and random numbers, which a second forward would move on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + float(numpy.random.rand())
        x = self.norm(self.drop(self.inner(x)).float())
        self.mean.add_(x.detach().mean(0))
        return x * (1 + drawn / 8)


class Net(nn.Module):
    """Layers, one of them behind a checkpoint; ``factor`` makes the last one's forward too large,
    ``steep`` its backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor, factor: float = 1.0, steep: float = 1.0) -> dict[str, Tensor]:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=self.reentrant)
        logits = self.head(x * factor)
        return {"logits": logits * steep / steep, "loss": logits.float().square().mean() / 64}


def loss_inside(out: dict[str, Tensor]) -> Tensor:
    return out["loss"]


def loss_outside(out: dict[str, Tensor]) -> Tensor:
    return (out["logits"].float() - 1).square().mean() / 64


def both(out: dict[str, Tensor]) -> Tensor:
    return out["loss"] + (out["logits"].float() - 1).square().mean() / 64


def train(
    loss: Callable[[dict[str, Tensor]], Tensor],
    factors: tuple[float, ...],
    accumulation: int = 1,
    make: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """State of all there is after each window, and what was found."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    plain = make()
    seen, found = [], []
    with attached(None, init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), momentum=0.9))
        for number, factor in enumerate(factors):
            for micro in range(accumulation):
                x = torch.randn(4, 8)
                is_last = micro == accumulation - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                accelerator.backward(loss(model(x, factor=factor if is_last else 1.0)))
            optimizer.step()
            grads = [p.grad.view(torch.int32).clone() for p in plain.parameters()]  # NaN too
            optimizer.zero_grad()
            found.append(accelerator.scaler_history.records[-1].first)
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in plain.modules()]
            seen.append(
                {
                    "grads": grads,
                    "model": copy.deepcopy(plain.state_dict()),
                    "optimizer": copy.deepcopy(optimizer.state_dict()["state"]),
                    "scaler": accelerator.scaler.state_dict(),
                    "random": (torch.get_rng_state(), random.getstate(), number),
                    "numpy": numpy.random.get_state()[1].tolist(),
                    "names": [sorted(vars(m)) for m in plain.modules()],
                }
            )
            found_hooks.append(hooks)
    return seen, found


found_hooks: list[list[int]] = []


@MODES
@pytest.mark.parametrize("loss", [loss_inside, loss_outside, both])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_parameters_buffers_and_random_state_are_put_back(
    mode: dict[str, Any], loss: Any, accumulation: int
) -> None:
    """Beside the same run without it: every number, bit for bit."""
    factors = (1.0, 1e9, 1.0, 1.0, 1e9, 1.0)
    found_hooks.clear()
    plain, _ = train(loss, factors, accumulation, find_overflow="off", **mode)
    without = found_hooks[0]
    again, found = train(loss, factors, accumulation, find_overflow="replay", **mode)
    assert [each is not None for each in found] == [factor > 1 for factor in factors]
    for one, other in zip(again, plain, strict=True):
        assert_same(one, other)
    # The root has two hooks more, before and after.
    assert all(sum(hooks) == sum(without) + 2 for hooks in found_hooks[len(factors) :])


def test_telemetry_is_as_without_it(tmp_path: Path) -> None:
    """But for the times, and for where it began."""

    def windows(**settings: Any) -> list[dict[str, Any]]:
        path = tmp_path / f"{settings['find_overflow']}.jsonl"
        train(both, (1.0, 1e9, 1.0, 1e9), 2, telemetry=str(path), underflow_interval=1, **settings)
        lines = windows_of(path)
        for line in lines:
            line.pop("first", None)
            for name in [name for name in line if name == "time" or name.endswith("_us")]:
                del line[name]
        return lines

    assert windows(find_overflow="replay") == windows(find_overflow="off")


class Plain(nn.Module):
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


class GivesParameter(Plain):
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

    plain = Plain(interrupt)
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
        plain, seen = Plain(), []
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


class Writes(Plain):
    """Its forward writes to parameters: a frozen one, and those that are trained."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.slow = how, nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.slow.data = self.slow.data * 0.9 + self.first.bias.data * 0.1
        elif self.how == "in place":
            self.slow.mul_(0.9).add_(self.first.bias.detach(), alpha=0.1)
        else:
            with torch.no_grad():
                self.last.weight.mul_(0.99)
            self.first.weight.data *= 0.99
            torch.mul(self.first.bias.data, 0.99, out=self.first.bias.data)
        return super().forward(x + self.slow)


class Recurrent(nn.Module):
    """It keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x.float())[0] * x)
        return out


@pytest.mark.parametrize(
    "make",
    [*(partial(Writes, how) for how in ("data", "in place", "trained")), Recurrent],
    ids=["data", "in place", "trained", "recurrent"],
)
def test_a_run_with_replays_ends_as_one_without(make: Any) -> None:
    def run(find: str) -> Any:
        torch.manual_seed(0)
        plain = make()
        with attached(init_scale=64.0, find_overflow=find) as accelerator:
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), lr=0.01))
            for number, factor in enumerate((1.0, 1e9, 1.0, 1e9, 1.0)):
                accelerator.backward(model(batch(number, factor)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            records = list(accelerator.scaler_history.records)
        assert [r.found_inf for r in records] == [False, True, False, True, False]
        assert (records[1].first is not None) == (find == "replay")
        return plain.state_dict()

    assert_same(run("replay"), run("off"))


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
