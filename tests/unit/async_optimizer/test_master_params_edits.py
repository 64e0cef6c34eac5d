"""float32 masters follow what is written to the model's parameters, whenever that happens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer

MODES = [
    ("overlap", "cpu", 0),
    ("delayed", "none", 3),
    ("delayed", "cpu", 0),
    ("sync", "cpu", 0),
]


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


def write(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


def step(model: nn.Module, optimizer: AsyncOptimizer) -> None:
    """With gradients of 1: SGD takes the learning rate off each element."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[float]:
    all_of_them: Tensor = torch.cat([p.detach().flatten() for p in model.parameters()])
    return sorted(set(all_of_them.tolist()))


@pytest.mark.parametrize(("mode", "offload", "warmup"), MODES)
def test_what_is_loaded_before_the_first_step_is_what_is_stepped(
    mode: str, offload: str, warmup: int
) -> None:
    model = pair()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    with AsyncOptimizer(
        inner, model, mode=mode, offload=offload, delay_warmup_steps=warmup
    ) as optimizer:
        model.load_state_dict({k: torch.full_like(v, 5.0) for k, v in model.state_dict().items()})
        step(model, optimizer)
        optimizer.synchronize()
        assert values(model) == [4.75]


@pytest.mark.parametrize(("mode", "offload", "warmup"), MODES)
def test_an_edit_after_any_step_is_what_is_stepped_next(
    mode: str, offload: str, warmup: int
) -> None:
    """During the warm-up of ``delayed`` too."""
    model = pair()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    with AsyncOptimizer(
        inner, model, mode=mode, offload=offload, delay_warmup_steps=warmup
    ) as optimizer:
        for number in range(5):
            optimizer.synchronize()
            write(model, 10.0 * number)
            step(model, optimizer)
        optimizer.synchronize()
        assert values(model) == [39.75]


def test_an_edit_while_the_first_overlapped_step_runs_comes_after_it() -> None:
    """The first step also learns the order of use, which moves parameters between parts."""
    model = pair()
    inner = torch.optim.SGD(list(model.parameters())[::-1], lr=0.25)
    with AsyncOptimizer(inner, model, offload="cpu") as optimizer:
        step(model, optimizer)
        write(model, 50.0)
        step(model, optimizer)
        optimizer.synchronize()
        assert values(model) == [49.75]


@pytest.mark.parametrize(("mode", "offload", "warmup"), MODES)
def test_an_edit_is_not_lost_where_a_group_is_added_after_it(
    mode: str, offload: str, warmup: int
) -> None:
    model = pair()
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    with AsyncOptimizer(
        inner, model, mode=mode, offload=offload, delay_warmup_steps=warmup
    ) as optimizer:
        step(model, optimizer)
        optimizer.synchronize()
        write(model, 70.0)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        step(model, optimizer)
        optimizer.synchronize()
        assert values(model) == [69.75]
