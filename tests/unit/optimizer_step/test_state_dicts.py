"""State dicts of a stepped replica: torch's own, in both directions."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from references import OPTIMIZERS, loss_of, network
from support import same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer
from accel_scaler.config import Offload, StepMode
from accel_scaler.optimizer_step import async_stepper_of

HALF = torch.float16
MODES = pytest.mark.parametrize("mode", ["sync", "overlap"])
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


@MODES
def test_state_dicts_interchange_with_torch_both_ways(mode: StepMode) -> None:
    """Ours for 4 steps, torch's for 3, ours again for 3: the ten steps of torch's alone."""
    for kind in OPTIMIZERS:
        expected, _ = stock_run(kind)
        model = network()
        inner = OPTIMIZERS[kind](model.parameters())
        with AsyncOptimizer(inner, model, step_mode=mode) as optimizer:
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
        with AsyncOptimizer(inner, model, step_mode=mode) as optimizer:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, 7, STEPS)
            optimizer.synchronize()
        assert same(params_of(model), params_of(expected)), kind


@MODES
def test_close_gives_the_state_back_in_the_parameters_dtype(mode: StepMode) -> None:
    """And frees the masters, though the optimizer that is closed is kept."""
    model = network(HALF)
    inner = OPTIMIZERS["adamw"](model.parameters())
    optimizer = AsyncOptimizer(inner, model, step_mode=mode)
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
            assert entry[key].dtype is HALF
            assert entry[key].device == p.device
            assert torch.equal(entry[key], saved["state"][i][key].to(HALF))
        assert type(p) is nn.Parameter
        assert not p._post_accumulate_grad_hooks
    train(model, inner, 3, 4)  # torch goes on from there


@MODES
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
