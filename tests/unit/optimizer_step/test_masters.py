"""Which parameters train through float32 masters, and what becomes of masters and state."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from references import INIT_SCALE, OPTIMIZERS, loss_of, network
from support import same
from torch import nn

from accel_scaler import (
    AsyncOptimizer,
    ConfigError,
    GradScaler,
    ScalerConfig,
    UnsupportedError,
    attach,
    detach,
)
from accel_scaler.config import Offload, StepMode
from accel_scaler.optimizer_step import async_stepper_of
from accel_scaler.optimizer_step.masters import master_rule

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

HALF, BRAIN = torch.float16, torch.bfloat16


def half() -> nn.Module:
    return network(HALF)


def test_our_scaler_on_a_plain_optimizer_names_the_remedy() -> None:
    model = half()
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(UnsupportedError, match="AsyncOptimizer"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_unscaling_float16_gradients_in_place_is_refused_with_the_remedy() -> None:
    accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), init_scale=INIT_SCALE)
    net = half()
    model, optimizer = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()))
    accelerator.backward(loss_of(model, 0))
    with pytest.raises(UnsupportedError, match="clip_grad_norm_"):
        accelerator.unscale_gradients()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert not same([p.detach() for p in net.parameters()], before)
    detach(accelerator)


# Which parameters have masters.

FULL = torch.float32


def brain() -> nn.Module:
    return network(BRAIN)


def rule(device: str = "cpu", **settings: Any) -> list[torch.dtype]:
    taken = master_rule(ScalerConfig(**settings), torch.device(device))
    return [d for d in (HALF, BRAIN, FULL) if taken.takes(torch.empty(1, dtype=d))]


def test_the_rule() -> None:
    assert rule() == rule(step_mode="overlap") == rule(master_weights="fp32") == [HALF, BRAIN]
    assert rule(enabled=False) == [HALF]
    assert rule(enabled=False, master_weights="fp32") == [HALF, BRAIN]
    assert rule(master_weights="none") == []
    for scaled in (True, False):
        assert rule(offload="cpu", enabled=scaled) == [HALF, BRAIN]
        assert rule("cuda", offload="cpu", enabled=scaled) == [HALF, BRAIN]


def test_none_contradicts_offload() -> None:
    inner = torch.optim.SGD(brain().parameters())
    with pytest.raises(ConfigError, match="master_weights='none' updates parameters in place"):
        AsyncOptimizer(inner, offload="cpu", master_weights="none")


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_float16_in_place_is_refused_before_anything_is_changed(mode: StepMode) -> None:
    model = network(HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(vars(optimizer))
    with pytest.raises(UnsupportedError, match="float16 parameters"):
        AsyncOptimizer(optimizer, model, step_mode=mode, master_weights="none")
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_checkpoint_goes_between_masters_and_in_place(mode: StepMode) -> None:
    """In place, masters in it are nobody's: what comes of them is the parameter's rounding."""
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)

    def train(wish: str, model: nn.Module, saved: Any) -> Any:
        inner = OPTIMIZERS["adamw"](model.parameters())
        with AsyncOptimizer(
            inner, model, scaler=scaler, step_mode=mode, master_weights=wish
        ) as ours:
            if saved is not None:
                ours.load_state_dict(saved)
            for step in range(3):
                scaler.scale(loss_of(model, step)).backward()
                ours.step()
                ours.zero_grad()
            return ours.state_dict()

    model = brain()
    first = train("fp32", model, None)
    assert all(entry["exp_avg"].dtype is FULL for entry in first["state"].values())
    second = train("none", model, first)
    assert all(entry["exp_avg"].dtype is BRAIN for entry in second["state"].values())
    third = train("fp32", model, second)
    for entry, p in zip(third["state"].values(), model.parameters(), strict=True):
        assert float(entry["step"]) == 9.0
        assert entry["exp_avg"].dtype is entry["master"].dtype is FULL
        assert torch.equal(entry["master"].to(BRAIN), p.detach())


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_close_gives_the_state_back_in_the_parameters_dtype(mode: StepMode) -> None:
    """And frees the masters, though the optimizer that is closed is kept."""
    model = network(HALF)
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = AsyncOptimizer(inner, model, step_mode=mode)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
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
            assert entry[key].dtype is HALF
            assert entry[key].device == p.device
            assert torch.equal(entry[key], saved["state"][i][key].to(HALF))
        assert type(p) is nn.Parameter
        assert not p._post_accumulate_grad_hooks
    loss_of(model, 3).backward()
    inner.step()  # torch goes on from there


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_checkpoint_of_retired_modes_loads_exactly(mode: StepMode, offload: Offload) -> None:
    """As ``delayed`` and offload wrote it: float32 state, a master where the model is rounded."""
    for dtype in (HALF, torch.float32):
        model = network(dtype)
        inner = OPTIMIZERS["adamw"](model.parameters())
        state: dict[int, Any] = {}
        for i, p in enumerate(model.parameters()):
            master = p.detach().float() * (1.0 if dtype is torch.float32 else 1.0 + 2.0**-13)
            moments = {"exp_avg": torch.randn(p.shape), "exp_avg_sq": torch.rand(p.shape)}
            state[i] = {"step": torch.tensor(7.0), **moments}
            state[i] |= {} if dtype is torch.float32 else {"master": master}
        saved = {**inner.state_dict(), "state": copy.deepcopy(state)}
        with AsyncOptimizer(inner, model, step_mode=mode, offload=offload) as optimizer:
            optimizer.load_state_dict(saved)
            found = optimizer.state_dict()["state"]
        assert {i: set(entry) for i, entry in found.items()} == {
            i: set(e) for i, e in state.items()
        }
        for i, entry in state.items():
            for key, value in entry.items():
                assert found[i][key].dtype is torch.float32
                assert torch.equal(found[i][key], value), (i, key)
