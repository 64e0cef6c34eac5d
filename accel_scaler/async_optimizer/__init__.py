"""An optimizer step beside the next forward and backward, on a thread of its own.

:class:`AsyncOptimizer` wraps one torch optimizer. Gradients are handed over at ``step()``, a
replica of the optimizer steps them on the worker, and each parameter is awaited where it is next
used. A read from outside the training step meets a hook that waits. The worker reads nothing live
and never communicates; the folder knows no Accelerate, no Trainer and no telemetry.
"""

from .delayed import holds_masters as holds_masters
from .hooks import SyncHooks as SyncHooks
from .master_params import MasterRule as MasterRule
from .optimizer import AsyncOptimizer as AsyncOptimizer, step_beside as step_beside
from .preview import refuse_compensation as refuse_compensation
from .shared_parameters import (
    refuse_replaced_owner as refuse_replaced_owner,
    refuse_sharing as refuse_sharing,
    replaced as replaced,
    take_over as take_over,
)
from .supported_optimizers import (
    is_splittable as is_splittable,
    refuse_spread as refuse_spread,
    refuse_unsteppable as refuse_unsteppable,
)
from .worker import Worker as Worker
