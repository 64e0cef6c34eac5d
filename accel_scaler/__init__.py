"""fp16 training in Hugging Face Accelerate: a thread-aware GradScaler, attached in one line.

>>> from accel_scaler import attach
>>> accelerator = attach(Accelerator(mixed_precision="fp16"))  # a raw Accelerate loop
>>> trainer = attach(Trainer(...))                             # existing Trainer code

Importing starts no thread, patches nothing and leaves the environment as it is; torch and
Accelerate are imported by the first name that needs them.
"""

from typing import TYPE_CHECKING

from .errors import (
    AccelScalerError,
    ConfigError,
    OrderError,
    OverflowStreakError,
    StepError,
    UnsupportedError,
)
from .late_names import late_names
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .async_optimizer import AsyncOptimizer
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
]

HOMES = {
    "AsyncOptimizer": "async_optimizer",
    "GradScaler": "scaling",
    "ScaledAccelerator": "integrations",
    "ScalerConfig": "config",
    "attach": "integrations",
    "detach": "integrations",
}
"""Of the names that cost an import, that of torch most: the command prints its help without it."""

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__ = late_names(__name__, HOMES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
