"""The private names of torch and Accelerate that the package leans on, all of them.

A release may drop any of these without a word. ``test_private_names.py`` looks each one up in the
versions installed, and walks the package, the recipes and the benchmarks for names missing here.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR


def scaler() -> Any:
    """torch.amp.GradScaler, in use."""
    stock = torch.amp.GradScaler("cpu", init_scale=2.0)
    stock.scale(torch.ones(1))
    return stock


def scheduled() -> Any:
    """An optimizer with a scheduler, stepped."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


def scheduled_step() -> Any:
    """The step() that a scheduler puts on an optimizer."""
    return scheduled().step


def fused_adam() -> Any:
    """An Adam with fused=True."""
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=True)


def accelerator() -> Any:
    """accelerate.Accelerator, made."""
    return Accelerator(cpu=True)


def prepared() -> Any:
    """A model prepared under mixed precision."""
    return Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(1, 1))


def flattened() -> Any:
    """A parameter of FSDP1."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(p := nn.Parameter(torch.zeros(1)))
    return p


def parallel() -> Any:
    """A model under DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    finally:
        dist.destroy_process_group()


def compiled() -> Any:
    """A function given to torch.compile."""
    return torch.compile(lambda x: x)


def module() -> Any:
    """A module."""
    return nn.Linear(1, 1)


def compiled_module() -> Any:
    """A module given to torch.compile."""
    return torch.compile(nn.Linear(1, 1))


def named_tuple() -> Any:
    """A namedtuple."""
    return namedtuple("Pair", "a b")(1, 2)


def launch_parser() -> Any:
    """The parser of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def replica() -> Any:
    """What DataParallel runs on each device."""
    return torch.nn.Linear(1, 1)._replicate_for_data_parallel()  # type: ignore[no-untyped-call]


PRIVATE: dict[str, dict[str | Callable[[], Any], tuple[str, ...]]] = {
    "torch": {
        scaler: (
            *("_scale", "_growth_tracker", "_init_scale", "_init_growth_tracker", "_growth_factor"),
            *("_backoff_factor", "_growth_interval", "_enabled", "_device"),
            *("_per_optimizer_states", "_lazy_init_scale_growth_tracker"),
            *("_check_scale_growth_tracker", "_check_inf_per_device", "_unscale_grads_"),
        ),
        "torch.Tensor": ("_version", "_values"),
        "torch": (
            *("_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_", "_foreach_norm"),
            *("_foreach_mul_", "_foreach_copy_", "_fused_adam_", "_fused_adamw_"),
            *("_fused_sgd_", "_C", "_compile", "_guards", "_dynamo", "_functorch", "_subclasses"),
        ),
        "torch._C": (
            *(
                "_storage_Use_Count",
                "_storage_address",
                "DisableTorchFunctionSubclass",
                "_dynamo",
                "_functorch",
            ),
            *("_is_tracing", "_current_graph_task_id"),
        ),
        "torch._C._functorch": ("peek_interpreter_stack", "is_legacy_batchedtensor"),
        "torch._guards": ("CompileContext",),
        "torch._compile": ("_disable_dynamo",),
        "torch._dynamo": ("OptimizedModule",),
        "torch._dynamo.convert_frame": ("compile_lock", "FRAME_COUNTER"),
        "torch._subclasses": ("FakeTensor",),
        "torch.nn.Module": ("_call_impl", "_compiled_call_impl"),
        "torch.ops.aten": ("_addmm_activation", "_scaled_dot_product_flash_attention_for_cpu"),
        "torch.ops.aten.add_.Tensor": ("_schema",),
        "torch.utils": ("_pytree",),
        "torch.autograd.profiler": ("_is_profiler_enabled",),
        "torch.amp.grad_scaler": ("_refresh_per_optimizer_state",),
        "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        scheduled: (
            *("_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
            "_optimizer_load_state_dict_pre_hooks",
        ),
        scheduled_step: ("_wrapped_by_lr_sched",),
        fused_adam: ("_step_supports_amp_scaling",),
        flattened: ("_fsdp_flattened",),
        parallel: ("_comm_hooks", "_join_config"),
        module: ("_buffers",),
        compiled_module: ("_orig_mod",),
        compiled: ("_torchdynamo_orig_callable",),
    },
    "accelerate": {
        accelerator: ("_optimizers", "_models", "_schedulers", "_dataloaders"),
        prepared: ("_original_forward",),
        "accelerate.state.AcceleratorState": ("_reset_state",),
        "accelerate.state.GradientState": ("_reset_state",),
        "accelerate.commands.launch": ("_validate_launch_command",),
    },
    "collections": {named_tuple: ("_fields",)},
    "argparse": {launch_parser: ("_actions",)},
}
"""By library: at a dotted path, or on what is returned, which the docstring describes."""

OPTIONAL = {
    "_checkpoint_wrapped_module": "absent: a wrapper's own name is part of its module's name",
    "_fsdp_wrapped_module": "absent: the same, of FSDP1's",
    "_is_mkldnn_fp16_supported": "absent: the processor is taken to have fp16 instructions",
}
"""Names that we live without, and how."""
