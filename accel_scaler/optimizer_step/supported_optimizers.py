"""Which optimizers can be stepped part by part, on another thread or through masters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices import total_memory
from ..errors import UnsupportedError
from ..scaling import LOW_PRECISION, ParameterNames, parameters_of
from .masters import MasterRule
from .shared_memory import overlapping
from .stepper import is_replaced, raw_step

_BY_PARAMETER = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
"""torch's optimizers whose step treats each parameter alone. transformers' Adafactor does, too."""

_BY_MATRIX = {"Adafactor", "Muon"}
"""Optimizers that need a whole parameter, not a shard of it."""

STEPPED = LOW_PRECISION | {torch.float32}
"""Dtypes of parameters whose state is float32."""

WHY = "offload, float16 or bfloat16 parameters"
WAY_OUT = (
    "Use step_mode='sync' or 'overlap' without offload, with float32 parameters, or with bfloat16 "
    "ones and master_weights='none'."
)


def is_known(cls: type[Optimizer]) -> bool:
    """Whether the class, no subclass of it, is one whose step treats each parameter alone."""
    of_torch = cls is getattr(torch.optim, cls.__name__, None) and cls.__name__ in _BY_PARAMETER
    return of_torch or (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor")


def refuse_class(cls: type[Optimizer]) -> None:
    """Raise ``UnsupportedError`` for a class whose state cannot pass through the device in
    stretches."""
    apart = _BY_MATRIX | {"SparseAdam"}
    if not is_known(cls) or cls.__name__ in apart:
        names = ", ".join(name for name in _BY_PARAMETER if name not in apart)
        raise UnsupportedError(
            f"offloaded: got {cls.__module__}.{cls.__name__}, expected a class of torch.optim, not "
            f"derived from, whose step treats each element alone ({names})."
        )


def is_splittable(optimizer: Optimizer) -> bool:
    """Whether stepping some parameters, then the others, is the same as stepping all."""
    # A method on the instance is another step; refuse_replaced looks at ``step`` itself.
    replaced = [name for name in vars(optimizer) if hasattr(type(optimizer), name)]
    return is_known(type(optimizer)) and replaced in ([], ["step"])


def refuse_replaced(optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` where ``step`` on the instance is not the class's own."""
    if is_replaced(optimizer):
        name, step = type(optimizer).__name__, vars(optimizer)["step"]
        raise UnsupportedError(
            f"{name}: step was replaced on this instance, by {step!r}; the class's own is what "
            f"runs. Override step in a subclass of {name}, register a step hook, or use "
            "step_mode='sync' without offload, without AsyncOptimizer."
        )


