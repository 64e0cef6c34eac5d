"""Which parameters have float32 masters: ``master_weights``, beside plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from references import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    loss_of,
    network,
    run_ours,
    run_reference,
    same,
)
from torch import Tensor, nn

from accel_scaler import (
    AsyncOptimizer,
    ConfigError,
    GradScaler,
    ScalerConfig,
    UnsupportedError,
)
from accel_scaler.async_optimizer.master_rule import MasterRule

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
WAYS = list(itertools.product(("sync", "overlap", "delayed"), ("none", "cpu")))


class Mixed(nn.Module):
    """bfloat16, float16 and float32 side by side; one bfloat16 layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        first, _, last = network()
        self.first, self.last = first.to(BRAIN), last
        self.frozen = nn.Linear(16, 16, dtype=BRAIN).requires_grad_(False)
        with torch.no_grad():
            self.frozen.weight.copy_(torch.eye(16))
            self.frozen.bias.zero_()
        self.gain = nn.Parameter(torch.ones(16, dtype=HALF))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.relu(self.first(x.to(BRAIN))))
        out: Tensor = self.last((hidden * self.gain.to(BRAIN)).float())
        return out


def brain() -> nn.Module:
    return network(BRAIN)


def rule(**settings: Any) -> list[torch.dtype]:
    taken = MasterRule.of(ScalerConfig(**settings))
    return [d for d in (HALF, BRAIN, FULL) if taken.takes(torch.empty(1, dtype=d))]


def test_the_rule() -> None:
    assert rule() == rule(step_mode="overlap") == rule(master_weights="fp32") == [HALF, BRAIN]
    assert rule(enabled=False) == [HALF]
    assert rule(enabled=False, master_weights="fp32") == [HALF, BRAIN]
    assert rule(master_weights="none") == []
    for all_of_them in ({"step_mode": "delayed"}, {"offload": "cpu"}):
        assert rule(**all_of_them) == rule(**all_of_them, enabled=False) == [HALF, BRAIN, FULL]


@pytest.mark.parametrize(("mode", "offload"), WAYS)
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_bfloat16_parameters_train_as_the_reference(kind: str, mode: str, offload: str) -> None:
    prompt = 0 if mode == "delayed" else NEVER_STALE
    ours = run_ours(kind, mode, offload, make=brain, clip={"max_norm": 0.5})
    assert_same_run(ours, run_reference(kind, prompt, make=brain, max_norm=0.5))
    for p, master in zip(ours["params"], ours["masters"], strict=True):
        assert (p.dtype, master.dtype) == (BRAIN, FULL)
        assert torch.equal(master.to(BRAIN), p)
        assert not torch.equal(master, p.float())


@pytest.mark.parametrize(("mode", "offload"), WAYS)
def test_three_dtypes_side_by_side_and_one_frozen(mode: str, offload: str) -> None:
    torch.manual_seed(0)
    prompt = 0 if mode == "delayed" else NEVER_STALE
    ours = run_ours("adamw", mode, offload, make=Mixed)
    plain = run_reference("adamw", prompt, make=Mixed)
    trained = [p.requires_grad for p in Mixed().parameters()]
    for seen in (ours, plain):
        for key in ("state", "masters"):
            seen[key] = list(itertools.compress(seen[key], trained))
    assert_same_run(ours, plain)


def torchs_own(kind: str, clip: bool) -> dict[str, Any]:
    """torch's GradScaler, on bfloat16 parameters in place."""
    model = brain()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    for step in range(12):
        scaler.scale(loss_of(model, step, step in (0, 5))).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {
        "params": [p.detach() for p in model.parameters()],
        "state": list(optimizer.state_dict()["state"].values()),
    }


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_none_trains_bfloat16_in_place_as_torch_does(mode: str, kind: str, clip: bool) -> None:
    max_norm = {"max_norm": 0.5} if clip else None
    ours = run_ours(kind, mode, make=brain, master_weights="none", clip=max_norm)
    plain = torchs_own(kind, clip)
    assert same(ours["params"], plain["params"])
    assert same(ours["state"], plain["state"])
    assert all(master is p for master, p in zip(ours["masters"], ours["params"], strict=True))


@pytest.mark.parametrize("way", [{"mode": "delayed"}, {"offload": "cpu"}])
def test_none_contradicts_what_needs_masters(way: dict[str, str]) -> None:
    model = brain()
    with pytest.raises(ConfigError, match="master_weights='none' steps parameters in place, and"):
        AsyncOptimizer(torch.optim.SGD(model.parameters()), model, master_weights="none", **way)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_float16_in_place_is_refused_before_anything_is_changed(mode: str) -> None:
    model = network(HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = set(vars(optimizer))
    with pytest.raises(UnsupportedError, match="float16 parameters"):
        AsyncOptimizer(optimizer, model, mode=mode, master_weights="none")
    assert set(vars(optimizer)) == before


def test_float16_that_is_unfrozen_later_is_refused_too() -> None:
    model = network(HALF).requires_grad_(False)
    model.append(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AsyncOptimizer(optimizer, model, mode="overlap", master_weights="none") as ours:
        model[3](torch.ones(1, 1)).sum().backward()
        ours.step()
        model[0].requires_grad_(True)
        with pytest.raises(UnsupportedError, match="master_weights='none'"):
            ours.step()
        model[0].requires_grad_(False)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_checkpoint_goes_between_masters_and_in_place(mode: str) -> None:
    """In place, masters in it are nobody's: what comes of them is the parameter's rounding."""
    scaler = GradScaler("cpu", init_scale=INIT_SCALE)

    def train(wish: str, model: nn.Module, saved: Any) -> Any:
        inner = OPTIMIZERS["adamw"](model.parameters())
        with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, master_weights=wish) as ours:
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
