"""Gradients in bulk, against plain loops and torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel_scaler.scaling.checks import check_norms
from accel_scaler.scaling.gradients import (
    LARGE,
    NORM_BLOCK,
    Gathered,
    is_uniform,
    match_layout,
    multiply_in_place,
    norm_of,
)

INF, NAN = float("inf"), float("nan")


def plain_norm(grads: list[Tensor]) -> float:
    """The total norm with nothing but Python floats."""
    return math.sqrt(sum(x * x for grad in grads for x in grad.flatten().tolist()))


def plain_nonfinite(grads: list[Tensor]) -> list[int]:
    """Indices of gradients that hold an inf or a NaN, one element at a time."""
    return [
        i for i, g in enumerate(grads) if not all(math.isfinite(x) for x in g.flatten().tolist())
    ]


def torchs_total(grads: list[Tensor], scale: float) -> Tensor:
    """What ``clip_grad_norm_`` returns for gradients that were unscaled first."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g * (1.0 / scale)
    return torch.nn.utils.clip_grad_norm_(params, INF)


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes=SIZES, power=st.integers(-20, 30), seed=st.integers(0, 99))
def test_the_total_is_torchs_bit_for_bit(sizes: list[int], power: int, seed: int) -> None:
    scale = 2.0**power
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(n, generator=generator) * scale for n in sizes]
    norms = check_norms(grads, 1.0 / scale)
    assert norms.total is not None
    assert torch.equal(norms.total, torchs_total(grads, scale))
    assert norms.host_total == norms.total.item()
    assert norms.overflowed == ()
    assert norms.host_total == pytest.approx(plain_norm(grads) / scale, rel=1e-5)


@pytest.mark.parametrize("order", [(LARGE, 3, LARGE + 5, 70), (5, LARGE), (LARGE,), (9, 8)])
def test_large_and_small_gradients_keep_their_order(order: tuple[int, ...]) -> None:
    grads = [torch.randn(n) * 1024 for n in order]
    norms = check_norms(grads, 1 / 1024, keep_each=True)
    assert norms.total is not None
    assert norms.each is not None
    assert torch.equal(norms.total, torchs_total(grads, 1024.0))
    assert torch.equal(norms.each, torch.stack([g.norm() for g in grads]) / 1024)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_an_overflow_is_found_wherever_it_is(bad: int, value: float) -> None:
    grads = [torch.ones(4), torch.ones(LARGE), torch.ones(2, 3), torch.ones(LARGE + 1)]
    grads[bad].view(-1)[-1] = value
    norms = check_norms(grads, 0.5)
    assert norms.total is None
    assert norms.overflowed == (bad,) == tuple(plain_nonfinite(grads))
    assert math.isnan(norms.host_total)


@pytest.mark.parametrize("size", [8, LARGE])
def test_finite_gradients_whose_norm_leaves_float32_are_no_overflow(size: int) -> None:
    grads = [torch.full((size,), 1e30), torch.ones(3)]
    norms = check_norms(grads, 1.0)
    assert norms.total is None
    assert norms.overflowed == ()
    assert plain_nonfinite(grads) == []


def test_a_total_is_never_missing_a_gradient() -> None:
    """The sum of the small norms leaves float32's range, each of them does not."""
    small = [torch.tensor([3e38]), torch.tensor([3e38])]
    large = torch.full((LARGE,), 2.0**50)
    norms = check_norms([*small, large], 2.0**-127)
    assert norms.overflowed == ()
    if norms.total is not None:
        whole = plain_norm([g * 2.0**-127 for g in (*small, large)])
        assert norms.host_total == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [NORM_BLOCK, 2 * NORM_BLOCK + 5])
def test_the_norm_of_low_precision_is_taken_in_float32(dtype: torch.dtype, size: int) -> None:
    """In blocks of float32 each; squares beyond float16's range and below it count."""
    grad = (torch.randn(size, 3) * 1000).to(dtype).t()
    grad[1] = 1e-6
    expected = float(grad.double().norm())
    assert float(norm_of(grad, 2.0)) == pytest.approx(expected, rel=1e-5)
    assert float(norm_of(grad, INF)) == float(grad.abs().max())
    norms = check_norms([grad, torch.ones(3, dtype=dtype)], 0.25, keep_each=True)
    assert norms.host_total == pytest.approx(math.hypot(expected, 3**0.5) / 4, rel=1e-5)
    grad[2, -1] = NAN
    assert check_norms([grad], 0.25).overflowed == (0,)


def test_uniform_gradients() -> None:
    assert is_uniform([torch.ones(2), torch.ones(3, 3).t()])
    assert not is_uniform([])
    assert not is_uniform([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert not is_uniform([torch.ones(2), torch.ones(2).to_sparse()])
    assert not is_uniform([torch.ones(2, device="meta"), torch.ones(2)])


def test_gradients_are_gathered_as_they_are_now() -> None:
    given, none = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    given.grad = before = torch.ones(2)
    gathered = Gathered([none, given])
    assert len(gathered.params) == 1
    assert gathered.params[0] is given
    assert is_uniform(gathered)
    assert gathered.holds([given.grad])
    given.grad = torch.ones(2)
    assert gathered.grads[0] is before
    assert not gathered.holds([given.grad])
    assert not gathered.holds([before, None])
    assert not is_uniform(Gathered([none]))


def test_match_layout_keeps_values_and_touches_no_matching_gradient() -> None:
    same, other, none = (nn.Parameter(torch.zeros(3, 4)) for _ in range(3))
    values = torch.arange(12.0).reshape(3, 4)
    same.grad = kept = values.clone()
    other.grad = values.t().contiguous().t()
    assert other.grad.stride() != other.stride()
    match_layout([same, other, none], {})
    assert same.grad is kept
    assert none.grad is None
    assert other.grad.stride() == other.stride()
    assert torch.equal(other.grad, values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [2.0**-26, 0.3])
def test_a_factor_is_not_rounded_to_the_gradients_dtype(dtype: torch.dtype, factor: float) -> None:
    grad = torch.tensor([3.0, 2.0**14, 1000.0], dtype=dtype)
    expected = (grad.float() * factor).to(dtype)
    version = grad._version
    multiply_in_place([grad], factor)
    assert torch.equal(grad, expected)
    assert grad._version > version
