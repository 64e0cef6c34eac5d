"""``pytest -p simdev.pytest_plugin``: a test fails where nothing orders two accesses of the device.

``SIM_DELAY=p,us,p_side,us_side`` delays tasks at random: with which probability and for how long at
most, on the default stream and on the others. A test marked ``races_allowed`` breaks the order on
purpose and is not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import simdev
import torch


def _module() -> Any:
    return getattr(torch, simdev.NAME)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "races_allowed: breaks the order of streams on purpose")
    if spec := os.environ.get("SIM_DELAY"):
        p, us, p_side, us_side = map(float, spec.split(","))
        _module().set_delay(p, int(us), p_side, int(us_side))


@pytest.fixture(autouse=True)
def _no_race(request: pytest.FixtureRequest) -> Iterator[None]:
    _module().clear_races()
    yield
    _module().synchronize()
    found = _module().races()
    if found and request.node.get_closest_marker("races_allowed") is None:
        lines = "\n".join(f"  {count} x {what}\n    {where}" for what, count, where in found[:10])
        pytest.fail(f"{len(found)} pairs of accesses that nothing orders:\n{lines}", pytrace=False)
