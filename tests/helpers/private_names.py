"""The private names of torch and Accelerate that the package leans on, all of them.

A release may drop any of these without a word. ``test_private_names.py`` looks each one up in the
versions installed, and walks the package, the recipes and the benchmarks for names missing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR


@dataclass(frozen=True)
class Private:
    """``name`` on what ``holder`` returns, or at the dotted path ``holder``."""

    library: str
    holder: str | Callable[[], Any]
    name: str
    need: str
    """What we do with it, ending "…, in FILE"."""

    @property
    def where(self) -> str:
        if isinstance(self.holder, str):
            return f"{self.holder}.{self.name}"
        return f"{(self.holder.__doc__ or '').rstrip('.')}: {self.name}"


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


def operator() -> Any:
    """torch.ops.aten.mm.default."""
    return torch.ops.aten.mm.default


def accelerator() -> Any:
    """accelerate.Accelerator, made."""
    return Accelerator(cpu=True)


def prepared() -> Any:
    """A model prepared under mixed precision."""
    return Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(1, 1))


def fsdp_state() -> Any:
    """The state of a module under fully_shard."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState()


def flattened() -> Any:
    """A parameter of FSDP1."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(p := nn.Parameter(torch.zeros(1)))
    return p


def compiled() -> Any:
    """A function given to torch.compile."""
    return torch.compile(lambda x: x)


def launch_parser() -> Any:
    """The parser of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


TORCH_SCALER = [
    ("_scale", "takes over the scale of a stock scaler, in stock_scaler.py"),
    (
        "_growth_tracker",
        "takes over the tracker of a stock scaler, in stock_scaler.py and grad_scaler.py",
    ),
    ("_init_scale", "starts from it before the first backward, in grad_scaler.py"),
    ("_init_growth_tracker", "starts from it before the first backward, in grad_scaler.py"),
    ("_growth_factor", "gives it to the update rule, in grad_scaler.py"),
    ("_backoff_factor", "gives it to the update rule, in grad_scaler.py"),
    ("_growth_interval", "gives it to the update rule, in grad_scaler.py"),
    ("_enabled", "does nothing when the scaler is off, in grad_scaler.py"),
    ("_device", "names the device in errors, in grad_scaler.py"),
    ("_per_optimizer_states", "keeps them by window, so overrides this, in grad_scaler.py"),
    ("_lazy_init_scale_growth_tracker", "extends it, in grad_scaler.py"),
    (
        "_check_scale_growth_tracker",
        "asks for the scale through it, in grad_scaler.py",
    ),
    (
        "_check_inf_per_device",
        "looks for overflow through it, in grad_scaler.py",
    ),
    ("_unscale_grads_", "does it without the kernel where that has no bfloat16, in grad_scaler.py"),
]

TENSOR = [
    (
        "_version",
        "sees edits made in place, in window.py, host_mirror.py, async_stepper.py and others",
    ),
    ("_is_view", "tells a gradient that owns its memory, in grad_handoff.py"),
    ("_indices", "keeps a sparse gradient's parts for a stream, in streams.py"),
    ("_values", "reads a sparse gradient's values, in streams.py and ranges.py"),
    ("_backward_hooks", "answers for it without a wait, in pending_parameter.py"),
    ("_post_accumulate_grad_hooks", "answers for it without a wait, in pending_parameter.py"),
]

TORCH = [
    ("torch", "_amp_update_scale_", "updates the scale by torch's own kernel, in grad_scaler.py"),
    (
        "torch",
        "_amp_foreach_non_finite_check_and_unscale_",
        "unscales and checks by torch's own kernel, in gradients.py",
    ),
    ("torch", "_lazy_clone", "keeps what a gradient held, in gradients.py"),
    ("torch._C", "_is_cow_tensor", "tells whether it was written to since, in gradients.py"),
    ("torch", "_foreach_norm", "takes the norms, in clipping.py and gradients.py"),
    ("torch", "_foreach_mul_", "unscales and clips, in clipping.py and grad_handoff.py"),
    ("torch", "_foreach_div_", "divides gradients of late optimizers, in overflow_check.py"),
    ("torch", "_foreach_copy_", "copies small gradients to buffers, in replica.py"),
    ("torch", "_foreach_add_", "counts the step of all parts, in replica.py"),
    ("torch", "_fused_adam_", "steps Adam with the kernel's own unscaling, in fused_adam.py"),
    ("torch", "_fused_adamw_", "steps AdamW with the kernel's own unscaling, in fused_adam.py"),
    ("torch", "_C", "is where the next rows stand"),
    ("torch._C", "DisableTorchFunctionSubclass", "reads a waiting tensor, in pending_parameter.py"),
    ("torch._C", "_functorch", "asks for an outer transform, in finder.py"),
    ("torch._C._functorch", "peek_interpreter_stack", "the same"),
    ("torch._C", "_is_tracing", "stays out of a trace, in finder.py"),
    (
        "torch._C",
        "_current_graph_task_id",
        "tells of a backward, in async_optimizer/hooks.py and finder.py",
    ),
    (
        "torch.Tensor",
        "_make_subclass",
        "makes a parameter of a pending one, in pending_parameter.py",
    ),
    ("torch", "_guards", "is where the next row stands"),
    ("torch._guards", "CompileContext", "tells whether a compiler traces, in pending_parameter.py"),
    (
        "torch.nn.Module",
        "_call_impl",
        "tells what runs inside a forward, in async_optimizer/hooks.py",
    ),
    ("torch", "_ops", "knows an operator by its class, in cpu_float16.py"),
    (
        "torch._C",
        "_dispatch_has_kernel_for_dispatch_key",
        "tells whether autocast casts an operator, in cpu_float16.py",
    ),
    ("torch.ops.aten", "_addmm_activation", "computes it in float32, in cpu_float16.py"),
    (
        "torch.ops.aten",
        "_scaled_dot_product_flash_attention_for_cpu",
        "computes it in float32, in cpu_float16.py",
    ),
    ("torch.ops.aten", "_native_multi_head_attention", "looks into it, in cpu_float16.py"),
    ("torch.ops.aten", "_transformer_encoder_layer_fwd", "looks into it, in cpu_float16.py"),
    ("torch", "_dynamo", "knows compiled modules, in async_optimizer/hooks.py and finder.py"),
    ("torch._dynamo", "OptimizedModule", "the same"),
    ("torch", "_subclasses", "leaves fake tensors alone, in ranges.py"),
    ("torch._subclasses", "FakeTensor", "the same"),
    (
        "torch.nn.Module",
        "_compiled_call_impl",
        "waits in front of a compiled call, in async_optimizer/hooks.py",
    ),
    (
        "torch.autograd.profiler",
        "_is_profiler_enabled",
        "lets a profiler see step(), in fused_adam.py",
    ),
    ("torch.amp.grad_scaler", "_refresh_per_optimizer_state", "fills new windows, in window.py"),
    (
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "runs hooks on step(), in fused_adam.py and async_stepper.py",
    ),
    (
        "torch.optim.optimizer",
        "_global_optimizer_post_hooks",
        "runs hooks on step(), in fused_adam.py and async_stepper.py",
    ),
    (
        "torch.distributed.fsdp.FSDPModule",
        "_get_fsdp_state",
        "finds modules gathered together, in async_optimizer/hooks.py",
    ),
]

