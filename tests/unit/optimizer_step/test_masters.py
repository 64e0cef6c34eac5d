"""Which parameters train through float32 masters, and how their gradients are clipped."""

from __future__ import annotations

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
from accel_scaler.config import StepMode
from accel_scaler.optimizer_step import replica as replica_module
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


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_some_parameters_leaves_the_others(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of an optimizer's: they are clipped in float16, still scaled: one rounding of it."""
    monkeypatch.setattr(replica_module, "SMALLEST_PART", 1 << 19)  # one part: one block, if fused
    model, plain = half(), half()
    chosen = [0, 3]
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    with AsyncOptimizer(inner, model, scaler=scaler, step_mode="sync") as optimizer:
        before = [p.detach().float().clone() for p in model.parameters()]
        scaler.scale(loss_of(model, 0)).backward()
        params = list(model.parameters())
        norm = optimizer.clip_grad_norm_(0.01, parameters=[params[i] for i in chosen])
        optimizer.step()
        state = optimizer.state_dict()["state"]
    after = [state[i]["master"] for i in range(len(before))]
    (loss_of(plain, 0) * INIT_SCALE).backward()
    grads = [p.grad.float() / INIT_SCALE for p in plain.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([grads[i] for i in chosen])
    assert float(norm) == pytest.approx(float(total), rel=1e-6)
    assert float(total) > 0.01
    for i, (new, grad) in enumerate(zip(after, grads, strict=True)):
        if i in chosen:
            wanted = grad * (0.01 / (total + 1e-6))
            torch.testing.assert_close(before[i] - new, wanted, rtol=2.0**-10, atol=2e-7)
        else:
            assert torch.equal(new, before[i] - grad)


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
        assert rule("cuda", offload="cpu", enabled=scaled) == [HALF, BRAIN, FULL]


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
