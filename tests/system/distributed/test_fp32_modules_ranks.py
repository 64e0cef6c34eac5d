"""``fp32_modules`` on two gloo ranks, beside models that are written so by hand, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from async_support import lazy
from children import on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from versions import before_torch

from accel_scaler import AsyncOptimizer, ScalerConfig, UnsupportedError, attach, detach
from accel_scaler.overflow.fp32_modules import Fp32Module
from accel_scaler.overflow.module_names import modules_by_name

WIDTH = 8


class Layer(nn.Linear):
    """By hand: as if it ran in float32."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())


class Mlp(nn.Module):
    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.float() if self.by_hand else x
        x = torch.relu(self.wi(x)) * 3
        x = self.wo(x)
        is_half = self.by_hand and given is torch.float16
        return x.half() if is_half and not torch.is_autocast_enabled("cpu") else x


class Net(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(Mlp() for _ in range(3))
        for each in self.h[1].modules() if by_hand else ():
            each.by_hand = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for each in self.h:
            x = x + each(x)
        return x


LAYOUTS: dict[str, Callable[[Net], list[nn.Module]]] = {
    "the root alone": lambda model: [],
    "the module": lambda model: list(model.h),
    "within the module": lambda model: [model.h[1].wi],
}


def sharded(model: Net, layout: str, reshard: bool) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for each in (*LAYOUTS[layout](model), model):
        fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: Any, mode: Any = None) -> list[Tensor]:
    """``mode``: of the optimizer thread; None: torch steps."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 / 256, momentum=0.9)
    if mode is not None:
        optimizer = AsyncOptimizer(optimizer, model, step_mode=mode)
    seen = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        out = model(torch.randn(4, WIDTH))
        (out.float().square().mean() * 256).backward()
        seen.append(local(out))
        optimizer.step()
        optimizer.zero_grad()
    if mode is not None:
        optimizer.close()
    return [*seen, *map(local, model.parameters())]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    assert [t.dtype for t in one] == [t.dtype for t in other]
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fsdp2_with_float16_parameters(layout: str, tmp_path: Path) -> None:
    """Also with the optimizer thread, which updates when somebody waits for it."""

    def body() -> None:
        if layout == "within the module":
            with pytest.raises(UnsupportedError, match=r"'h\.1\.wi' .* is sharded by itself"):
                Fp32Module(sharded(Net(False), layout, True).h[1], "h.1")
            return
        for reshard, mode in ((True, None), (False, None), (True, "overlap")):
            by_hand = trained(sharded(Net(True), layout, reshard))
            plain = trained(sharded(Net(False), layout, reshard))
            assert not equal(plain, by_hand), "float16 would have passed"
            model = sharded(Net(False), layout, reshard)
            fp32 = Fp32Module(model.h[1], "h.1")
            fp32.enable()
            with lazy() if mode else nullcontext():
                assert equal(trained(model, mode), by_hand), reshard
            fp32.disable()
            assert not any("forward" in vars(each) for each in model.modules())

    on_two_ranks(body, tmp_path)


@pytest.mark.parametrize("half", [False, True])
def test_ddp_through_accelerate(half: bool, tmp_path: Path) -> None:
    def run(by_hand: bool, *globs: str, **values: Any) -> list[Tensor]:
        settings = ScalerConfig(init_scale=256.0, fp32_modules=globs, **values)
        accelerator: Any = attach(Accelerator(mixed_precision="fp16"), settings)
        model = Net(by_hand).half() if half else Net(by_hand)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(prepared, nn.parallel.DistributedDataParallel)
        seen = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            with accelerator.accumulate(prepared):
                out = prepared(torch.randn(4, WIDTH).to(model.inp.weight.dtype))
                accelerator.backward(out.square().mean())
                optimizer.step()
                optimizer.zero_grad()
            seen.append(out.detach().clone())
        changed = [name for name in modules_by_name(model) if name]
        changed = [name for name in changed if "forward" in vars(model.get_submodule(name))]
        assert changed[:1] == list(globs)  # and of float16 parameters those in it
        detach(accelerator)
        assert not any("forward" in vars(each) for each in model.modules())
        return [*seen, *(p.detach().clone() for p in model.parameters())]

    def body() -> None:
        by_hand = run(True)
        assert not equal(run(False), by_hand), "float16 would have passed"
        for mode in ("sync", "overlap"):
            assert equal(run(False, "h.1", step_mode=mode), by_hand)

    on_two_ranks(body, tmp_path)
