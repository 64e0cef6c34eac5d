"""Where pickles written by earlier versions find their classes.

A pickle names a class by the module that defined it. The names below stay; most of the modules are
gone. Nothing is imported before a pickle asks for it.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["keep_old_paths", "old_names"]

OLD = {
    "accel_scaler.attach": {
        "ScaledAccelerator": "accel_scaler.integrations.accelerator:ScaledAccelerator",
        "_empty": "accel_scaler.integrations.accelerator:_empty",
    },
    "accel_scaler.culprits": {"Culprits": "accel_scaler.scaling.overflow_streak:OverflowStreak"},
    "accel_scaler.prepared": {
        "ScaledOptimizer": "accel_scaler.integrations.optimizer:ScaledOptimizer"
    },
    "accel_scaler.remedies": {"Evidence": "accel_scaler.scaling.overflow_streak:Evidence"},
    "accel_scaler.scaler": {"GradScaler": "accel_scaler.scaling.grad_scaler:GradScaler"},
    "accel_scaler.scaling.parameter_names": {
        "Culprits": "accel_scaler.scaling.overflow_streak:OverflowStreak"
    },
    "accel_scaler.telemetry.record": {"History": "accel_scaler.telemetry.history:History"},
}
"""By module: the names that pickles look up in it, and where they are now."""

THERE = {"accel_scaler.scaling.parameter_names", "accel_scaler.telemetry.record"}
"""These modules are there; they ask :func:`old_names` themselves."""


def old_names(path: str) -> Callable[[str], Any]:
    """``__getattr__`` for a module of ``OLD``."""

    def find(name: str) -> Any:
        if name not in OLD[path]:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        return pkgutil.resolve_name(OLD[path][name])

    return find


def keep_old_paths() -> None:
    """Let ``pickle`` find the modules that are gone."""
    for path in OLD.keys() - THERE:
        if path not in sys.modules:
            module = sys.modules[path] = ModuleType(path, "An old path, for pickles.")
            vars(module)["__getattr__"] = old_names(path)
