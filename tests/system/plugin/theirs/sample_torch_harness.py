"""A test in torch's own harness, device by device; this file knows nothing of accel_scaler.

Not collected by itself. The harness needs ``expecttest``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_cuda import _create_scaling_case
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyNativeDeviceTypes,
)
from torch.testing._internal.common_utils import TestCase


class TestScaling(TestCase):
    @onlyNativeDeviceTypes
    @dtypes(torch.float32, torch.float64)
    def test_it_scales(self, device: str, dtype: torch.dtype) -> None:
        case = _create_scaling_case(device=device, dtype=torch.float)
        control, scaled, control_optimizer, optimizer, data, loss_fn, _ = case
        control, scaled = control.to(dtype), scaled.to(dtype)
        scaler = partial(torch.GradScaler, device=torch.device(device).type)(init_scale=128.0)
        for x, y in data:
            x, y = x.to(dtype), y.to(dtype)
            for net, its, by in (
                (control, control_optimizer, None),
                (scaled, optimizer, scaler),
            ):
                self.step(net, its, by, loss_fn(net(x), y))
        for a, b in zip(control.parameters(), scaled.parameters(), strict=True):
            self.assertEqual(a, b)

    def step(self, net: Any, optimizer: Any, scaler: Any, loss: Any) -> None:
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


instantiate_device_type_tests(TestScaling, globals())
