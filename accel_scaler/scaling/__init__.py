"""The scale: its windows, its update rule, and the gradients that both depend on.

Losses come in through :class:`GradScaler` and leave multiplied by the scale of their window;
gradients come back and leave unscaled, with a verdict from all ranks. A :class:`Window` holds
everything known of them until the scale is updated. The folder knows no Accelerate, no file and
no step mode; it has the only collectives of the package.
"""

from .checks import (
    NormCheck as NormCheck,
    SentCheck as SentCheck,
    can_send as can_send,
    check_norms as check_norms,
    send_flag as send_flag,
    send_norms as send_norms,
)
from .collectives import (
    add_norms as add_norms,
    gather_objects as gather_objects,
    has_ranks as has_ranks,
    pause_before_the_end as pause_before_the_end,
    is_sharded as is_sharded,
    is_rank_0 as is_rank_0,
    reduce_partial_gradients as reduce_partial_gradients,
    whole as whole,
)
from .grad_norms import GradNorm as GradNorm
from .grad_scaler import (
    GradScaler as GradScaler,
    call_fused as call_fused,
    nothing_found as nothing_found,
)
from .gradients import (
    LOW_PRECISION as LOW_PRECISION,
    MAX_NAMED as MAX_NAMED,
    SMALL as SMALL,
    Gathered as Gathered,
    are_same as are_same,
    by_mesh as by_mesh,
    clip_coefficient as clip_coefficient,
    find_nonfinite as find_nonfinite,
    first_nonfinite as first_nonfinite,
    first_version as first_version,
    gradients_of as gradients_of,
    is_power_of_two as is_power_of_two,
    is_uniform as is_uniform,
    local as local,
    match_layout as match_layout,
    nonzero as nonzero,
    norm_of as norm_of,
    parameters_of as parameters_of,
    reciprocal as reciprocal,
    run_on_one_thread as run_on_one_thread,
    total_norm as total_norm,
)
from .losses import Losses as Losses
from .origin import Origin as Origin, Pair as Pair
from .parameter_names import MAX_NAMES as MAX_NAMES, ParameterNames as ParameterNames
from .ranks import is_worldwide as is_worldwide
from .thread_windows import WAIT_LIMIT_S as WAIT_LIMIT_S
from .window import (
    DeferredUnscale as DeferredUnscale,
    OptimizerRecord as OptimizerRecord,
    Snapshot as Snapshot,
    Window as Window,
    stepped as stepped,
)
