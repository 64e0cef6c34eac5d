"""The optimizer step of Accelerate: checked, overlapped, explained; in fp16 scaled, too.

>>> from accel_scaler import attach
>>> accelerator = attach(Accelerator(mixed_precision="bf16"))  # a raw Accelerate loop
>>> trainer = attach(Trainer(...))                             # existing Trainer code

The import starts no thread, patches nothing and leaves the environment as it is; torch and
Accelerate are imported with the first name that needs them.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from .console import Sender
from .errors import (
    AccelScalerError,
    ConfigError,
    OrderError,
    OverflowStreakError,
    StepError,
    UnsupportedError,
)
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .async_optimizer import AsyncOptimizer, offloaded
    from .config import ScalerConfig
    from .integrations import ScaledAccelerator, attach, detach
    from .scaling import GradScaler

__all__ = [
    "AccelScalerError",
    "AsyncOptimizer",
    "ConfigError",
    "GradScaler",
    "OrderError",
    "OverflowStreakError",
    "ScaledAccelerator",
    "ScalerConfig",
    "StepError",
    "UnsupportedError",
    "attach",
    "detach",
    "offloaded",
]

LAZY = {
    "AsyncOptimizer": "async_optimizer",
    "GradScaler": "scaling",
    "ScaledAccelerator": "integrations",
    "ScalerConfig": "config",
    "attach": "integrations",
    "detach": "integrations",
    "offloaded": "async_optimizer",
}
"""Names that are imported on first use (PEP 562), and their modules."""

logging.getLogger("accel_scaler").addHandler(Sender(logging.WARNING))

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
