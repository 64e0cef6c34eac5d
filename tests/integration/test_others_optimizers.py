"""Fused optimizers that others write: what torch tells them, they are told here, too.

torch sets ``grad_scale`` and ``found_inf`` on an optimizer with ``_step_supports_amp_scaling`` for
the time of its step, as tensors; torch's own test of it is ``test_grad_scaler_pass_itself``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import mlp, stock_fp16_on_cpu
from torch import Tensor

from accel_scaler import GradScaler, ScalerConfig, attach


class Fused(torch.optim.Optimizer):
    """SGD that unscales and skips by itself, by what it finds on itself."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.told: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found: Tensor = self.found_inf
        self.told.append((found.item(), found.dtype, found.shape, found.device))
        scale: Tensor | None = self.grad_scale
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and not found.item():
                p.add_(p.grad * factor, alpha=-0.1)


def trained(scaler: Any, unscales: bool) -> tuple[Fused, list[Tensor]]:
    torch.manual_seed(1)
    net = mlp()
    optimizer = Fused(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(4, 8)).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return optimizer, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("unscales", [False, True])
def test_a_fused_optimizer_of_another_is_told_what_torch_tells_it(unscales: bool) -> None:
    stock, expected = trained(torch.amp.GradScaler("cpu", init_scale=8.0), unscales)
    ours, got = trained(GradScaler("cpu", init_scale=8.0), unscales)
    assert ours.told == stock.told
    assert len(ours.told) == 3
    assert all(map(torch.equal, got, expected))
    assert not hasattr(ours, "found_inf")


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_it_is_told_the_same_under_accelerate(mode: Any) -> None:
    def run(accelerator: Any) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(1)
        net = mlp()
        model, prepared = accelerator.prepare(net, Fused(net.parameters()))
        for _ in range(3):
            accelerator.backward(model(torch.randn(4, 8)).square().mean())
            prepared.step()
            prepared.zero_grad()
        attached = hasattr(prepared, "synchronize")
        if attached:
            prepared.synchronize()
        told = prepared.optimizer.told
        return told, [p.detach() for p in net.parameters()]

    stock, expected = run(stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16")))
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode=mode)
    )
    ours, got = run(accelerator)
    assert ours == stock
    assert all(map(torch.equal, got, expected))
