"""The update rule in plain Python against torch's own kernel, and its additions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scaler.scaling.update_rule import Rule, ScaleState

SCALES = st.floats(min_value=0.0, max_value=3.4028234663852886e38, width=32)
EVENTS = st.lists(st.booleans(), min_size=1, max_size=12)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    scale=SCALES,
    growth=st.floats(1.0, 1e6),
    backoff=st.floats(1e-6, 1.0),
    interval=st.integers(1, 4),
    tracker=st.integers(0, 5),
    events=EVENTS,
)
def test_advance_is_torchs_kernel_bit_for_bit(
    scale: float, growth: float, backoff: float, interval: int, tracker: int, events: list[bool]
) -> None:
    live, count = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    state, rule = ScaleState(scale, tracker), Rule(growth, backoff, interval)
    for found_inf in events:
        torch._amp_update_scale_(
            live, count, torch.tensor(float(found_inf)), growth, backoff, interval
        )
        state = rule.advance(state, found_inf)
        assert (state.scale, state.growth_tracker) == (live.item(), count.item())


@given(scale=SCALES, low=st.floats(1e-3, 1e3), high=st.floats(1e4, 1e30), events=EVENTS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_scale_stays_within_the_bounds(
    scale: float, low: float, high: float, events: list[bool]
) -> None:
    rule = Rule(3.0, 0.3, 1, min_scale=low, max_scale=high)
    state = ScaleState(scale, 0)
    for found_inf in events:
        state = rule.advance(state, found_inf)
        low32, high32 = torch.tensor(low).item(), torch.tensor(high).item()
        assert low32 <= state.scale <= high32
        assert torch.tensor(state.scale).item() == state.scale, "always exactly a float32"


def test_growth_past_float32_is_left_out() -> None:
    top = 2.0**127
    assert Rule(2.0, 0.5, 1).advance(ScaleState(top, 0), False) == ScaleState(top, 0)


def test_a_lone_overflow_keeps_the_scale_where_hysteresis_is_two() -> None:
    rule = Rule(2.0, 0.5, 100, hysteresis=2)
    first = rule.advance(ScaleState(8.0, 5), True)
    assert first == ScaleState(8.0, 0, 1)
    assert rule.advance(first, True) == ScaleState(4.0, 0, 2)


def test_every_further_overflow_of_a_run_backs_off() -> None:
    rule, state, path = Rule(2.0, 0.5, 100, hysteresis=3), ScaleState(64.0, 0), []
    for _ in range(5):
        state = rule.advance(state, True)
        path.append(state.scale)
    assert path == [64.0, 64.0, 32.0, 16.0, 8.0]


def test_a_finite_window_refills_the_hysteresis() -> None:
    rule = Rule(2.0, 0.5, 100, hysteresis=2)
    state = ScaleState(8.0, 0)
    for found_inf in (True, False, True):
        state = rule.advance(state, found_inf)
    assert state == ScaleState(8.0, 0, 1)


@pytest.mark.parametrize(
    ("low", "high", "scale", "expected"),
    [
        (None, None, 1e-30, 1e-30),
        (4.0, None, 1.0, 4.0),
        (None, 4.0, 9.0, 4.0),
        (4.0, 4.0, 9.0, 4.0),
        (0.1, None, 0.0, torch.tensor(0.1).item()),
    ],
)
def test_clamp(low: float | None, high: float | None, scale: float, expected: float) -> None:
    assert Rule(2.0, 0.5, 1, low, high).clamp(scale) == expected


def test_torchs_rule_reaches_zero_and_the_floor_stops_ours() -> None:
    floored, free = ScaleState(1.0, 0), ScaleState(1.0, 0)
    for _ in range(200):
        floored = Rule(2.0, 0.5, 1, min_scale=2.0**-10).advance(floored, True)
        free = Rule(2.0, 0.5, 1).advance(free, True)
    assert free.scale == 0.0
    assert floored.scale == 2.0**-10
    assert math.isfinite(1 / floored.scale)
