"""``step_mode="delayed"`` against the one-step delay written in plain torch, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from references import (
    NEVER_STALE,
    OPTIMIZERS,
    Reference,
    assert_same_run,
    batch,
    loss_of,
    network,
    run_ours,
    run_reference,
)
from support import same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

Fence = Callable[[nn.Module, Any], object]


WINDOWS: Any = {"steps": 20, "overflows": (0, 7, 8, 13)}


each_compensation = pytest.mark.parametrize("compensation", ["none", "preview"])


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


@pytest.mark.parametrize("fold", [False, True])
def test_folding_without_clipping_changes_no_bit(fold: bool) -> None:
    ours = run_ours("fused adamw", fold_unscale=fold, **WINDOWS)
    assert_same_run(ours, run_reference("fused adamw", 0, **WINDOWS))


def evaluate(model: nn.Module, _: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(99, next(model.parameters()).dtype)[0])
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("name", FENCES)
def test_a_fence_shows_the_masters_and_training_goes_on_as_without_it(
    name: str, kind: str, dtype: torch.dtype, offload: str
) -> None:
    """Also after the first step, a skip (7), and two in a row (10, 11)."""
    make = partial(network, dtype)
    settings: Any = {**WINDOWS, "make": make, "compensation": "preview"}
    seen: list[list[Tensor]] = []

    def fence(model: nn.Module, optimizer: Any) -> None:
        FENCES[name](model, optimizer)
        seen.append([p.detach().clone() for p in model.parameters()])

    at = (1, 3, 7, 10, 11)
    ours = run_ours(kind, offload=offload, fences=dict.fromkeys(at, fence), **settings)
    assert_same_run(ours, run_reference(kind, 0, **settings))
    for step, values in zip(at, seen, strict=True):
        exact = run_reference(kind, 0, **{**settings, "steps": step + 1})
        assert same(values, [m.to(dtype) for m in exact["masters"]])


@each_compensation
def test_after_a_skip_the_model_has_what_was_updated_exactly(compensation: str) -> None:
    """The update that the skipped step would have shown is none of the model's."""
    model, scaler = network(), GradScaler("cpu", init_scale=1024.0)
    inner = OPTIMIZERS["sgd"](model.parameters())
    options: dict[str, Any] = {"mode": "delayed", "delay_compensation": compensation}
    with AsyncOptimizer(inner, model, scaler=scaler, **options) as optimizer:
        for step in range(9):
            scaler.scale(loss_of(model, step, overflow=step in (4, 5, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.step_was_skipped:
                exact = run_reference(
                    "sgd", 0, compensation=compensation, steps=step + 1, overflows=(4, 5, 8)
                )["masters"]
                assert same([p.detach() for p in model.parameters()], exact)


class Gated(nn.Module):
    """Of two layers with a third one that some steps leave out; 0: none of the others."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        for number in which:
            x = x + self.layers[number](x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_parameter_without_a_gradient_has_its_exact_value(offload: str, kind: str) -> None:
    """Its update is none: no momentum moves it, no decay."""
    used = [(0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2), (2,), (2,), (0, 1)]
    model, x = Gated(), torch.ones(2, 4)
    options: dict[str, Any] = {"mode": "delayed", "offload": offload}
    inner = OPTIMIZERS[kind](model.parameters())
    twin = Gated()
    reference = Reference(twin.parameters(), OPTIMIZERS[kind], 0, "preview")
    reference.scale = 1.0
    with AsyncOptimizer(inner, model, delay_compensation="preview", **options) as optimizer:
        for which in used:
            for net in (model, twin):
                net(x, which).backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.boundary()
            reference.scale = 1.0
            pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
            assert same([p.detach() + 0 for p, _ in pairs], [q.detach() for _, q in pairs])


@each_compensation
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize(("at", "kind"), [(1, "adamw"), (4, "adamw"), (4, "sgd"), (5, "adamw")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    kind: str, dtype: torch.dtype, offload: str, compensation: str, first: str, at: int
) -> None:
    """Saved after the first step, one in the midst, and a skip."""
    options: dict[str, Any] = {"mode": "delayed", "offload": offload}
    options["delay_compensation"] = compensation

    def pair() -> tuple[nn.Module, GradScaler, AsyncOptimizer]:
        model, scaler = network(dtype), GradScaler("cpu", init_scale=64.0, growth_interval=3)
        inner = OPTIMIZERS[kind](model.parameters())
        return model, scaler, AsyncOptimizer(inner, model, scaler=scaler, **options)

    def train(model: nn.Module, scaler: GradScaler, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, step, overflow=step == 4)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
        return losses

    whole = pair()
    train(*whole, range(at))
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in whole], buffer)
    losses = train(*whole, range(at, 10))
    rest = pair()
    train(*rest, range(7))  # of something else
    buffer.seek(0)
    saved = dict(zip(range(3), zip(rest, torch.load(buffer), strict=True), strict=True))
    for number in (0, 1, 2) if first == "model" else (2, 1, 0):
        each, state = saved[number]
        each.load_state_dict(state)
    assert str(train(*rest, range(at, 10))) == str(losses)
    for mine, reference in zip(rest, whole, strict=True):
        assert same(mine.state_dict(), reference.state_dict())
        if isinstance(mine, AsyncOptimizer):
            mine.close()
            reference.close()


def test_what_was_saved_of_another_model_is_not_shown() -> None:
    """State of one run, parameters of another: the parameters are the user's word."""
    saved: Any = None
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Linear(8, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with AsyncOptimizer(inner, model, mode="delayed") as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
                before = [p.detach().clone() for p in model.parameters()]
            for step in range(0 if saved else 3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if saved is not None:
                loss_of(model, 3)
                assert same([p.detach() for p in model.parameters()], before)
            else:
                saved = copy.deepcopy(optimizer.state_dict())
                assert "preview" in saved["state"][0]


@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_an_edit_after_a_fence_holds_and_other_parameters_keep_their_preview(
    how: str, offload: str
) -> None:
    model = network()
    options: dict[str, Any] = {"mode": "delayed", "offload": offload}
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with AsyncOptimizer(inner, model, **options) as optimizer:
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        shown = [p.detach() + 0 for p in model.parameters()]
        optimizer.synchronize()
        exact = [p.detach().clone() for p in model.parameters()]
        weight = model[0].weight
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            (weight if how == "in place" else weight.data).clamp_(-0.1, 0.1)
        loss = loss_of(model, 3)
        now = [p.detach().clone() for p in model.parameters()]
        assert same(now[0], exact[0].clamp(-0.1, 0.1))
        assert same(now[1:], shown[1:])
        assert not same(now[1:], exact[1:])
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        momentum = [inner.state[p]["momentum_buffer"] for p in model.parameters()]
        expected = [
            w.add(m, alpha=-0.1) for w, m in zip([now[0], *exact[1:]], momentum, strict=True)
        ]
        assert same([p.detach() for p in model.parameters()], expected)


def test_without_a_model_a_fence_is_followed_by_what_it_has_published() -> None:
    """Nobody knows when the forward begins."""
    p = nn.Parameter(torch.ones(3))
    with AsyncOptimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9), mode="delayed") as optimizer:
        for _ in range(3):
            p.grad = torch.ones(3)
            optimizer.step()
        optimizer.synchronize()
        exact = p.detach().clone()
        saved = optimizer.state_dict()
        assert same((p * 1.0).detach(), exact)
        assert "preview" not in saved["state"][0]
