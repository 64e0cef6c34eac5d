"""The update rule in plain Python against torch's own kernel."""

from __future__ import annotations

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


def test_growth_past_float32_is_left_out() -> None:
    top = 2.0**127
    assert Rule(2.0, 0.5, 1).advance(ScaleState(top, 0), False) == ScaleState(top, 0)


def test_a_bound_that_float32_does_not_have_is_rounded_to_one_that_it_has() -> None:
    rule = Rule(2.0, 0.5, 1, min_scale=0.1, max_scale=0.3)
    assert rule.clamp(0.0) == torch.tensor(0.1).item()
    assert rule.clamp(1.0) == torch.tensor(0.3).item()


def test_a_finite_window_refills_the_hysteresis() -> None:
    rule, state, path = Rule(2.0, 0.5, 100, hysteresis=2), ScaleState(8.0, 5), []
    for found_inf in (True, False, True, True, True):
        state = rule.advance(state, found_inf)
        path.append(state.scale)
    assert path == [8.0, 8.0, 8.0, 4.0, 2.0]
