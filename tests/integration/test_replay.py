"""With ``find_overflow="replay"`` a window that overflowed is run again: what is put back."""

from __future__ import annotations

import copy
import random
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
    """Layers, one of them behind a checkpoint; a large ``factor`` makes the last one overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        logits = self.head(x * factor)
        return {"logits": logits, "loss": logits.float().square().mean() / 64}


def loss_of(out: dict[str, Tensor]) -> Tensor:
    """A loss that the model returns, and one that is computed outside of it."""
    return out["loss"] + (out["logits"].float() - 1).square().mean() / 64


def train(
    factors: tuple[float, ...],
    accumulation: int = 1,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """State of all there is after each window, and what was found."""
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    plain = Net()
    seen, found = [], []
    with attached(None, init_scale=64.0, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), momentum=0.9))
        for number, factor in enumerate(factors):
            for micro in range(accumulation):
                x = torch.randn(4, 8)
                is_last = micro == accumulation - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                accelerator.backward(loss_of(model(x, factor=factor if is_last else 1.0)))
            optimizer.step()
            grads = [p.grad.view(torch.int32).clone() for p in plain.parameters()]  # NaN too
            optimizer.zero_grad()
            found.append(accelerator.scaler_history.records[-1].first)
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
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in plain.modules())
    return seen, found


@MODES
@pytest.mark.parametrize("accumulation", [1, 3])
def test_parameters_buffers_and_random_state_are_put_back(
    mode: dict[str, Any], accumulation: int
) -> None:
    """Beside the same run without it: every number, bit for bit."""
    factors = (1.0, 1e9, 1.0, 1.0, 1e9, 1.0)
    plain, _ = train(factors, accumulation, find_overflow="off", **mode)
    again, found = train(factors, accumulation, find_overflow="replay", **mode)
    assert [each is not None for each in found] == [factor > 1 for factor in factors]
    for one, other in zip(again, plain, strict=True):
        assert_same(one, other)


def test_telemetry_is_as_without_it(tmp_path: Path) -> None:
    """But for the times, and for where it began."""

    def windows(**settings: Any) -> list[dict[str, Any]]:
        path = tmp_path / f"{settings['find_overflow']}.jsonl"
        train((1.0, 1e9, 1.0, 1e9), 2, telemetry=str(path), underflow_interval=1, **settings)
        lines = windows_of(path)
        for line in lines:
            line.pop("first", None)
            for name in [name for name in line if name == "time" or name.endswith("_us")]:
                del line[name]
        return lines

    assert windows(find_overflow="replay") == windows(find_overflow="off")


def batch(number: int, factor: float = 1.0) -> Tensor:
    """For a model from 8 numbers."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * factor


class Writes(nn.Module):
    """Its forward writes to parameters: a frozen one, and those that are trained."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
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
        out: Tensor = self.last(self.first(x + self.slow))
        return out


@pytest.mark.parametrize("how", ["data", "in place", "trained"])
def test_parameters_that_a_forward_writes_to_are_put_back(how: str) -> None:
    def run(find: str) -> Any:
        torch.manual_seed(0)
        plain = Writes(how)
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
