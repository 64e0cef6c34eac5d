"""Fused optimizers that others write: they receive what torch sets.

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

from accel_scaler import ScalerConfig, attach


class Fused(torch.optim.Optimizer):
    """SGD that unscales and skips by itself, by what it finds on itself."""

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
def test_it_receives_what_torch_sets(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
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
        received = prepared.optimizer.received
        return received, [p.detach() for p in net.parameters()]

    stock, expected = run(stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16")))
    accelerator = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode=mode)
    )
    ours, got = run(accelerator)
    assert ours == stock
    assert all(map(torch.equal, got, expected))
    assert ("Fused is stepped inside optimizer.step()" in caplog.text) == (mode == "overlap")
