"""An optimizer step beside the next forward and backward, on a thread of its own.

:class:`AsyncOptimizer` wraps one torch optimizer. On a CPU gradients are handed over at ``step()``,
the worker steps a replica of the optimizer, and each parameter is awaited where it is next used.
The worker reads nothing live and never communicates; the folder knows no Accelerate, no Trainer and
no telemetry.
"""

from .async_stepper import AsyncStepper as AsyncStepper
from .offloaded_class import offloaded as offloaded
from .optimizer import AsyncOptimizer as AsyncOptimizer
from .pending_parameter import drop_gradients as drop_gradients
from .worker import Worker as Worker
