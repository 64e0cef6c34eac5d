"""Norms that clips and checks took of one window: which of them counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from accel_scaler.scaling.grad_norms import GradNorm, GradNorms

INF = math.inf


def parameters(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def measured(*found: GradNorm) -> GradNorms:
    grad_norms = GradNorms()
    for each in found:
        grad_norms.add(each)
    return grad_norms


def test_norms_of_disjoint_parameters_are_one_norm() -> None:
    a, b = parameters(2)
    assert measured(GradNorm([a], 3.0), GradNorm([b], 4.0)).total == 5.0
    largest = measured(GradNorm([a], 3.0, norm_type=INF))
    assert (largest.total, largest.of([a])) == (3.0, None), "a 2-norm alone is one to judge by"
    assert measured(GradNorm([a], 3.0), GradNorm([b], 4.0, norm_type=1.0)).total is None
    assert measured().total is None


def test_a_check_is_replaced_by_the_clip_after_it_and_gives_its_norms() -> None:
    a, b = parameters(2)
    each = torch.tensor([3.0, 4.0])
    (found,) = measured(GradNorm([a, b], 5.0, each), GradNorm([b, a], 4.0, None, 1.0, INF))
    assert (found.total, found.max_norm) == (4.0, 1.0)
    assert found.each is each
    assert list(map(id, found.parameters)) == [id(a), id(b)]


def test_the_hardest_of_several_clips_is_told() -> None:
    (a,) = parameters(1)
    found = measured(GradNorm([a], 10.0, None, 5.0), GradNorm([a], 5.0, None, 1.0))
    assert found.total == 10.0
    assert found.clip == (1.0, pytest.approx(0.2, rel=1e-5))
    wide = measured(GradNorm([a], 10.0, None, 5.0), GradNorm([a], 5.0, None, 50.0))
    assert wide.clip == (5.0, pytest.approx(0.5, rel=1e-5))


def test_which_of_several_count() -> None:
    """A clip before a check, one of many parameters before one of few, the first of the same."""
    a, b, c, d = parameters(4)
    both = GradNorm([a, b, c], 5.0, None, 1.0)
    found = measured(GradNorm([a], 3.0, None, 9.0), GradNorm([b], 4.0), GradNorm([d], 2.0), both)
    assert [m.total for m in found] == [5.0, 2.0]
    assert [m.total for m in found.clips] == [3.0, 5.0]
    part = GradNorm([a], 3.0, None, 9.0)
    found = measured(GradNorm([a, b], 5.0, torch.tensor([3.0, 4.0])), part)
    assert list(found) == [part]
    found.forget([b])
    assert found.total == 3.0, "of the part, which does not have b"
    found.forget()
    assert found.total is None
