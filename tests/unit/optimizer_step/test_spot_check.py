"""Edits through ``.data``: which are found, and that from then on all is to be compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_scaler.optimizer_step.arena import Arena
from accel_scaler.optimizer_step.masters import ParameterPair
from accel_scaler.optimizer_step.spot_check import MAX_WHOLE, STRIDE, SpotCheck

SHAPES = (3,), (), (MAX_WHOLE,), (100, STRIDE), (7, 9), (MAX_WHOLE + 1,)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def pairs(request: pytest.FixtureRequest) -> list[ParameterPair]:
    torch.manual_seed(0)
    return [pair_of(torch.randn(shape).to(request.param)) for shape in SHAPES]


def pair_of(target: torch.Tensor) -> ParameterPair:
    return ParameterPair(nn.Parameter(target), 0, (True, False))


def check_of(pairs: list[ParameterPair]) -> SpotCheck:
    for pair in pairs:
        arena = Arena([pair.target], torch.device("cpu"), True)
        pair.place(arena, 0, arena.allocate("master"))
    return SpotCheck(pairs)


@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_an_edit_is_found_and_from_then_on_all_is_to_be_compared(
    pairs: list[ParameterPair], place: int
) -> None:
    check = check_of(pairs)
    assert not check.find()
    pairs[place].param.data.mul_(2.0)
    with torch.autocast("cpu", torch.float16):  # a forward begins: torch joins no bfloat16 there
        assert check.find()
    pairs[place].refresh()
    assert check.may_miss
    assert not check_of(pairs).find()


@pytest.mark.parametrize("size", [100 * STRIDE, MAX_WHOLE + 1, 20 * STRIDE - 1])
def test_any_run_of_so_many_elements_is_found(size: int) -> None:
    pair = pair_of(torch.zeros(size, dtype=torch.float16))
    for start in (*range(0, size - STRIDE, 499), size - STRIDE):
        check = check_of([pair])
        pair.param.data[start : start + STRIDE].fill_(7.0)
        assert check.find(), start
        pair.param.data.zero_()


def test_a_nan_is_no_edit_and_samples_do_not_tell_of_a_view_with_gaps() -> None:
    matrix = torch.zeros(200, 2 * STRIDE, dtype=torch.float16)
    matrix[3, 3] = float("nan")
    assert not check_of([pair_of(matrix.t())]).find()
    assert check_of([pair_of(matrix[:, :5])]).may_miss
