"""Names of a package that are imported when somebody asks for them (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["late_names"]


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` for a package: finds each name of ``homes`` in the module that it stands for.

    Args:
        package: its ``__name__``.
        homes: name: the module in the package that has it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
