"""What the oldest releases that pyproject.toml allows cannot do, with or without us."""

from __future__ import annotations

from importlib.metadata import version

import pytest

UNGUARDED = "torch 2.6 to 2.11: no guard of a compiled function sees that a parameter is pending"
"""It is not compiled anew, and its operations wait, as the operations of any other code do."""


def release(library: str) -> tuple[int, ...]:
    """``(2, 6)`` of torch 2.6.0+cpu."""
    return tuple(int(part) for part in version(library).split(".")[:2])


def before_torch(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip with this torch: ``reason`` says what fails there in stock."""
    return pytest.mark.skipif(release("torch") < (major, minor), reason=reason)
