"""``offload="cpu"``: the same numbers from host memory, state that interchanges with torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from references import OPTIMIZERS, loss_of, network, same
from torch import Tensor, nn

from accel_scaler import (
    AsyncOptimizer,
    GradScaler,
    ScalerConfig,
)
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.master_params import make_pairs
from accel_scaler.async_optimizer.master_rule import MasterRule
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams

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


def save_half(steps: int, kind: str = "sgd", **settings: Any) -> tuple[Any, Any]:
    model = network(HALF)
    with AsyncOptimizer(OPTIMIZERS[kind](model.parameters()), model, **settings) as optimizer:
        train(model, optimizer, 0, steps)
        return copy.deepcopy((optimizer.state_dict(), model.state_dict()))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("mode", "offload"), [("sync", "none"), ("delayed", "none"), ("overlap", "cpu")]
)
def test_float16_resumes_bit_for_bit_whichever_is_loaded_first(
    mode: str, offload: str, first: str
) -> None:
    settings: dict[str, Any] = {"mode": mode, "offload": offload}
    model = network(HALF)
    with AsyncOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, **settings) as optimizer:
        train(model, optimizer, 0, 4)
        saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        train(model, optimizer, 4, 8)
        expected = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    model = network(HALF)
    with AsyncOptimizer(OPTIMIZERS["adamw"](model.parameters()), model, **settings) as optimizer:
        if first == "model":
            model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
        if first == "optimizer":
            model.load_state_dict(saved[1])
        train(model, optimizer, 4, 8)
        assert same(optimizer.state_dict(), expected[0])
        assert same(model.state_dict(), expected[1])


def test_torch_loads_our_float16_state() -> None:
    """It knows no masters, casts all to float16, and steps on."""
    saved, weights = save_half(3)
    model = network(HALF)
    plain = OPTIMIZERS["sgd"](model.parameters())
    plain.load_state_dict(saved)
    model.load_state_dict(weights)
    for i, p in enumerate(model.parameters()):
        assert torch.equal(plain.state[p]["master"], p)
        assert torch.equal(
            plain.state[p]["momentum_buffer"], saved["state"][i]["momentum_buffer"].half()
        )
    train(model, plain, 3, 4)


def test_we_load_torch_s_float16_state() -> None:
    """State becomes float32, masters start from the parameters."""
    model = network(HALF)
    plain = OPTIMIZERS["sgd"](model.parameters())
    train(model, plain, 0, 3)
    saved = copy.deepcopy(plain.state_dict())
    with AsyncOptimizer(OPTIMIZERS["sgd"](model.parameters()), model, offload="cpu") as optimizer:
        optimizer.load_state_dict(saved)
        masters = [p.detach().float() for p in model.parameters()]
        reference = OPTIMIZERS["sgd"](masters)
        reference.load_state_dict(saved)
        loss_of(model, 3).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        reference.step()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        assert same([state[i]["master"] for i in range(4)], masters)
        mine = [state[i]["momentum_buffer"] for i in range(4)]
        assert same(mine, [reference.state[m]["momentum_buffer"] for m in masters])


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_master_that_does_not_round_to_its_parameter_is_ignored(offload: str) -> None:
    """Element by element: the weights were edited, or come from another checkpoint."""
    saved, weights = save_half(3, offload=offload)
    masters = [saved["state"][i]["master"].clone() for i in range(4)]
    weights["0.weight"][0] = 7.0
    model = network(HALF)
    model.load_state_dict(weights)
    with AsyncOptimizer(OPTIMIZERS["sgd"](model.parameters()), model, offload=offload) as optimizer:
        optimizer.load_state_dict(saved)
        train(model, optimizer, 3, 3)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, 3, 4)  # a step of 0: state_dict then has the masters
        found = [optimizer.state_dict()["state"][i]["master"] for i in range(4)]
    masters[0][0] = 7.0
    assert same(found, masters)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_close_gives_the_state_back_in_the_parameters_dtype(dtype: torch.dtype, mode: str) -> None:
    model = network(dtype)
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = AsyncOptimizer(inner, model, mode=mode, offload="cpu")
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("clips", "scale"), [(False, None), (True, 4.0)])
def test_a_gradient_travels_once_a_step(
    scale: float | None, clips: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is final; each of the backwards sent it, and so did a clip."""
    sent, down = list[float](), SideStreams.down

    def counted(self: SideStreams, source: Tensor, host: Tensor) -> Any:
        sent.append(source.item())
        return down(self, source, host)

    monkeypatch.setattr(SideStreams, "down", counted)
    scaler = None if scale is None else GradScaler("cpu", init_scale=scale)
    w = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([w], lr=0.125)
    with AsyncOptimizer(inner, mode=mode, offload="cpu", scaler=scaler) as optimizer:
        for _ in range(2):
            loss = w.sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clips:
            optimizer.clip_grad_norm_(10.0)
        assert sent == []
        optimizer.step()
        assert sent == [2.0]
        optimizer.synchronize()
        assert w.item() == 0.75


# Threads (F12).


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
    for dtype in (None, torch.float32):
        hosts = streams.host_like(sources, dtype)
        for source, host in zip(sources, hosts, strict=True):
            assert host.shape == source.shape
            assert host.stride() == source.stride()
            assert host.dtype is (dtype or source.dtype)
            streams.down(source, host)
        for source, host in zip(sources, hosts, strict=True):
            assert torch.equal(host, source.to(host.dtype))  # none overwrites another
        full = [h for h in hosts if h.dtype is torch.float32 and h.numel()]
        assert len({h.untyped_storage().data_ptr() for h in full}) == 1


def test_pairs_are_kept_with_their_masters_until_a_parameter_moves() -> None:
    w, v = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD([w, v])
    streams, rule = SideStreams(CPU), MasterRule.of(ScalerConfig())

    def pairs(known: Any) -> Any:
        return make_pairs(optimizer, streams, offload=False, masters=rule, known=known)

    first = pairs([])
    for pair in first:
        pair.stepped.data.add_(2.0**-14)  # rounds to the parameter
    assert all(a is b for a, b in zip(pairs(first), first, strict=True))
    w.data = torch.tensor([1.0, 5.0]).half()
    second = pairs(first)
    assert second[0] is not first[0]
    assert second[1] is first[1]
    assert second[0].stepped.tolist() == [1.0 + 2.0**-14, 5.0]  # kept by both


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
    replica.reorder([params[4], params[0], params[4]])
    assert [pair.param.numel() for pair in replica.ordered] == [2, 4, 4, 1, 9]
    assert all(
        a is b for a, b in zip(replica.params, [params[i] for i in (4, 0, 1, 2, 3)], strict=True)
    )
    assert not replica.follow()  # nothing changed: the order stays
    assert [pair.param.numel() for pair in replica.ordered] == [2, 4, 4, 1, 9]
