"""Which norm is a spike."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from accel_scaler.optimizer_step.spikes import FIRST, NORMS, SpikeRule


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_a_number_is_a_limit_from_the_first_window_on(optimizer: torch.optim.Optimizer) -> None:
    rule = SpikeRule(2.0)
    assert [rule.is_spike(optimizer, norm) for norm in (1.0, 2.0, 2.1, 3.0)] == [
        *(False, False, True, True)
    ]


def test_a_factor_is_one_of_the_running_median(optimizer: torch.optim.Optimizer) -> None:
    rule, seen = SpikeRule("2.5x"), []
    norms = torch.rand(400, generator=torch.Generator().manual_seed(1)).square().tolist()
    for number, norm in enumerate(norms):
        last = seen[-NORMS:]
        expected = number >= FIRST and norm > 2.5 * statistics.median(last)
        assert rule.is_spike(optimizer, norm) == expected, number
        seen.append(norm)


def test_windows_without_a_gradient_make_no_median(optimizer: torch.optim.Optimizer) -> None:
    """A part that takes part in every third loss has zero gradients in the others."""
    rule = SpikeRule("2x")
    assert not any(rule.is_spike(optimizer, 1.0 * (n % 3 == 0)) for n in range(3 * FIRST))
    assert [rule.is_spike(optimizer, norm) for norm in (0.0, 2.0, 2.1)] == [False, False, True]


def test_each_optimizer_has_its_own_norms(optimizer: torch.optim.Optimizer) -> None:
    rule, other = SpikeRule("2x"), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(FIRST):
        assert not rule.is_spike(optimizer, 1.0)
        assert not rule.is_spike(other, 100.0)
    assert rule.is_spike(optimizer, 3.0)
    assert not rule.is_spike(other, 150.0)
