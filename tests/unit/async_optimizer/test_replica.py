"""Optimizers unlike their copies: each trains as in plain torch, bit for bit, or is refused.

The reference of every test is the same loop with the optimizer alone. The worker is the worst
there can be (``lazy``): what is not frozen when a step is handed over is surely the next one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_support import assert_same, lazy
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, UnsupportedError
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    loss: Tensor = model(torch.randn(3, 4, generator=generator)).square().mean()
    return loss


Act = Callable[[int, Any, nn.Module], None]
"""A line of the user's script: number of the step, the optimizer, the model."""


def nothing(step: int, optimizer: Any, model: nn.Module) -> None:
    pass


class Seen:
    """What a run leaves."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.state = optimizer.state_dict()
        self.optimizer = optimizer


def plain(make: Callable[[Any], Any], after: Act = nothing, before: Act = nothing) -> Seen:
    model = net()
    optimizer = make(model.parameters())
    torch.manual_seed(5)
    for step in range(5):
        loss_of(model, step).backward()
        before(step, optimizer, model)
        optimizer.step()
        after(step, optimizer, model)
        optimizer.zero_grad()
    return Seen(model, optimizer)


def ours(
    make: Callable[[Any], Any],
    after: Act = nothing,
    before: Act = nothing,
    mode: str = "overlap",
    **kwargs: Any,
) -> Seen:
    model = net()
    inner = make(model.parameters())
    with lazy(), AsyncOptimizer(inner, model, mode=mode, **kwargs) as optimizer:
        torch.manual_seed(5)
        for step in range(5):
            loss_of(model, step).backward()
            before(step, inner, model)
            optimizer.step()
            after(step, inner, model)
            optimizer.zero_grad()
        optimizer.synchronize()
        return Seen(model, inner)


def assert_equal(mine: Seen, reference: Seen) -> None:
    assert_same(mine.weights, reference.weights, "weights")
    assert_same(mine.state, reference.state, "state")


class Own(torch.optim.Optimizer):
    """Gradient descent by hand, unknown to torch."""

    def __init__(self, params: Any, **kept: Any) -> None:
        super().__init__(params, {"lr": LR})
        self.__dict__.update(kept)

    def rate(self, group: dict[str, Any], p: Tensor) -> Any:
        return group["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * self.rate(group, p))


# Optimizers that are not torch's.


class Halving(torch.optim.SGD):
    """A known step that calls a method of a subclass."""

    def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> Any:
        found = super()._init_group(group, params, grads, buffers)  # type: ignore[misc]
        self.seen = getattr(self, "seen", 0) + len(grads)
        scale = 1.0 / self.seen  # so it may not be split
        grads[:] = [g * scale for g in grads]
        return found


def replaced(params: Any) -> Any:
    """SGD, a method of which somebody has replaced."""
    optimizer: Any = torch.optim.SGD(params, lr=LR, momentum=0.5)
    gather = optimizer._init_group

    def halved(group: Any, ps: Any, grads: Any, buffers: Any) -> Any:
        found = gather(group, ps, grads, buffers)
        grads[:] = [g * 0.5 for g in grads]
        return found

    optimizer._init_group = halved
    return optimizer


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"mode": "sync"}),
        (torch.float32, {"mode": "overlap"}),
        (torch.float32, {"mode": "delayed"}),
        (torch.float32, {"offload": "cpu"}),
        (torch.float16, {"mode": "sync"}),
    ],
)
@pytest.mark.parametrize("make", [Own, Halving, replaced])
def test_it_is_refused_and_nothing_is_left(
    make: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    optimizer = make(net().to(dtype).parameters())
    before = dict(vars(optimizer))
    with pytest.raises(UnsupportedError, match=r"not one of torch's .*attach"):
        AsyncOptimizer(optimizer, **settings)
    assert vars(optimizer) == before
    assert async_stepper_of(optimizer) is None


# step replaced.


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_replaced_on_the_instance_is_refused(when: str) -> None:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    weights = [p.detach().clone() for p in model.parameters()]

    def replace() -> None:
        optimizer.step = lambda closure=None: None

    if when == "before":
        replace()
        with pytest.raises(UnsupportedError, match=r"step was replaced.*subclass"):
            AsyncOptimizer(optimizer, model)
        return
    with AsyncOptimizer(optimizer, model) as wrapped:
        replace()
        loss_of(model, 0).backward()
        grads = [p.grad for p in model.parameters()]
        with pytest.raises(UnsupportedError, match="step was replaced"):
            wrapped.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert_same([p.detach() for p in model.parameters()], weights)


def test_a_scheduler_and_a_bound_method_do_not_replace_the_step() -> None:
    def scheduled(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=LR)
        optimizer.step = optimizer.step  # type: ignore[method-assign]  # as Accelerate leaves it
        schedulers[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return optimizer

    schedulers: dict[int, Any] = {}

    def advance(step: int, optimizer: Any, model: nn.Module) -> None:
        schedulers[id(optimizer)].step()

    assert_equal(ours(scheduled, advance), plain(scheduled, advance))


# Hooks.


def test_step_hooks_are_called_as_torch_calls_them() -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def run(wrap: Callable[[Any, nn.Module], Any]) -> list[Any]:
        model, called = net(), list[Any]()
        inner = torch.optim.SGD(model.parameters(), lr=LR)

        def note(name: str) -> Callable[..., None]:
            return lambda it, args, kwargs: called.append((name, it is inner, len(args), kwargs))

        handles = [
            register_optimizer_step_pre_hook(note("pre everywhere")),
            register_optimizer_step_post_hook(note("post everywhere")),
            inner.register_step_pre_hook(note("pre")),
            inner.register_step_post_hook(note("post")),
        ]
        optimizer = wrap(inner, model)
        loss_of(model, 0).backward()
        optimizer.step()
        getattr(optimizer, "close", lambda: None)()
        for handle in handles:
            handle.remove()
        return called

    assert run(AsyncOptimizer) == run(lambda optimizer, model: optimizer)
