"""bfloat16 parameters, where the check of torch takes none, as on CUDA: in place as in torch.

With float32 masters: the random histories.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    OPTIMIZERS,
    loss_of,
    network,
    no_bfloat16_in_torchs_kernel,
)
from support import same
from torch import nn

from accel_scaler import AsyncOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")


def brain() -> nn.Module:
    return network(torch.bfloat16)


def plain_loop(kind: str, clip: bool, kind_of_scaler: Any = torch.amp.GradScaler) -> dict[str, Any]:
    model = brain()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = kind_of_scaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    for step in range(12):
        scaler.scale(loss_of(model, step, step in (0, 5))).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "params": [p.detach() for p in model.parameters()],
        "state": list(optimizer.state_dict()["state"].values()),
    }


def asynchronous_loop(kind: str, clip: bool, mode: Any) -> dict[str, Any]:
    model = brain()
    inner = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    settings: Any = {"step_mode": mode, "master_weights": "none"}
    with AsyncOptimizer(inner, model, scaler=scaler, **settings) as optimizer:
        for step in range(12):
            scaler.scale(loss_of(model, step, step in (0, 5))).backward()
            if clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = list(optimizer.state_dict()["state"].values())
    return {"params": [p.detach() for p in model.parameters()], "state": state}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_in_place_they_train_as_in_torch(kind: str, clip: bool) -> None:
    expected = plain_loop(kind, clip)
    with no_bfloat16_in_torchs_kernel():
        assert same(plain_loop(kind, clip, GradScaler), expected)
        for mode in ("sync", "overlap"):
            assert same(asynchronous_loop(kind, clip, mode), expected)
