"""Where pickles written by earlier versions find their classes.

A pickle names a class by the module that defined it. The names below stay; most of the modules are
gone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .integrations.accelerator import ScaledAccelerator, _empty
from .integrations.optimizer import ScaledOptimizer
from .scaling.grad_scaler import GradScaler
from .scaling.overflow_streak import Evidence, OverflowStreak
from .telemetry import History

__all__ = ["keep_old_paths"]

OLD: dict[str, dict[str, Any]] = {
    "accel_scaler.attach": {"ScaledAccelerator": ScaledAccelerator, "_empty": _empty},
    "accel_scaler.culprits": {"Culprits": OverflowStreak},
    "accel_scaler.prepared": {"ScaledOptimizer": ScaledOptimizer},
    "accel_scaler.remedies": {"Evidence": Evidence},
    "accel_scaler.scaler": {"GradScaler": GradScaler},
    "accel_scaler.scaling.parameter_names": {"Culprits": OverflowStreak},
    "accel_scaler.telemetry.record": {"History": History},
}


def keep_old_paths() -> None:
    """Let ``pickle`` find the names under their old paths."""
    for path, names in OLD.items():
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path, "An old path, for pickles.")
        vars(sys.modules[path]).update(names)
