"""fp16 training in Hugging Face Accelerate: a thread-aware GradScaler, attached in one line.

>>> from accel_scaler import attach
>>> accelerator = attach(Accelerator(mixed_precision="fp16"))  # a raw Accelerate loop
>>> trainer = attach(Trainer(...))                             # existing Trainer code

Importing starts no thread, patches nothing and leaves the environment as it is.
"""

from .async_optimizer import AsyncOptimizer
from .config import ScalerConfig
from .errors import (
    AccelScalerError,
    ConfigError,
    OrderError,
    OverflowStreakError,
    StepError,
    UnsupportedError,
)
from .integrations import ScaledAccelerator, attach, detach
from .old_paths import keep_old_paths
from .scaling import GradScaler
from .version import __version__ as __version__

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

keep_old_paths()
