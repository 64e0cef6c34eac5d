"""``offload="cpu"``: the same numbers from host memory, state that interchanges with torch's."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from references import OPTIMIZERS, loss_of, network, same
from support import mlp
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.master_params import MasterRule
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams
from accel_scaler.optimizer_step import async_stepper_of

HALF = torch.float16
CPU = torch.device("cpu")
MODES = ("sync", "overlap", "delayed")
STEPS = 10


pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")


def params_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Without scaling: any optimizer, ours or torch's."""
    for step in range(first, last):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def stock_run(kind: str, steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 0, steps)
    return model, optimizer


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_state_dicts_interchange_with_torch_both_ways(mode: str, offload: str) -> None:
    """Ours for 4 steps, torch's for 3, ours again for 3: the ten steps of torch's alone.

    ``delayed`` warms up all the while, since torch has no delay to compare with.
    """
    for kind in OPTIMIZERS:
        expected, _ = stock_run(kind)
        model = network()
        settings: dict[str, Any] = {"mode": mode, "offload": offload, "delay_warmup_steps": STEPS}
        inner = OPTIMIZERS[kind](model.parameters())
        with AsyncOptimizer(inner, model, **settings) as optimizer:
            train(model, optimizer, 0, 4)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = network()
        plain = OPTIMIZERS[kind](model.parameters())
        model.load_state_dict(saved[0])
        plain.load_state_dict(saved[1])
        train(model, plain, 4, 7)
        saved = copy.deepcopy((model.state_dict(), plain.state_dict()))
        model = network()
        inner = OPTIMIZERS[kind](model.parameters())
        with AsyncOptimizer(inner, model, **settings) as optimizer:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, 7, STEPS)
            optimizer.synchronize()
        assert same(params_of(model), params_of(expected)), kind


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_close_gives_the_state_back_in_the_parameters_dtype(dtype: torch.dtype, mode: str) -> None:
    """And frees the masters, though the optimizer that is closed is kept."""
    model = network(dtype)
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = AsyncOptimizer(inner, model, mode=mode, offload="cpu")
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    stepper: Any = async_stepper_of(inner)
    masters = [weakref.ref(pair.stepped) for pair in stepper.replica.pairs]
    optimizer.close()
    assert [ref() for ref in masters] == [None] * len(masters) != []
    for i, p in enumerate(model.parameters()):
        entry = inner.state[p]
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
        assert entry["step"].dtype is torch.float32
        for key in ("exp_avg", "exp_avg_sq"):
            assert entry[key].dtype is dtype
            assert entry[key].device == p.device
            assert torch.equal(entry[key], saved["state"][i][key].to(dtype))
        assert type(p) is nn.Parameter
        assert not p._post_accumulate_grad_hooks
    train(model, inner, 3, 4)  # torch goes on from there


# master_params.py, replica.py, streams.py alone.


def test_host_like_keeps_shapes_and_strides_in_one_buffer_a_dtype() -> None:
    sources = [
        torch.randn(5, 3).t(),
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(7)[::2],
        torch.randn(4).half(),
        torch.randn(()),
        torch.randn(0, 2),
    ]
    streams = SideStreams(CPU)
    hosts = streams.host_like(sources)
    for source, host in zip(sources, hosts, strict=True):
        assert host.shape == source.shape
        assert host.stride() == source.stride()
        assert host.dtype is source.dtype
        streams.down(source, host)
    for source, host in zip(sources, hosts, strict=True):
        assert torch.equal(host, source)  # none overwrites another
    full = [h for h in hosts if h.dtype is torch.float32 and h.numel()]
    assert len({h.untyped_storage().data_ptr() for h in full}) == 1


def make_replica(optimizer: torch.optim.Optimizer) -> Replica:
    replica = Replica(
        optimizer, SideStreams(CPU), offload=False, masters=MasterRule.of(ScalerConfig())
    )
    replica.follow()
    return replica


def test_parts_cover_each_parameter_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "SMALLEST_PART", 6)
    sizes = (4, 4, 1, 9, 2)
    params = [nn.Parameter(torch.ones(n)) for n in sizes]
    optimizer = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:], "lr": 1.0}])
    replica = make_replica(optimizer)
    assert [[pair.param.numel() for pair in part.pairs] for part in replica.parts] == [
        [4, 4],
        [1, 9],
        [2],
    ]
    assert [(part.start, part.end) for part in replica.parts] == [(0, 2), (2, 4), (4, 5)]
    assert [part.groups for part in replica.parts] == [{0: [0, 1]}, {0: [0], 1: [1]}, {1: [0]}]
    replica.order_by([params[4], params[0]])
    assert [pair.param.numel() for pair in replica.ordered] == [2, 4, 4, 1, 9]
    assert all(
        a is b for a, b in zip(replica.params, [params[i] for i in (4, 0, 1, 2, 3)], strict=True)
    )
    assert not replica.follow()  # nothing changed: the order stays
    assert [pair.param.numel() for pair in replica.ordered] == [2, 4, 4, 1, 9]


def test_the_norm_of_no_gradients_is_a_number() -> None:
    model = nn.Linear(2, 2)
    scaler = GradScaler("cpu")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.device("meta"), AsyncOptimizer(inner, model, scaler=scaler) as optimizer:
        assert float(optimizer.clip_grad_norm_(1.0)) == 0.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_slow_loop_of_an_optimizer_in_host_memory_is_warned_of(
    offload: str, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    plain = torch.optim.AdamW(model.parameters(), fused=fused)
    with AsyncOptimizer(plain, model, offload=offload):
        warned = [record for record in caplog.records if "fused=True" in record.message]
    assert len(warned) == (offload == "cpu" and not fused)
