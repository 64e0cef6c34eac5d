"""``step_mode="delayed"`` against the one-step delay written in plain torch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from references import (
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    batch,
    loss_of,
    network,
    run_ours,
    run_reference,
)
from torch import nn

from accel_scaler import AsyncOptimizer

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

Fence = Callable[[nn.Module, Any], object]


WINDOWS: Any = {"steps": 20, "overflows": (0, 7, 8, 13)}


COMPENSATIONS = ("none", "extrapolate", "preview")
each_compensation = pytest.mark.parametrize("compensation", COMPENSATIONS)


@each_compensation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.5}], ids=["unclipped", "clipped"])
def test_delayed_is_the_one_step_delay(
    kind: str, clip: dict[str, Any], offload: str, dtype: torch.dtype, compensation: str
) -> None:
    make = partial(network, dtype)
    settings: Any = {**WINDOWS, "make": make, "compensation": compensation}
    ours = run_ours(kind, offload=offload, clip=clip or None, **settings)
    assert_same_run(ours, run_reference(kind, 0, **clip, **settings))


@each_compensation
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("where", ["inner", "ours"])
def test_a_scheduler_on_either_optimizer_is_that_of_the_reference(
    where: str, kind: str, compensation: str
) -> None:
    """The preview is one of the step to come, with its learning rate."""
    ours = run_ours(kind, schedule=where, compensation=compensation, **WINDOWS)
    reference = run_reference(kind, 0, schedule=True, compensation=compensation, **WINDOWS)
    assert_same_run(ours, reference)


def first_loss(step: int) -> str:
    """With the parameters that nothing has updated yet."""
    return str(float(loss_of(network(), step).detach()))


def test_what_it_is_compared_with_is_stale() -> None:
    stale = run_reference("sgd", 0, **WINDOWS)
    prompt = run_reference("sgd", NEVER_STALE, **WINDOWS)
    # Boundary 0 is a skip; the update of boundary 1 shows in loss 2, or one step later.
    assert stale["losses"][1] == first_loss(1) == prompt["losses"][1]
    assert stale["losses"][2] == first_loss(2) != prompt["losses"][2]


@pytest.mark.parametrize("prompt", [1, 5, WINDOWS["steps"]])
def test_warm_up_steps_are_not_stale(prompt: int) -> None:
    """Updates count, skips do not."""
    ours = run_ours("sgd", delay_warmup_steps=prompt, **WINDOWS)
    assert_same_run(ours, run_reference("sgd", prompt, **WINDOWS))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_offload_changes_no_bit(kind: str) -> None:
    ours = run_ours(kind, offload="cpu", clip={"max_norm": 0.5}, **WINDOWS)
    assert_same_run(ours, run_reference(kind, 0, max_norm=0.5, **WINDOWS))


@pytest.mark.parametrize("fold", [False, True])
def test_folding_without_clipping_changes_no_bit(fold: bool) -> None:
    ours = run_ours("fused adamw", fold_unscale=fold, **WINDOWS)
    assert_same_run(ours, run_reference("fused adamw", 0, **WINDOWS))


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
    ours = run_ours("adamw", fences=dict.fromkeys(at, FENCES[name]), **WINDOWS)
    assert_same_run(ours, run_reference("adamw", 0, fences=at, **WINDOWS))
    assert ours["losses"] != run_reference("adamw", 0, **WINDOWS)["losses"]


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
