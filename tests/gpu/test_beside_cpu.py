"""Runs on the device beside the same on a CPU: ``submit``, the default device, shards, failures.

On a simulated device numbers are the CPU's, bit for bit; elsewhere within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    assert_same,
    fused_adamw,
    on,
    one_rank,
    sgd,
    sleep,
    synchronize,
)
from support import mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import AsyncOptimizer, GradScaler, UnsupportedError, devices

pytestmark = pytest.mark.usefixtures("one_part_each")

MODES = ["sync", "overlap", "delayed"]
STEPS, OVERFLOW = 8, 4
Make = Callable[[Any], Any]


def batch(step: int, where: str, half: bool = False) -> Tensor:
    x = torch.randn(16, 8, device="cpu", generator=torch.Generator().manual_seed(step))
    return x.to(where, torch.float16 if half else torch.float32)


def state_of(optimizer: Any) -> list[Tensor]:
    entries = optimizer.state_dict()["state"].values()
    return [v.clone() for entry in entries for v in entry.values() if isinstance(v, Tensor)]


def trained(
    where: str,
    mode: str,
    offload: str,
    make: Make,
    *,
    half: bool = False,
    scaled: bool = True,
    clipped: bool = True,
    submits: bool = False,
    shards: bool = False,
) -> list[Tensor]:
    """Losses, state and parameters of some steps, one of which overflows."""
    model: Any = mlp(64).to(where, torch.float16 if half else torch.float32)
    kind = torch.device(where).type
    for layer in (model[0], model[2], model) if shards else ():
        fully_shard(layer, mesh=init_device_mesh(kind, (1,)))
    scaler = GradScaler(kind, init_scale=1024.0, growth_interval=2) if scaled else None
    seen: list[Tensor] = []
    with AsyncOptimizer(
        make(model.parameters()),
        model,
        scaler=scaler,
        mode=mode,
        offload=offload,
        sharded=shards,
    ) as optimizer:

        def job() -> None:
            if scaler is None:
                optimizer.step()
                return
            scaler.unscale_(optimizer)
            if clipped:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(params, 0.1)
            scaler.step(optimizer)

        for step in range(STEPS):
            loss = model(batch(step, where, half)).float().square().mean()
            seen.append(loss.detach())
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss * float("inf") if step == OVERFLOW else loss).backward()
            if submits:
                optimizer.submit(job)
                if scaler is not None:
                    scaler.update()
            else:
                if clipped:
                    optimizer.clip_grad_norm_(0.1)
                streams = optimizer._stepper.streams
                if shards and streams.copies_beside:
                    with on(streams._work):  # the update starts late, the gather has to wait
                        sleep()
                optimizer.step()
            if shards and mode == "sync" and where != "cpu":
                # FSDP2 gives gradients memory of a stream of its own, with or without us, and has
                # that one wait before it uses the memory again; a checker does not know.
                synchronize()
            optimizer.zero_grad()
        seen += [] if shards else state_of(optimizer)
    whole = [p.full_tensor() if shards else p for p in model.parameters()]
    return [t.detach().cpu() for t in (*seen, *whole)]


@pytest.mark.parametrize(
    ("scaled", "clipped"), [(False, False), (True, False), (True, True)],
    ids=["unscaled", "scaled", "clipped"],
)  # fmt: skip
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_submit(
    mode: str, offload: str, make: Make, half: bool, scaled: bool, clipped: bool
) -> None:
    """The user's step function on the optimizer thread, with the scaler's own calls in it."""
    how: Any = mode, offload, make
    more: Any = {"half": half, "scaled": scaled, "clipped": clipped, "submits": True}
    assert_same(trained(DEVICE, *how, **more), trained("cpu", *how, **more))


@pytest.mark.parametrize("set_for_good", [False, True], ids=["with", "set_default_device"])
@pytest.mark.parametrize("make", [sgd, adamw, fused_adamw])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_a_default_device(mode: str, offload: str, make: Make, set_for_good: bool) -> None:
    """Everything under a default device, as notebooks set it."""
    expected = trained("cpu", mode, offload, make)
    if set_for_good:
        torch.set_default_device(DEVICE)
    try:
        with nullcontext() if set_for_good else torch.device(DEVICE):
            found = trained(DEVICE, mode, offload, make)
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


@pytest.fixture
def group() -> Any:
    one_rank()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_shards_of_one_rank(mode: str, offload: str, make: Make) -> None:
    """FSDP2, which gathers on streams of its own: they wait for the training stream at the root
    only."""
    how: Any = mode, offload, make
    assert_same(trained(DEVICE, *how, shards=True), trained("cpu", *how, shards=True))


# What cannot be right


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_on_another_than_the_present_device(mode: str, offload: str) -> None:
    """``cuda:1`` while ``cuda:0`` is the current one, as a process that uses two has it."""
    before = torch.accelerator.current_stream()
    expected = trained("cpu", mode, offload, sgd)
    assert_same(trained(f"{KIND}:1", mode, offload, sgd), expected)
    assert torch.accelerator.current_stream() == before


@pytest.mark.skipif(KIND != "cuda", reason="the one backend with graphs that capture a stream")
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_real_capture_is_refused(mode: str) -> None:
    model = mlp(64).to(DEVICE)
    with AsyncOptimizer(sgd(model.parameters()), model, mode=mode) as optimizer:
        for _ in range(2):
            model(batch(0, DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        x = batch(0, DEVICE)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x).square().mean().backward()
            with pytest.raises(UnsupportedError, match="a graph is being captured"):
                optimizer.step()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.usefixtures("side_streams")
def test_streams_need_nothing_but_torchs_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's module may have no Stream and no Event."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked of the backend's module")

    module = torch.get_device_module(KIND)
    for name in ("Stream", "current_stream", "stream", "set_stream", "device", "current_device"):
        monkeypatch.setattr(module, name, refused, raising=False)
    if KIND != "cuda":  # whose own class lets the host sleep while it waits
        monkeypatch.setattr(module, "Event", refused, raising=False)
    streams = devices.streams_of(torch.device(DEVICE))
    assert streams is not None
    side, home = streams.new(), streams.current()
    assert side != home
    with streams.on(side):
        assert streams.current() == side
        x = torch.ones(3, device=DEVICE) + 1
        done = streams.event()
        done.record()
    assert streams.current() == home
    done.wait()
    done.synchronize()
    assert x.tolist() == [2.0, 2.0, 2.0]


def masters_followed(where: str, mode: str, offload: str) -> list[Tensor]:
    """float16 weights, two of them in one memory; one is frozen in turns, one written past
    autograd."""
    model = mlp(64).to(where, torch.float16)
    model.other = nn.Linear(8, 64, bias=False, device=where, dtype=torch.float16)
    nn.init.constant_(model.other.weight, 0.1)
    if mode != "delayed":
        model.other.weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    with AsyncOptimizer(optimizer, model, mode=mode, offload=offload) as ours:
        for step in range(STEPS):
            model[2].weight.requires_grad_(step % 2 == 0)
            if step == 3 and mode != "delayed":
                model[0].weight.data[::2].clamp_(-0.1, 0.1)
            hidden = model[0](batch(step, where, half=True)) + model.other.weight.sum(1)
            model[2](hidden).float().square().mean().backward()
            ours.step()
            ours.zero_grad()
        seen = state_of(ours)
    return [t.detach().cpu() for t in (*seen, *model.parameters())]


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_masters_follow_their_memory(mode: str, offload: str) -> None:
    assert_same(masters_followed(DEVICE, mode, offload), masters_followed("cpu", mode, offload))
