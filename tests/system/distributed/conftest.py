"""Fixtures for this folder, whose references are torch's own float16 products."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def references_of_torch(torchs_own_products: None) -> None:
    """See ``tests/conftest.py``."""
