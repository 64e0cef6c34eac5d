"""Devices as users have them: a default one, a second one, shards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerators import DEVICE, KIND, adamw, assert_same, fused_adamw, one_rank, sgd
from device_training import STEPS, Training, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import GradScaler

each_offload = pytest.mark.parametrize("offload", ["none", "cpu"])


def plain(t: Training) -> None:
    t.train(*range(STEPS))


@each_offload
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("is_global", [False, True], ids=["with", "set_default_device"])
def test_a_default_device(offload: str, make: Any, is_global: bool) -> None:
    """Everything under a default device, as notebooks set it."""
    expected = run(plain, make=make, offload=offload)
    if is_global:
        torch.set_default_device(DEVICE)
    try:
        with nullcontext() if is_global else torch.device(DEVICE):
            found = run(plain, make=make, offload=offload)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


@pytest.fixture
def group() -> Any:
    one_rank()
    yield
    dist.destroy_process_group()


def shard(model: Any) -> None:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for layer in (*model.layers[::2], model):
        fully_shard(layer, mesh=mesh)


def sharded(t: Training) -> None:
    for step in range(STEPS):
        t.backward(step)
        t.optimizer.clip_grad_norm_(0.1)
        t.optimizer.step()
        if t.device != "cpu":
            # FSDP2 gives gradients memory of a stream of its own, with or without us, and has
            # that one wait before it uses the memory again; a checker does not know.
            torch.accelerator.synchronize()
        t.optimizer.zero_grad()


@pytest.mark.usefixtures("group")
@each_offload
@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_shards_of_one_rank(offload: str, make: Any) -> None:
    """FSDP2 gathers on streams of its own: they wait for the training stream at the root only."""
    settings: dict[str, Any] = {"make": make, "shard": shard, "sharded": True}
    found = run(sharded, offload=offload, **settings)
    assert_same(found, run(sharded, device="cpu", **settings))


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@each_offload
def test_a_model_on_another_than_the_present_device(offload: str) -> None:
    """``cuda:1`` while ``cuda:0`` is the current one, as a process that uses two has it."""
    before = torch.accelerator.current_stream()
    found = run(plain, device=f"{KIND}:1", offload=offload, make=adamw)
    assert_same(found, run(plain, device="cpu", make=adamw))
    assert torch.accelerator.current_stream() == before


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
def test_an_overflow_on_two_devices_is_one() -> None:
    """F8: kernels that are given 2.0, the sum of both, would step."""
    params = [torch.nn.Parameter(torch.ones(4, device=f"{KIND}:{i}")) for i in range(2)]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    scaler = GradScaler(KIND, init_scale=16.0)
    kept = []
    for factor in (1.0, float("inf"), 1.0):
        losses = [(p * factor).sum() for p in params]
        torch.autograd.backward(scaler.scale(losses))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps = [float(optimizer.state[p]["step"]) for p in params]
        kept.append(([p.tolist() for p in params], steps, scaler.get_scale()))
    assert kept[1] == (kept[0][0], [1.0, 1.0], 8.0)
    assert kept[2][1:] == ([2.0, 2.0], 8.0)
    assert kept[2][0] != kept[1][0]
