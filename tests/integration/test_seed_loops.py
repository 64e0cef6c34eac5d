"""Training loops as tutorials write them, each beside a reference that must agree bit for bit.

The reference is the same loop under torch's scaler, or, where torch has no such method, the loop in
float32 without a scaler: scales are powers of two and the batches finite, so both are exact. Any
order of calls on the scaler: the random histories.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from boundary_support import ours
from support import mlp, stock_fp16_on_cpu, weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from accel_scaler import GradScaler, ScalerConfig, attach

pytestmark = pytest.mark.usefixtures("one_thread")

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


def typical(scaler: Any, net: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    scales = []
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(mse_loss(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


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

    expected, _ = run(torch.amp.GradScaler("cpu", init_scale=1024.0), penalised, batches(6))
    found, _ = run(GradScaler("cpu", init_scale=1024.0), penalised, batches(6))
    without, _ = run(GradScaler("cpu", init_scale=1024.0), typical, batches(6))
    assert torch.equal(found, expected)
    assert not torch.equal(found, without)


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


def test_the_loop_that_asks_for_the_overflow() -> None:
    overflowing = (0, 3, 4)
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


def test_the_step_on_another_thread() -> None:
    data = batches(9, overflowing=(0, 2, 3, 4))
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


@pytest.mark.parametrize("on_overflow", ["skip", "retry"])
def test_scaling_disabled_is_plain_autocast(on_overflow: Any) -> None:
    """``enabled=False``: no scale, every step is taken, clip clips."""
    config = ScalerConfig(enabled=False, on_overflow=on_overflow)
    accelerator = ours(config, gradient_accumulation_steps=2)
    plain, reference = mlp(), mlp()
    model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.5))
    torchs = SGD(reference.parameters(), lr=0.5)
    for number, (x, y) in enumerate(batches(4)):
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            mine = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = reference(x)
        ((out.float() - y).square().mean() / 2).backward()
        if number % 2:
            assert mine == nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torchs.step()
            torchs.zero_grad()
    assert torch.equal(weights(plain), weights(reference))
    assert accelerator.scaler.get_scale() == 1.0


class OwnFused(torch.optim.Optimizer):
    """SGD that unscales and skips by itself, by what torch sets on it for the time of its step."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.received: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found: Tensor = self.found_inf
        self.received.append((found.item(), found.dtype, found.shape, found.device))
        scale: Tensor | None = self.grad_scale
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not found.item():
                p.add_(p.grad * factor, alpha=-0.1)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_an_optimizer_that_unscales_by_itself_receives_what_torch_sets(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def run(accelerator: Any) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(1)
        net = mlp()
        model, prepared = accelerator.prepare(net, OwnFused(net.parameters()))
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            prepared.step()
            prepared.zero_grad()
        if hasattr(prepared, "synchronize"):
            prepared.synchronize()
        return prepared.optimizer.received, [p.detach() for p in net.parameters()]

    stock, expected = run(stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16")))
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode=mode)
    )
    ours, got = run(accelerator)
    assert ours == stock
    assert all(map(torch.equal, got, expected))
    assert ("OwnFused is stepped inside" in caplog.text) == (mode == "overlap")
