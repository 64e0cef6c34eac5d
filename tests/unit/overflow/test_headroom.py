"""How far gradients are from an overflow: what is looked at, and what raises or lifts the limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from accel_scaler.overflow.headroom import Headroom

MOST = torch.finfo(torch.float16).max


def gradient(*values: float) -> list[nn.Parameter]:
    p = nn.Parameter(torch.zeros(len(values)))
    p.grad = torch.tensor(values)
    return [p]


def limit_of(room: Headroom) -> float:
    """The power of two, or ``MOST``, that a gradient has to be below."""
    sizes = [*(2.0**n for n in range(16)), MOST]
    return next(size for size in sizes if not room.is_enough_for(size))


@pytest.mark.parametrize(
    ("interval", "windows", "level"),
    [(1, (1, 2, 3), 6.0), (64, (1, 2, 3), 4.0), (2000, (61, 62, 63), 4.0), (2000, (1, 2), 0.0)],
)
def test_the_level_is_the_largest_unscaled_of_the_windows_that_are_looked_at(
    interval: int, windows: tuple[int, ...], level: float
) -> None:
    room = Headroom(interval)
    for number, window in enumerate(windows, 1):
        room.look(gradient(-1.0, -2.0 * number * 8.0), window, 8.0)
        room.look(gradient(math.inf), window, 8.0)
    assert room.level() == level
    assert room.level() == 0.0  # since the call before


def test_an_overflow_sets_the_limit_until_larger_gradients_were_finite() -> None:
    room = Headroom(1)
    assert limit_of(room) == MOST
    room.has_overflowed(gradient(3.0, -64.0), 4.0)  # these are of a fourth of the scale
    assert limit_of(room) == 256.0
    room.has_overflowed(gradient(512.0), 1.0)  # not above the one before
    assert limit_of(room) == 256.0
    for size, limit in ((255.0, 256.0), (math.inf, 256.0), (256.0, MOST)):
        room.look(gradient(size), 0, 16.0)
        room.level()
        assert limit_of(room) == limit
