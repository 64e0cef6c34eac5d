"""A window that overflowed on a device: run again, and healed, beside the same run without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import DEVICE, synchronize
from support import reset
from torch import Tensor, nn

from accel_scaler import ScalerConfig, attach, detach

MODES = pytest.mark.parametrize(
    "mode",
    [
        {},
        {"step_mode": "overlap"},
        {"step_mode": "overlap", "offload": "cpu"},
        {"step_mode": "delayed"},
        {"step_mode": "delayed", "offload": "cpu"},
    ],
    ids=lambda mode: "-".join(mode.values()) or "sync",
)


class Loud(nn.Linear):
    """Beyond float16 for a large factor, and small again in float32."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e3 * self.factor) / (3e3 * self.factor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.sick, self.drop = nn.Linear(8, 64), Loud(64, 8), nn.Dropout(0.25)
        self.after = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.drop(self.sick(self.before(x))))
        return (out.float() - 1).square().mean() / 8


def train(loud: tuple[int, ...], skips_first: int = 0, **settings: Any) -> tuple[Any, Any]:
    """``loud``: windows that overflow in the forward, unless the module is in float32."""
    reset()
    accelerator: Any = Accelerator(mixed_precision="fp16")
    if DEVICE.partition(":")[0] != "cuda":  # Accelerate makes one for CUDA, which is not there
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
    attach(accelerator, ScalerConfig(init_scale=256.0, optimizer_threads=1, **settings))
    net = Net().to(DEVICE).half()  # autocast knows no simulated device
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(net, optimizer)
    assert next(net.parameters()).device.type == torch.device(DEVICE).type
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    for number in range(6):
        net.sick.factor = 1e3 if number in loud else 1.0
        accelerator.backward(model(torch.randn(4, 8, generator=generator).to(DEVICE).half()))
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
    state = {name: value.detach().cpu() for name, value in net.state_dict().items()}
    return state, records


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value.nan_to_num(9e9), other[name].nan_to_num(9e9)), name


@MODES
def test_a_replay_leaves_no_trace(mode: dict[str, Any]) -> None:
    plain, _ = train((2, 4), find_overflow="off", **mode)
    again, records = train((2, 4), find_overflow="replay", **mode)
    found = [None if r.first is None else r.first["module"] for r in records]
    assert found == [None, None, "sick", None, "sick", None]
    assert_equal(again, plain)


@MODES
def test_a_healed_run_is_the_one_that_has_it_in_its_settings(mode: dict[str, Any]) -> None:
    every = tuple(range(6))
    healed, records = train(every, heal=True, **mode)
    assert [r.healed for r in records] == [("sick",)] + [()] * 5
    assert [r.skipped for r in records] == [True] + [False] * 5
    named, _ = train(every, 1, fp32_modules=["sick"], **mode)
    assert_equal(healed, named)
