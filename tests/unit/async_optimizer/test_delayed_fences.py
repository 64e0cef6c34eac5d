"""What ``delayed`` shows of a late update, where random histories have found it wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from references import assert_same_run, network, run_ours, run_reference

from accel_scaler import AsyncOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

SCALE = 2.0**16


def test_a_float16_model_has_the_share_of_a_gradient_under_a_large_scale() -> None:
    """0.01 / 65536 is next to nothing in float16, in which torch takes the rate of an addition."""
    model = network(torch.float16)
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    with AsyncOptimizer(inner, model, scaler=scaler, mode="delayed") as optimizer:
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.ones(4, 8).half()).float().square().mean() / 64.0).backward()
        grads = [p.grad.float() / SCALE for p in model.parameters() if p.grad is not None]
        optimizer.step()
        shown = [p.detach() + 0 for p in model.parameters()]
    for now, old, grad in zip(shown, before, grads, strict=True):
        assert torch.equal(now, (old.float() - 1e-2 * grad).half())
    assert any(not torch.equal(now, old) for now, old in zip(shown, before, strict=True))


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_limit_past_float16_limits_nothing(offload: str) -> None:
    make = partial(network, torch.float16)
    settings = {"make": make, "compensation": "preview", "scale": 2.0 * SCALE, "overflows": ()}
    ours = run_ours("adamw", offload=offload, **settings)
    assert_same_run(ours, run_reference("adamw", 0, **settings))
