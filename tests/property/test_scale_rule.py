"""Bounds and hysteresis of the loss scale follow ten plain lines, whatever the verdicts."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler import GradScaler

QUIET = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def modelled(
    verdicts: list[bool], interval: int, low: float | None, high: float | None, hysteresis: int
) -> list[tuple[float, bool]]:
    """The scale that each window sees after it, and whether it steps, in ten plain lines."""
    scale, good, bad, out = 1024.0, 0, 0, []
    for overflowed in verdicts:
        good, bad = (0, bad + 1) if overflowed else (good + 1, 0)
        if overflowed and bad >= hysteresis:
            scale *= 0.5
        if good == interval:
            scale, good = scale * 2.0, 0
        scale = scale if low is None else max(scale, low)
        scale = scale if high is None else min(scale, high)
        out.append((scale, not overflowed))
    return out


@settings(QUIET, max_examples=200)
@given(
    verdicts=st.lists(st.booleans(), max_size=25),
    interval=st.integers(1, 4),
    low=st.sampled_from([None, 256.0, 1024.0, 300.0]),
    high=st.sampled_from([None, 4096.0, 1024.0, 3000.0]),
    hysteresis=st.integers(1, 3),
    fused=st.booleans(),
)
def test_bounds_and_hysteresis_follow_the_model(
    verdicts: list[bool],
    interval: int,
    low: float | None,
    high: float | None,
    hysteresis: int,
    fused: bool,
) -> None:
    scaler = GradScaler(
        "cpu",
        init_scale=1024.0,
        growth_interval=interval,
        min_scale=low,
        max_scale=high,
        hysteresis=hysteresis,
    )
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    for overflowed, (scale, stepped) in zip(
        verdicts, modelled(verdicts, interval, low, high, hysteresis), strict=True
    ):
        before = p.detach().clone()
        scaler.scale(p.sum()).backward()
        if overflowed:
            assert p.grad is not None
            p.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        assert torch.equal(p, before - 1.0 if stepped else before)
