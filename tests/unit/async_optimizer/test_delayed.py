"""``step_mode="delayed"`` against the one-step delay written in plain torch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from references import (
    DECAY,
    GROWTH_INTERVAL,
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    Reference,
    batch,
    loss_of,
    network,
    same,
)
from torch import nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer import replica as replica_module

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20
OVERFLOWS = (0, 7, 8, 13)
Fence = Callable[[nn.Module, Any], object]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each parameter, as in a model of a useful size."""
    monkeypatch.setattr(replica_module, "SMALLEST_PART", 1)


def scaler_of() -> GradScaler:
    return GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)


def decay(_: int) -> float:
    return DECAY


def run_reference(
    kind: str,
    *,
    prompt: int = 0,
    max_norm: float | None = None,
    schedule: bool = False,
    overflows: Collection[int] = OVERFLOWS,
    fences: Collection[int] = (),
    steps: int = STEPS,
) -> dict[str, Any]:
    model = network()
    reference = Reference(model.parameters(), OPTIMIZERS[kind], prompt)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(reference.optimizer, decay)
    seen: dict[str, Any] = {"losses": [], "scales": [], "skips": []}
    for step in range(steps):
        loss = loss_of(model, step, step in overflows)
        (loss * reference.scale).backward()
        seen["losses"].append(float(loss.detach()))
        stepped = reference.boundary(max_norm=max_norm)
        seen["scales"].append(reference.scale)
        seen["skips"].append(not stepped)
        if schedule and stepped:
            scheduler.step()
        if step in fences:
            reference.publish()
    reference.publish()
    seen["params"] = [p.detach().clone() for p in model.parameters()]
    seen["state"] = reference.state()
    return seen


def run_ours(
    kind: str,
    *,
    mode: str = "delayed",
    prompt: int = 0,
    max_norm: float | None = None,
    schedule: str = "",
    overflows: Collection[int] = OVERFLOWS,
    fences: dict[int, Fence] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> dict[str, Any]:
    model, scaler = network(), scaler_of()
    inner = OPTIMIZERS[kind](model.parameters())
    seen: dict[str, Any] = {"losses": [], "scales": [], "skips": []}
    with AsyncOptimizer(
        inner, model, scaler=scaler, mode=mode, delay_warmup_steps=prompt, **settings
    ) as optimizer:
        target = inner if schedule == "inner" else optimizer
        scheduler = torch.optim.lr_scheduler.MultiplicativeLR(target, decay)
        for step in range(steps):
            loss = loss_of(model, step, step in overflows)
            scaler.scale(loss).backward()
            seen["losses"].append(float(loss.detach()))
            if max_norm is not None:
                optimizer.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad()
            seen["scales"].append(scaler.get_scale())
            seen["skips"].append(optimizer.step_was_skipped)
            if schedule and not optimizer.step_was_skipped:
                scheduler.step()
            if fences and step in fences:
                fences[step](model, optimizer)
        optimizer.synchronize()
        seen["params"] = [p.detach().clone() for p in model.parameters()]
        seen["state"] = [dict(inner.state[p]) for p in model.parameters()]
    return seen


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    for key in reference:
        assert same(_comparable(ours[key]), _comparable(reference[key])), key


def _comparable(value: Any) -> Any:
    return [str(v) if isinstance(v, float) else v for v in value]  # nan is equal to nan here


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_delayed_is_the_one_step_delay(kind: str, max_norm: float | None) -> None:
    assert_same(run_ours(kind, max_norm=max_norm), run_reference(kind, max_norm=max_norm))


@pytest.mark.parametrize("where", ["inner", "ours"])
def test_a_scheduler_on_either_optimizer_is_that_of_the_reference(where: str) -> None:
    ours = run_ours("sgd", schedule=where, max_norm=0.5)
    assert_same(ours, run_reference("sgd", schedule=True, max_norm=0.5))


def first_loss(step: int) -> float:
    """With the parameters that nothing has updated yet."""
    return float(loss_of(network(), step).detach())


def test_what_it_is_compared_with_is_stale() -> None:
    stale = run_reference("sgd")
    prompt = run_reference("sgd", prompt=NEVER_STALE)
    # Boundary 0 is a skip; the update of boundary 1 shows in loss 2, or one step later.
    assert stale["losses"][1] == first_loss(1) == prompt["losses"][1]
    assert stale["losses"][2] == first_loss(2) != prompt["losses"][2]


@pytest.mark.parametrize("prompt", [1, 5, STEPS])
def test_warm_up_steps_are_not_stale(prompt: int) -> None:
    assert_same(run_ours("sgd", prompt=prompt), run_reference("sgd", prompt=prompt))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_offload_changes_no_bit(kind: str) -> None:
    assert_same(run_ours(kind, offload="cpu", max_norm=0.5), run_reference(kind, max_norm=0.5))


@pytest.mark.parametrize("fold", [False, True])
def test_folding_without_clipping_changes_no_bit(fold: bool) -> None:
    assert_same(run_ours("fused adamw", fold_unscale=fold), run_reference("fused adamw"))


def evaluate(model: nn.Module, _: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(99)[0])
    model.train()


FENCES: dict[str, Fence] = {
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "model.state_dict": lambda model, _: model.state_dict(),
    "an evaluation": evaluate,
    "its own state loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("name", FENCES)
def test_a_fence_publishes(name: str) -> None:
    """Also one straight after a skip (7), and two in a row (10, 11)."""
    at = (3, 7, 10, 11)
    ours = run_ours("adamw", fences=dict.fromkeys(at, FENCES[name]))
    assert_same(ours, run_reference("adamw", fences=at))
    assert ours["losses"] != run_reference("adamw")["losses"]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_resumed_warm_up_goes_on_where_it_was(offload: str) -> None:
    """Five prompt steps, three of them before the checkpoint; then stale ones."""

    def pair() -> tuple[nn.Module, AsyncOptimizer]:
        torch.manual_seed(4)
        model = nn.Linear(6, 1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"mode": "delayed", "offload": offload, "delay_warmup_steps": 5}
        return model, AsyncOptimizer(inner, model, **options)

    def train(model: nn.Module, optimizer: AsyncOptimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, optimizer = pair()
    train(whole, optimizer, range(3))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, range(3, 9))
    optimizer.close()
    resumed, optimizer = pair()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, range(3, 9))
    optimizer.close()
    for mine, reference in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, reference)
