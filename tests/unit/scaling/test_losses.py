"""The losses of a window: their sum, and what is no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_scaler.scaling.losses import Losses


def noted(*values: Any) -> Losses:
    losses = Losses()
    losses.note([each if isinstance(each, Tensor) else torch.tensor(each) for each in values])
    return losses


def test_the_total_is_the_sum_of_all_that_were_scaled() -> None:
    assert noted().total() is None
    assert noted(0.1).total() == float(torch.tensor(0.1))
    assert noted(1.5, 2.0, 4.0).total() == 7.5
    half = torch.tensor([[3.5]], dtype=torch.float16)
    assert noted(half, torch.tensor(0.25, dtype=torch.float64)).total() == 3.75


def test_the_total_is_divided_as_accelerate_divides_each_loss() -> None:
    losses = Losses()
    for value in (1.5, 2.0, 4.0):
        losses.note([torch.tensor(value)], 3)
    assert losses.total() == 2.5


@pytest.mark.parametrize(
    "odd", [torch.ones(3), torch.ones(()) * 1j, torch.empty(0)], ids=["vector", "complex", "empty"]
)
def test_what_is_no_single_number_has_no_total(odd: Tensor) -> None:
    assert noted(1.0, odd, 1.0).total() is None


def test_not_finite_parts_of_a_vector_are_one_bad_loss() -> None:
    assert noted(torch.tensor([1.0, math.inf]), torch.tensor(complex(math.nan, 0)), 1.0).bad() == 2


def test_where_nothing_can_be_sent_it_is_read_when_it_is_wanted() -> None:
    losses = noted(1.0, 2.0)
    losses.send()  # of a CPU
    assert losses.is_there
    assert losses.total() == 3.0