ACCELERATE = [
    ("accelerate.state.AcceleratorState", "_reset_state", "starts anew, in find_overflow.py"),
    ("accelerate.state.GradientState", "_reset_state", "starts anew, in find_overflow.py"),
    (
        "accelerate.commands.launch",
        "_validate_launch_command",
        "settles the arguments as launch does, in environment.py",
    ),
]


TRAINER = [
    ("_save_checkpoint", "marks a folder that is written over as incomplete, in trainer.py"),
    ("_get_output_dir", "finds that folder, in trainer.py"),
]


def replica() -> Any:
    """What DataParallel runs on each device."""
    return torch.nn.Linear(1, 1)._replicate_for_data_parallel()  # type: ignore[no-untyped-call]


PRIVATE = [
    *(Private("torch", scaler, name, need) for name, need in TORCH_SCALER),
    *(Private("torch", "torch.Tensor", name, need) for name, need in TENSOR),
    *(Private("torch", *row) for row in TORCH),
    Private(
        "torch",
        scheduled,
        "_opt_called",
        "tells a scheduler that step() ran, in integrations/optimizer.py",
    ),
    Private(
        "torch",
        scheduled_step,
        "_wrapped_by_lr_sched",
        "knows a scheduler's step(), in fused_adam.py",
    ),
    Private(
        "torch", scheduled, "_optimizer_step_pre_hooks", "runs hooks on step(), in fused_adam.py"
    ),
    Private(
        "torch", scheduled, "_optimizer_step_post_hooks", "runs hooks on step(), in fused_adam.py"
    ),
    Private(
        "torch",
        fused_adam,
        "_step_supports_amp_scaling",
        "gives fused kernels scale and found_inf, in stepper.py, grad_scaler.py and replica.py",
    ),
    Private(
        "torch",
        fsdp_state,
        "_states_to_forward_prefetch",
        "knows what a forward gathers early, in async_optimizer/hooks.py",
    ),
    Private(
        "torch", replica, "_is_replica", "knows DataParallel's copies, in async_optimizer/hooks.py"
    ),
    Private("torch", flattened, "_fsdp_flattened", "refuses FSDP1, in supported_optimizers.py"),
    Private(
        "torch",
        compiled,
        "_torchdynamo_orig_callable",
        "knows a compiled forward, in async_optimizer/hooks.py",
    ),
    Private("torch", operator, "_op_dk", "calls the kernel below a mode, in cpu_float16.py"),
    Private("accelerate", accelerator, "_optimizers", "lists what was prepared, in accelerator.py"),
    Private("accelerate", accelerator, "_models", "lists what was prepared, in attachment.py"),
    *(
        Private("accelerate", accelerator, name, "takes it back, in integrations/accelerator.py")
        for name in ("_schedulers", "_dataloaders")
    ),
    Private("accelerate", prepared, "_original_forward", "sets autocast anew, in autocast.py"),
    *(Private("accelerate", *row) for row in ACCELERATE),
    *(Private("transformers", "transformers.Trainer", *row) for row in TRAINER),
    Private(
        "argparse",
        launch_parser,
        "_action_groups",
        "shows our settings' group, in doctor/command.py",
    ),
    Private("argparse", launch_parser, "_actions", "needs no script, in doctor/command.py"),
]

OPTIONAL = {
    "_is_mkldnn_fp16_supported": "absent: doctor cannot tell how fast fp16 is, in environment.py",
}
"""Names that we live without, and how."""
