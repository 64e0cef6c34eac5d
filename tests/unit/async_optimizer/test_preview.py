"""Each rule's preview and share beside the step that torch's own optimizer then makes.

Gradients whose elements all have one size, whatever their sign, have second moments that stay as
they are once their bias is corrected, and every root is their mean: nothing is left to guess, and
preview and share must be torch's step, but for rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_run, network, run_ours, run_reference
from torch import Tensor

from accel_scaler import AsyncOptimizer, UnsupportedError
from accel_scaler.async_optimizer.preview import RULES, rule_of
from accel_scaler.optimizer_step import blocks

Make = Callable[..., torch.optim.Optimizer]

KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD, dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}),
    "SGD, Nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "SGD, maximize": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.1},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "eps": 1e-3}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adam, maximize": (torch.optim.Adam, {"lr": 0.1, "maximize": True}),
    "Adam, fused": (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    "Adam, rate of a tensor": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5, "betas": (0.5, 0.75)}),
}
ROOTS_OF = {"Adam", "AdamW"}


def even(number: int, size: float = 0.5) -> Tensor:
    """Of one size, signs at random."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(2, (3, 5), generator=generator).float().mul_(2.0).sub_(1.0).mul_(size)


def terms_and_state(optimizer: torch.optim.Optimizer, w: Tensor) -> tuple[Any, list[Tensor]]:
    """The terms of the next update of ``w``, and the state that they are made of."""
    rule, kernel = rule_of(optimizer), blocks.rule_of(optimizer)
    assert rule is not None
    assert kernel is not None
    (group,), state = optimizer.param_groups, optimizer.state[w]
    terms = rule.terms(group, float(state.get("step", 0.0)))
    return terms, [state[key] for key in kernel.keys(group)]


def previewed(
    optimizer: torch.optim.Optimizer, w: Tensor, g: Tensor, largest: int = 1 << 16
) -> Tensor:
    """The sum of preview and share, from the package's rule."""
    (terms, state), rule = terms_and_state(optimizer, w), rule_of(optimizer)
    assert rule is not None
    preview, norms = torch.empty_like(w), list[Tensor]()
    for i in range(0, w.numel(), largest):
        some, found, *rows = (t.view(-1)[i : i + largest] for t in (w.detach(), preview, *state))
        roots = torch.empty_like(some)
        terms.write(some, *rule.columns(*rows), found, roots)
        norms += [roots.norm()] if terms.is_rooted else []
    ((rate, limit),) = terms.shares([w.numel()], [0] * len(norms), norms)
    return preview.add_(g.clamp(-limit, limit), alpha=rate)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("updates", "largest"), [(1, 99), (2, 4), (3, 99), (7, 5), (20, 99)])
def test_with_even_gradients_a_preview_and_its_share_are_torch_s_step(
    kind: str, updates: int, largest: int
) -> None:
    make, settings = KINDS[kind]
    w = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 15).reshape(3, 5))
    optimizer = make([w], **settings)
    for number in range(updates):
        w.grad = even(number)
        optimizer.step()
    before, w.grad = w.detach().clone(), even(updates)
    found = previewed(optimizer, w, w.grad, largest)
    optimizer.step()
    moved = (w.detach() - before).norm()
    assert moved > 1e-3
    assert float((found - w.detach()).norm() / moved) < 1e-4


@pytest.mark.parametrize("name", sorted(ROOTS_OF))
def test_a_gradient_where_there_were_none_is_limited_as_its_own_square_limits_it(name: str) -> None:
    """The second moments have seen zeros alone: LoRA's first matrix, a token for the first time."""
    w = torch.nn.Parameter(torch.zeros(3, 5))
    optimizer = getattr(torch.optim, name)([w], lr=0.1)
    for _ in range(6):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    w.grad = even(0) * torch.linspace(0.01, 100.0, 15).reshape(3, 5)
    found = previewed(optimizer, w, w.grad)
    optimizer.step()
    assert w.detach().abs().max() > 1e-3
    torch.testing.assert_close(found, w.detach(), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ROOTS_OF))
def test_no_gradient_moves_more_at_once_than_its_update_could(name: str) -> None:
    w = torch.nn.Parameter(torch.zeros(64))
    optimizer = getattr(torch.optim, name)([w], lr=0.1)
    for number in range(6):
        w.grad = torch.randn(64, generator=torch.Generator().manual_seed(number))
        optimizer.step()
    terms, state = terms_and_state(optimizer, w)
    roots = torch.empty_like(w.detach())
    terms.write(w.detach(), None, *state, None, roots)
    ((rate, limit),) = terms.shares([64], [0], [roots.norm()])
    for size in (1e3, 1e6):
        calm, excited = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
        for other, grad in ((calm, torch.zeros(64)), (excited, torch.full((64,), size))):
            (p,) = other.param_groups[0]["params"]
            p.grad = grad
            other.step()
        (still,), (moved,) = (o.param_groups[0]["params"] for o in (calm, excited))
        own = (moved - still).detach().abs()
        share = abs(rate) * min(size, limit)
        assert share <= 1.2 * float(own.max()) + 0.2 * share, (share, own.max())


def test_a_decay_that_second_moments_have_not_seen_is_limited_too() -> None:
    """Else it would be divided by nothing: weight decay turned on late, at elements never used."""
    w = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 15).reshape(3, 5))
    optimizer = torch.optim.Adam([w], lr=0.1)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    before = w.detach().clone()
    found = previewed(optimizer, w, torch.zeros_like(w))
    assert float((found - before).abs().max()) <= 0.1 * math.sqrt(1.999)


def test_the_rules_are_those_that_are_named() -> None:
    assert {kind.split(",")[0] for kind in KINDS} == set(RULES)


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adafactor]
)
def test_nothing_is_previewed_without_a_rule(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedError, match=r"expected torch.*SGD, Adam, AdamW.*'none'"):
        AsyncOptimizer(make([p]), mode="delayed", delay_compensation="preview")
    with AsyncOptimizer(make([p]), mode="delayed"):
        pass
    said = [r.message for r in caplog.records if "takes" in r.message]
    assert len(said) == 1
    assert "takes 'none'" in said[0]
    with AsyncOptimizer(make([p]), mode="delayed", delay_compensation="none"):
        pass


@pytest.mark.usefixtures("one_thread", "one_part_each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clipped_and_previewed_steps_are_those_of_the_reference(
    kind: str, offload: str, dtype: torch.dtype
) -> None:
    settings: Any = {"steps": 20, "overflows": (0, 7, 8, 13), "compensation": "preview"}
    settings["make"] = partial(network, dtype)
    ours = run_ours(kind, offload=offload, clip={"max_norm": 0.5}, **settings)
    assert_same_run(ours, run_reference(kind, 0, max_norm=0.5, **settings))
