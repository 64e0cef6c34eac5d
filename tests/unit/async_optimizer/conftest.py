"""What tests of the asynchronous optimizer ask of its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import async_support
import pytest


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[None]:
    """The worker updates when somebody waits; in sync there is nobody to wait."""
    parameters = getattr(request.node, "callspec", None)
    mode = parameters.params.get("mode") if parameters else None
    with nullcontext() if mode == "sync" else async_support.lazy():
        yield
