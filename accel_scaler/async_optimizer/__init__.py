"""An optimizer step beside the next forward and backward, on a thread of its own.

:class:`AsyncOptimizer` wraps one torch optimizer. Gradients are handed over at ``step()``, a
replica of the optimizer steps them on the worker, and each parameter is awaited where it is next
used. A read from outside the training step meets a hook that waits. The worker reads nothing live
and never communicates; the folder knows no Accelerate, no Trainer and no telemetry.
"""

from .delayed import holds_masters, without_previews
from .hooks import SyncHooks
from .master_params import MasterRule
from .optimizer import AsyncOptimizer, step_beside
from .preview import refuse_compensation
from .shared_parameters import (
    forget_successor,
    has_successor,
    refuse_sharing,
    refuse_successor,
    take_over,
)
from .supported_optimizers import refuse_spread, refuse_unsteppable
from .worker import Worker

__all__ = [
    "AsyncOptimizer",
    "MasterRule",
    "SyncHooks",
    "Worker",
    "forget_successor",
    "has_successor",
    "holds_masters",
    "refuse_compensation",
    "refuse_sharing",
    "refuse_spread",
    "refuse_successor",
    "refuse_unsteppable",
    "step_beside",
    "take_over",
    "without_previews",
]
