"""Where pickles written before the package had folders find their classes.

A pickle names a class by the module that defined it. The names below stay; the modules are gone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .integrations.accelerator import ScaledAccelerator, _empty
from .integrations.optimizer import ScaledOptimizer
from .scaling.grad_scaler import GradScaler
from .scaling.overflow_streak import Evidence, OverflowStreak

__all__ = ["keep_old_paths"]

OLD: dict[str, dict[str, Any]] = {
    "accel_scaler.attach": {"ScaledAccelerator": ScaledAccelerator, "_empty": _empty},
    "accel_scaler.culprits": {"Culprits": OverflowStreak},
    "accel_scaler.prepared": {"ScaledOptimizer": ScaledOptimizer},
    "accel_scaler.remedies": {"Evidence": Evidence},
    "accel_scaler.scaler": {"GradScaler": GradScaler},
}


def keep_old_paths() -> None:
    """Let ``pickle`` import the old modules, each with what pickles hold of it and nothing else."""
    for path, names in OLD.items():
        module = ModuleType(path, "An old path, for pickles.")
        vars(module).update(names)
        sys.modules[path] = module
