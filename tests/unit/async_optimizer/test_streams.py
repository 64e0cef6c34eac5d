"""Which devices have side streams, and what is pinned. Their order is shown in ``tests/gpu``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, UnsupportedError, devices
from accel_scaler.async_optimizer import streams as streams_module
from accel_scaler.async_optimizer.streams import SideStreams, packs
from accel_scaler.optimizer_step.stepper import async_stepper_of


def test_memory_of_sparse_gradients_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = mock.Mock(device=torch.device("cpu"))
    monkeypatch.setattr(streams_module, "streams_of", lambda _: backend)
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda t, _: recorded.append(t))
    sparse, dense = torch.eye(3).to_sparse(), torch.ones(2)
    streams = SideStreams(torch.device("cpu"))
    streams.keep([None, sparse, torch.ones(3, device="meta"), dense])
    kept = [t.untyped_storage().data_ptr() for t in recorded]
    parts = (sparse.indices(), sparse.values(), dense)
    assert kept == [t.untyped_storage().data_ptr() for t in parts]


def test_a_backend_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> Any:
        raise RuntimeError("Backend doesn't support create a new Stream.")

    monkeypatch.setattr(torch, "Stream", none)
    with pytest.raises(UnsupportedError, match=r"on xla:0, .*\(torch.Stream: Backend doesn't"):
        SideStreams(torch.device("xla:0"))
    assert devices.streams_of(torch.device("cpu")) is None


def test_streams_of_another_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(range(9))
    monkeypatch.setattr(torch, "Stream", lambda device: (device, next(made)))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(UnsupportedError, match=r"on cuda:0, .*torch.accelerator is xpu"):
        SideStreams(torch.device("cuda:0"))


def test_one_queue_keeps_the_order_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Apple's MPS, where torch makes the same stream again and again."""
    monkeypatch.setattr(torch, "Stream", lambda device: (device, 0))
    streams = SideStreams(torch.device("mps:0"))
    assert not streams.copies_beside
    assert not streams.is_host  # so that what is for host memory alone is not used there
    assert streams.record() is None
    (held,) = streams.host_like([torch.ones(3)])
    assert streams.down(torch.ones(3), held) is None
    assert held.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("mode", "offload"), [("overlap", "none"), ("delayed", "none"), ("sync", "cpu")]
)
def test_parameters_on_several_devices_are_refused(mode: str, offload: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"parameters are on cpu, meta; expected"):
        AsyncOptimizer(inner, model, mode=mode, offload=offload)
    assert not vars(inner).keys() & {"_opt_called"}
    assert async_stepper_of(inner) is None


def test_a_parameter_on_another_device_is_refused_when_it_comes() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AsyncOptimizer(inner, model)
    model(torch.ones(2)).sum().backward()
    before = weights(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    with pytest.raises(UnsupportedError, match="parameters are on cpu, meta; expected"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert all(p.grad is not None for p in model.parameters())
    del inner.param_groups[1]
    optimizer.step()
    optimizer.close()
    assert not torch.equal(weights(model), before)


@given(st.lists(st.integers(0, 1 << 20), max_size=40))
def test_few_buffers_hold_what_is_pinned_without_much_rounding(lengths: list[int]) -> None:
    """torch rounds each up to a power of two; one for all could be twice as large as needed."""
    found = packs(lengths)
    assert sorted(i for pack in found for i in pack) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in pack) for pack in found]
    sizes = [1 << (n - 1).bit_length() for n in sums if n]
    some = sorted(filter(None, lengths))
    if some:
        assert len(found) <= 2 + (sum(some) // some[0]).bit_length()
        assert sum(sizes) - sum(lengths) < some[-1] + sum(
            min(lengths[i] for i in pack) for pack in found
        )
