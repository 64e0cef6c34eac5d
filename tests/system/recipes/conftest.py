"""Recipes as modules, found as their own folder would find them, on a CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from recipe_support import RECIPES


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture(scope="session")
def recipe() -> Iterator[Callable[[str], ModuleType]]:
    """By its name."""
    pytest.importorskip("datasets")
    sys.path.insert(0, str(RECIPES))
    yield importlib.import_module
    sys.path.remove(str(RECIPES))
    for path in RECIPES.glob("*.py"):
        sys.modules.pop(path.stem, None)
