"""An optimizer step beside the next forward and backward, on a thread of its own.

:class:`AsyncOptimizer` wraps one torch optimizer. Gradients are handed over at ``step()``, a
replica of the optimizer steps them on the worker, and each parameter is awaited where it is next
used. A read from outside the training step meets a hook that waits. The worker reads nothing live
and never communicates; the folder knows no Accelerate, no Trainer and no telemetry.
"""

from .delayed import holds_masters
from .hooks import SyncHooks
from .master_params import MasterRule
from .optimizer import AsyncOptimizer, step_beside
from .preview import refuse_compensation
from .shared_parameters import (
    refuse_replaced_owner,
    refuse_sharing,
    replaced,
    take_over,
)
from .supported_optimizers import is_splittable, refuse_spread, refuse_unsteppable
from .worker import Worker

__all__ = [
    "AsyncOptimizer",
    "MasterRule",
    "SyncHooks",
    "Worker",
    "holds_masters",
    "is_splittable",
    "refuse_compensation",
    "refuse_replaced_owner",
    "refuse_sharing",
    "refuse_spread",
    "refuse_unsteppable",
    "replaced",
    "step_beside",
    "take_over",
]
