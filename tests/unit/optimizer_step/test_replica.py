"""Optimizers that cannot be stepped by a copy are refused; what a step calls beside itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from references import loss_of, network
from support import same
from torch import nn

from accel_scaler import AsyncOptimizer, UnsupportedError
from accel_scaler.optimizer_step import MasterRule, Replica
from accel_scaler.optimizer_step import replica as replica_module
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.1


class Own(torch.optim.Optimizer):
    """Unknown to torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})


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
        (torch.float32, {"step_mode": "sync"}),
        (torch.float32, {}),
        (torch.float16, {"step_mode": "sync"}),
    ],
)
@pytest.mark.parametrize("make", [Own, Halving, replaced])
def test_it_is_refused_and_nothing_is_left(
    make: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    optimizer = make(network().to(dtype).parameters())
    before = dict(vars(optimizer))
    with pytest.raises(UnsupportedError, match=r"not among the optimizers of torch .*attach"):
        AsyncOptimizer(optimizer, **settings)
    assert vars(optimizer) == before
    assert async_stepper_of(optimizer) is None


# step replaced.


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_replaced_on_the_instance_is_refused(when: str) -> None:
    model = network()
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
    assert same([p.detach() for p in model.parameters()], weights)


# Hooks.


def test_step_hooks_are_called_as_torch_calls_them() -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def run(wrap: Callable[[Any, nn.Module], Any]) -> list[Any]:
        model, called = network(), list[Any]()
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


def make_replica(optimizer: torch.optim.Optimizer) -> Replica:
    replica = Replica(optimizer, MasterRule(frozenset()))
    replica.follow()
    return replica


def test_parts_cover_each_parameter_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "SMALLEST_PART", 24)
    sizes = (4, 4, 1, 9, 2)
    params = [nn.Parameter(torch.ones(n)) for n in sizes]
    optimizer = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:], "lr": 1.0}])
    replica = make_replica(optimizer)

    def numels() -> list[list[int]]:
        return [[pair.param.numel() for pair in part.pairs] for part in replica.parts]

    assert numels() == [[4, 4], [1], [9, 2]]
    assert [(part.start, part.end) for part in replica.parts] == [(0, 2), (2, 3), (3, 5)]
    assert [part.group for part in replica.parts] == [0, 0, 1]
    replica.order_by([params[4], params[0]])
    assert numels() == [[9, 2], [4, 4], [1]]
    assert all(
        a is b for a, b in zip(replica.params, [params[i] for i in (3, 4, 0, 1, 2)], strict=True)
    )
    replica.follow()  # the order stays
    assert numels() == [[9, 2], [4, 4], [1]]
