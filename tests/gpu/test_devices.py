"""Devices as users have them: a default one, a second one, shards, graphs, a backend's classes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    assert_same,
    fused_adamw,
    is_simulated,
    module,
    one_rank,
    sgd,
)
from device_training import MODES, STEPS, Training, run
from support import weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import UnsupportedError, devices

EVERY = [
    pytest.param({"offload": offload, **MODES[mode]}, id=f"{mode} {offload}")
    for mode, offload in product(MODES, ("none", "cpu"))
]


def plain(t: Training) -> None:
    for step in range(STEPS):
        t.backward(step)
        t.busy(t.work)
        t.optimizer.clip_grad_norm_(0.1)
        t.optimizer.step()
        t.optimizer.zero_grad()


@pytest.mark.parametrize("settings", EVERY)
def test_one_queue_gives_what_a_cpu_gives(settings: dict[str, Any]) -> None:
    """A CPU's numbers are compared with torch's elsewhere; one queue is the reference here."""
    # Real kernels round a float16 product otherwise, which AdamW makes a step of full length.
    low = {"dtype": torch.float16, "make": adamw}
    settings = settings | (low if is_simulated() else {"make": sgd})
    assert_same(run(plain, True, **settings), run(plain, True, device="cpu", **settings))


@pytest.mark.parametrize("settings", EVERY)
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("is_global", [False, True], ids=["with", "set_default_device"])
def test_a_default_device(settings: dict[str, Any], make: Any, is_global: bool) -> None:
    """Everything under a default device, as notebooks set it."""
    expected = run(plain, True, make=make, **settings)
    if is_global:
        torch.set_default_device(DEVICE)
    try:
        with nullcontext() if is_global else torch.device(DEVICE):
            found = run(plain, False, make=make, **settings)
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
        t.busy(t.work)  # the gather has to wait
        t.optimizer.step()
        if t.settings["mode"] == "sync" and t.device != "cpu":
            # FSDP2 gives gradients memory of a stream of its own, with or without us, and has
            # that one wait before it uses the memory again; a checker does not know.
            torch.accelerator.synchronize()
        t.optimizer.zero_grad()


@pytest.mark.usefixtures("group", "one_part_each")
@pytest.mark.parametrize("settings", EVERY)
@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_shards_of_one_rank(settings: dict[str, Any], make: Any) -> None:
    """FSDP2 gathers on streams of its own: they wait for the training stream at the root only."""
    settings = settings | {"make": make, "shard": shard, "sharded": True}
    assert_same(run(sharded, False, **settings), run(sharded, True, device="cpu", **settings))


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("settings", EVERY)
def test_a_model_on_another_than_the_present_device(settings: dict[str, Any]) -> None:
    """``cuda:1`` while ``cuda:0`` is the current one, as a process that uses two has it."""
    before = torch.accelerator.current_stream()
    expected = run(plain, True, device="cpu", **settings)
    assert_same(run(plain, False, device=f"{KIND}:1", **settings), expected)
    assert torch.accelerator.current_stream() == before


@contextmanager
def capturing() -> Iterator[None]:
    """As within a graph's capture, but that nothing is captured."""
    answers: dict[str, Any] = dict.fromkeys(
        ("is_initialized", "is_current_stream_capturing"), lambda: True
    )
    with mock.patch.multiple(module(), create=True, **answers):
        yield


@pytest.mark.usefixtures("side_streams")
def test_a_step_is_refused_while_a_graph_is_captured() -> None:
    t = Training(False, scaled=False, **MODES["overlap"])
    t.backward(0)
    before, grads = weights(t.model), [p.grad for p in t.params]
    with capturing():
        for call in (t.optimizer.step, lambda: t.optimizer.submit(t.optimizer.step)):
            with pytest.raises(UnsupportedError, match="a graph is being captured"):
                call()
    assert torch.equal(weights(t.model), before)
    assert all(map(operator.is_, grads, (p.grad for p in t.params)))
    t.optimizer.step()
    t.optimizer.synchronize()
    assert not torch.equal(weights(t.model), before)
    t.finish()


@pytest.mark.usefixtures("side_streams")
def test_a_graph_captured_behind_a_fence_has_the_newest() -> None:
    t = Training(False, scaled=False, **MODES["preview"])
    t.train(0, 1, 2)
    t.optimizer.synchronize()
    exact = weights(t.model)
    with capturing():
        t.forward()
    assert torch.equal(weights(t.model), exact)
    t.finish()


@pytest.mark.usefixtures("side_streams")
@pytest.mark.skipif(KIND == "cuda", reason="its Event, which lets the host sleep, asks torch.cuda")
def test_streams_need_nothing_but_torchs_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's module may have no Stream and no Event."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked of the backend's module")

    names = ["Stream", "current_stream", "stream", "set_stream", "device", "current_device"]
    for name in [*names, "Event"]:
        monkeypatch.setattr(module(), name, refused, raising=False)
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
