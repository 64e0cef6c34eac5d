"""``pytest -p scales_too_much``: a wrong scaler, to see that tests which run with it fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import accel_scaler
from accel_scaler.integrations import stock_scaler


class ScalesTooMuch(accel_scaler.GradScaler):
    """Half of what it scales by is never unscaled."""

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        return scaled * 2 if self.is_enabled() else scaled


@pytest.fixture(autouse=True, scope="session")
def wrong() -> Iterator[None]:
    """In the place of ours, for torch's names and for Accelerators."""
    right = accel_scaler.GradScaler
    places: list[Any] = [accel_scaler, stock_scaler]
    for place in places:
        assert place.GradScaler is right
        place.GradScaler = ScalesTooMuch
    yield
    for place in places:
        place.GradScaler = right