def refuse_unsteppable(optimizer: Optimizer, masters: MasterRule) -> None:
    """Raise ``UnsupportedError`` for optimizers that cannot be stepped in this way; ``masters``:
    which trained parameters are stepped through float32 copies."""
    name = type(optimizer).__name__
    closure = inspect.signature(raw_step(type(optimizer))).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{name}.step() needs a closure: forward and backward run inside the step, and it "
            "cannot run beside them. Use step_mode='sync' without offload."
        )
    refuse_replaced(optimizer)
    if not is_splittable(optimizer):
        raise UnsupportedError(
            f"{name} is not among the optimizers of torch whose step treats each parameter alone: "
            "it is not stepped in parts, by AsyncOptimizer or with float32 copies (masters). Use "
            f"attach() and {WAY_OUT[4:]}"
        )
    params = parameters_of(optimizer)
    if any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise UnsupportedError(
            f"{name} steps parameters of FSDP1 (FullyShardedDataParallel), expected FSDP2, whose "
            "gathers can be waited for: fully_shard, or fsdp_version: 2 in an Accelerate config. "
            "Else use step_mode='sync' without offload, without AsyncOptimizer."
        )
    if len(set(map(id, params))) < len(params):
        raise UnsupportedError(
            f"{name} has a parameter twice, expected each once. Name it once, or use "
            "step_mode='sync' without offload, without AsyncOptimizer, and float32 parameters."
        )
    if masters.on_host:
        _refuse_offload(optimizer, masters, params)
    if name in _BY_MATRIX and any(hasattr(p, "to_local") for p in params):
        raise UnsupportedError(
            f"{name} may need more of a parameter than this rank's shard, and collectives stay on "
            "the training thread. Use an elementwise optimizer such as AdamW, or step_mode='sync' "
            "without offload, without AsyncOptimizer."
        )
    trained = [p for p in params if p.requires_grad]
    through = [p for p in trained if masters.takes(p)]
    if any(p.dtype is torch.float16 and not masters.takes(p) for p in trained):
        raise UnsupportedError(
            f"{name} has float16 parameters, which master_weights='none' would step in place; "
            "torch refuses to unscale their gradients. Leave master_weights at 'auto', or load "
            "the model in bfloat16 or float32."
        )
    entries = [optimizer.state.get(p, {}) for p in through if p.dtype is torch.float16]
    values = [
        value
        for entry in entries
        for key, value in entry.items()
        # Adagrad has made its first sum in __init__.
        if key != "momentum_buffer" and (key != "sum" or float(entry.get("step", 0.0)) > 0.0)
    ]
    if any(getattr(value, "dtype", None) is torch.float16 for value in values):
        raise UnsupportedError(
            f"{name} has state in float16, expected float32 for float16 parameters: second moments "
            "below 3e-8 are 0 in it, so updates would be too large. load_state_dict() of a torch "
            "optimizer casts to it, and so does detach(). Load the state after prepare(), or into "
            "the AsyncOptimizer; or begin it anew, optimizer.state.clear()."
        )
    if any(p.dtype in LOW_PRECISION and hasattr(p, "to_local") for p in through):
        raise UnsupportedError(
            f"{name} has float16 or bfloat16 parameters that are sharded; their float32 copies "
            "(masters) would be, too, and unscaling into those is not supported. Load the model in "
            "float32 (and give fully_shard an mp_policy), or in bfloat16 with "
            "master_weights='none'."
        )
    if others := {p.dtype for p in through} - LOW_PRECISION - {torch.float32}:
        raise UnsupportedError(
            f"{name} has parameters of {', '.join(map(str, others))}, expected float32 or less, "
            f"and is not stepped with float32 copies, masters ({WHY}). {WAY_OUT}"
        )


def _refuse_offload(optimizer: Optimizer, masters: MasterRule, params: Sequence[Tensor]) -> None:
    """Raise ``UnsupportedError`` where state cannot pass through the device in stretches."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    found = [key for key in ("capturable", "differentiable") if any(g.get(key) for g in groups)]
    devices = list(dict.fromkeys(str(p.device) for p in params))
    others = list(dict.fromkeys(str(p.dtype) for p in params if p.dtype not in STEPPED))
    total = total_memory(params[0].device) if params else None
    reason = ""
    if name == "SparseAdam":
        reason = "SparseAdam has sparse gradients, expected AdamW and Embedding(sparse=False)"
    elif name in _BY_MATRIX:
        reason = f"{name} needs whole matrices, expected an elementwise one (AdamW, SGD)"
    elif found:
        reason = f"{name} has {found[0]}=True, expected False"
    elif len(devices) > 1:
        reason = f"{name} has parameters on {' and '.join(devices)}, expected one device"
    elif others:
        reason = f"{name} has parameters of {', '.join(others)}, expected floats of 32 or 16 bits"
    elif total is not None and masters.kept > total:
        budget, has = masters.kept / 2**30, total / 2**30
        reason = (
            f"offload_budget is {budget:.2f} GiB, expected less than the device's {has:.2f} GiB"
        )
    if reason:
        raise UnsupportedError(
            f"offload='cpu': {reason}: state is copied to the device stretch by stretch. Change "
            "that, or leave offload at 'none'."
        )


def refuse_overlapping(
    optimizer: Optimizer,
    params: Sequence[Tensor],
    names: ParameterNames,
    others: Sequence[Tensor] = (),
) -> None:
    """Raise ``UnsupportedError`` where ``params`` of the optimizer share memory with each other or
    with ``others``, without being one ``Parameter``."""
    params = list({id(p): p for p in params}.values())
    tensors = [*params, *others]
    for group in overlapping(tensors):
        if group[0] < len(params):
            both = " and ".join(names.of((tensors[i] for i in group[:2]), optimizer))
            raise UnsupportedError(
                f"{type(optimizer).__name__}: {both} share memory and are not one Parameter: each "
                "would be updated, or awaited, apart from the other. Use one Parameter for both "
                "(decoder.weight = encoder.weight; torch.nn.functional.linear(x, weight.t()) for "
                "a transposed one), copy what a buffer views, or use step_mode='sync' and float32 "
                "parameters without offload."
            )
