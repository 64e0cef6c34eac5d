"""The scale: its windows, its update rule, and what both need to know of gradients.

Losses come in through :class:`GradScaler` and leave multiplied by the scale of their window;
gradients come back and leave unscaled, with a verdict from all ranks. A :class:`Window` holds all
that is known from the first backward to the update of the scale. The folder knows no Accelerate,
no file and no step mode; it has the only collectives of the package.
"""

from .collectives import (
    agree_on_overflow,
    gather_objects,
    is_sharded,
    reduce_partial_gradients,
    whole,
)
from .fused_call import call_fused, nothing_found
from .grad_norms import GradNorm
from .grad_scaler import GradScaler
from .gradients import (
    LOW_PRECISION,
    SMALL,
    NormCheck,
    check_norms,
    clip_coefficient,
    complex_refused,
    first_nonfinite,
    gradients_of,
    is_power_of_two,
    is_uniform,
    laid_out_otherwise,
    local,
    match_layout,
    nonfinite,
    nonzero,
    parameters_of,
    reciprocal,
    run_on_one_thread,
)
from .losses import Losses
from .origin import Origin, Pair
from .owners import Owners
from .parameter_names import MAX_NAMES, ParameterNames
from .thread_windows import WAIT_LIMIT_S
from .window import (
    DeferredUnscale,
    OptimizerRecord,
    Snapshot,
    StillScaled,
    Window,
    raise_mixed,
    stepped,
)

__all__ = [
    "LOW_PRECISION",
    "MAX_NAMES",
    "SMALL",
    "WAIT_LIMIT_S",
    "DeferredUnscale",
    "GradNorm",
    "GradScaler",
    "Losses",
    "NormCheck",
    "OptimizerRecord",
    "Origin",
    "Owners",
    "Pair",
    "ParameterNames",
    "Snapshot",
    "StillScaled",
    "Window",
    "agree_on_overflow",
    "call_fused",
    "check_norms",
    "clip_coefficient",
    "complex_refused",
    "first_nonfinite",
    "gather_objects",
    "gradients_of",
    "is_power_of_two",
    "is_sharded",
    "is_uniform",
    "laid_out_otherwise",
    "local",
    "match_layout",
    "nonfinite",
    "nonzero",
    "nothing_found",
    "parameters_of",
    "raise_mixed",
    "reciprocal",
    "reduce_partial_gradients",
    "run_on_one_thread",
    "stepped",
    "whole",
]
