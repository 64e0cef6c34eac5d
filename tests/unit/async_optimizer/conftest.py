"""What tests of the asynchronous optimizer ask of its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import async_support
import pytest

from accel_scaler.async_optimizer import replica


@pytest.fixture
def one_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each parameter, as in a model of a useful size."""
    # In the order in which a test's own patches are taken back.
    monkeypatch.setattr(replica, "SMALLEST_PART", 1)
    monkeypatch.setattr(replica, "PARTS", 1 << 30)


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[None]:
    """The worker updates when somebody waits; in sync there is nobody to wait."""
    parameters = getattr(request.node, "callspec", None)
    mode = parameters.params.get("mode") if parameters else None
    with nullcontext() if mode == "sync" else async_support.lazy():
        yield


@pytest.fixture(autouse=True)
def references_of_torch(torchs_own_products: None) -> None:
    """See ``tests/conftest.py``."""
