"""Parameters that are read on a device between a step and the next training forward, also on
another stream, as a sampler's weights are sent: the newest in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import current_stream, on
from support import mlp, reset
from torch import Tensor

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.gpu

STEPS = 5


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    reset()
    mode, offload = request.param
    config = ScalerConfig(step_mode=mode, offload=offload, init_scale=1024.0, growth_interval=100)
    plain = Accelerator(mixed_precision="fp16")
    plain.scaler = torch.amp.GradScaler(plain.device.type, init_scale=1024.0)
    attached = attach(plain, config)
    yield attached
    detach(attached)


@pytest.mark.parametrize("is_aside", [False, True])
@pytest.mark.parametrize(
    "accelerator",
    [(mode, offload) for mode in ("sync", "overlap", "delayed") for offload in ("none", "cpu")],
    indirect=True,
)
def test_what_is_sent_is_the_newest(accelerator: Any, is_aside: bool) -> None:
    model = mlp(256).half().to(accelerator.device)  # a simulated one gets other parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    device = accelerator.device
    stream = torch.Stream(device) if is_aside else None
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).half().to(device)
        accelerator.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        sent: list[Tensor]
        if stream is None:
            sent = [p.data.clone() for p in model.parameters()]
        else:
            stream.wait_stream(current_stream())  # as torch asks of whoever uses another one
            with on(stream):
                sent = [p.data.clone() for p in model.parameters()]
            stream.synchronize()
        assert not accelerator.optimizer_step_was_skipped
        state = optimizer.state_dict()["state"]
        for number, value in enumerate(sent):
            assert torch.equal(value.cpu(), state[number]["master"].half().cpu()), (step, number)
