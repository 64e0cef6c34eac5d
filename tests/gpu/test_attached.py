"""Accelerate's loop on the device: an overflow run again, a healed run, reads between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import DEVICE, KIND, synchronize
from support import reset
from torch import Tensor, nn

from accel_scaler import ScalerConfig, attach, detach

each_mode = pytest.mark.parametrize(
    "mode",
    [
        {"step_mode": mode, "offload": offload}
        for mode in ("sync", "overlap", "delayed")
        for offload in ("none", "cpu")
        if (mode, offload) != ("sync", "cpu")
    ],
    ids=lambda mode: " ".join(mode.values()),
)
STEPS = 6


class Loud(nn.Linear):
    """Beyond float16 for a large factor, and small again in float32."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e3 * self.factor) / (3e3 * self.factor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.sick, self.drop = nn.Linear(8, 64), Loud(64, 8), nn.Dropout(0.25)
        self.after = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.drop(self.sick(self.before(x))))
        return (out.float() - 1) / 3


def prepared(net: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    reset()
    accelerator: Any = Accelerator(mixed_precision="fp16")
    if accelerator.device.type != KIND:
        pytest.skip(f"Accelerate takes {accelerator.device}")
    accelerator.scaler = torch.amp.GradScaler(KIND)  # of itself it makes one for CUDA alone
    attach(accelerator, ScalerConfig(init_scale=256.0, **settings))
    net = net.to(DEVICE).half()  # autocast knows no simulated device
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(net, optimizer)


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE).half()


def train(loud: tuple[int, ...], skips_first: int = 0, **settings: Any) -> tuple[Any, Any]:
    """``loud``: windows that overflow in the forward, unless the module is in float32."""
    torch.manual_seed(0)
    net = Net()
    accelerator, model, optimizer = prepared(net, **settings)
    torch.manual_seed(3)
    for number in range(STEPS):
        net.sick.factor = 1e3 if number in loud else 1.0
        accelerator.backward(model(batch_of(number)).square().mean())
        if number >= skips_first:
            optimizer.step()
        else:
            accelerator.scaler.abandon_window()
        optimizer.zero_grad()
    records = list(accelerator.scaler_history.records)
    optimizer.synchronize()
    accelerator.scaler.abandon_window()
    detach(accelerator)
    synchronize()
    return [value.detach().cpu().nan_to_num(9e9) for value in net.state_dict().values()], records


@each_mode
def test_a_replay_leaves_no_trace(mode: dict[str, Any]) -> None:
    plain, _ = train((2, 4), find_overflow="off", **mode)
    again, records = train((2, 4), find_overflow="replay", **mode)
    found = [None if r.first is None else r.first["module"] for r in records]
    assert found == [None, None, "sick", None, "sick", None]
    assert all(map(torch.equal, again, plain))


@each_mode
def test_a_healed_run_is_the_one_that_has_it_in_its_settings(mode: dict[str, Any]) -> None:
    every = tuple(range(STEPS))
    healed, records = train(every, heal=True, **mode)
    assert [r.healed for r in records] == [("sick",)] + [()] * 5
    assert [r.skipped for r in records] == [True] + [False] * 5
    named, _ = train(every, 1, fp32_modules=["sick"], **mode)
    assert all(map(torch.equal, healed, named))
