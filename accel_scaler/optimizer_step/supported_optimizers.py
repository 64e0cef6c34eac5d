"""Which optimizers can be stepped part by part, on another thread or through masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices import total_memory
from ..errors import UnsupportedError
from ..scaling import LOW_PRECISION, ParameterNames, local, parameters_of
from .arena import length_of
from .masters import MasterRule
from .stepper import is_replaced

_BY_ELEMENT = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
"""torch's optimizers whose step treats each element alone."""

_BY_MATRIX = {"Adafactor", "Muon"}
"""Those that need a whole parameter, not a shard or a stretch of it. transformers' Adafactor is
another one."""

STEPPED = LOW_PRECISION | {torch.float32}
"""Dtypes of parameters whose state is float32."""

WAY_OUT = (
    "step_mode='sync' or 'overlap' without offload, with float32 parameters, or with bfloat16 ones "
    "and master_weights='none'."
)
PLAIN = "use step_mode='sync' without offload, without AsyncOptimizer"


def is_known(cls: type[Optimizer]) -> bool:
    """Whether the class, no subclass of it, is one whose step treats each parameter alone."""
    known = {*_BY_ELEMENT, *_BY_MATRIX, "SparseAdam"}
    of_torch = cls is getattr(torch.optim, cls.__name__, None) and cls.__name__ in known
    return of_torch or (cls.__module__, cls.__name__) == ("transformers.optimization", "Adafactor")


def refuse_class(cls: type[Optimizer]) -> None:
    """Raise ``UnsupportedError`` for a class whose state cannot pass through the device in
    stretches."""
    if not is_known(cls) or cls.__name__ not in _BY_ELEMENT:
        raise UnsupportedError(
            f"offload: got {cls.__module__}.{cls.__name__}, expected a class of torch.optim, not "
            f"derived from, whose step treats each element alone ({', '.join(_BY_ELEMENT)})."
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
            f"runs. Override step in a subclass of {name}, register a step hook, or {PLAIN}."
        )


def refuse_unsteppable(optimizer: Optimizer, masters: MasterRule) -> None:
    """Raise ``UnsupportedError`` for optimizers that cannot be stepped in this way; ``masters``:
    which trained parameters are stepped through float32 copies."""
    name, params = type(optimizer).__name__, parameters_of(optimizer)
    refuse_replaced(optimizer)
    if not is_splittable(optimizer):
        raise UnsupportedError(
            f"{name} is not among the optimizers of torch whose step needs no closure and treats "
            "each parameter alone: it is not stepped in parts, by AsyncOptimizer or with float32 "
            f"copies (masters). Use attach() and {WAY_OUT}"
        )
    if any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise UnsupportedError(
            f"{name} steps parameters of FSDP1 (FullyShardedDataParallel), expected FSDP2, whose "
            "gathers can be waited for: fully_shard, or fsdp_version: 2 in an Accelerate config. "
            f"Else {PLAIN}."
        )
    if len(set(map(id, params))) < len(params):
        raise UnsupportedError(
            f"{name} has a parameter twice, expected each once. Name it once, or {PLAIN}, and "
            "float32 parameters."
        )
    if masters.on_host:
        _refuse_offload(optimizer, params, masters.budget or 0)
    if name in _BY_MATRIX and any(hasattr(p, "to_local") for p in params):
        raise UnsupportedError(
            f"{name} may need more of a parameter than this rank's shard, and collectives stay on "
            f"the training thread. Use an elementwise optimizer such as AdamW, or {PLAIN}."
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
    if any(hasattr(p, "to_local") for p in through):
        raise UnsupportedError(
            f"{name} has float16 or bfloat16 parameters that are sharded; their float32 copies "
            "(masters) would be, too, and unscaling into those is not supported. Load the model in "
            "float32 (and give fully_shard an mp_policy), or in bfloat16 with "
            "master_weights='none'."
        )


def _refuse_offload(optimizer: Optimizer, params: Sequence[Tensor], budget: int) -> None:
    """Raise ``UnsupportedError`` where state cannot pass through the device in stretches, or
    ``budget`` bytes cannot stay there."""
    refuse_class(type(optimizer))
    total = total_memory(params[0].device) if params else None
    if total is not None and budget > total:
        raise UnsupportedError(
            f"offload_budget is {budget / 2**30:.2f} GiB, expected less than the device's "
            f"{total / 2**30:.2f} GiB. Set a lower one, or leave offload at 'none'."
        )
    devices = sorted({str(p.device) for p in params})
    reasons = [
        f"{key}=True, expected False"
        for key in ("capturable", "differentiable")
        if any(group.get(key) for group in optimizer.param_groups)
    ]
    reasons += [f"parameters on {' and '.join(devices)}, expected one device"] * (len(devices) > 1)
    reasons += [
        f"parameters of {p.dtype}, expected floats of 32 or 16 bits"
        for p in params
        if p.dtype not in STEPPED
    ]
    if reasons:
        raise UnsupportedError(
            f"offload='cpu': {type(optimizer).__name__} has {reasons[0]}: state is copied to the "
            "device stretch by stretch. Change that, or leave offload at 'none'."
        )


def refuse_overlapping(
    optimizer: Optimizer, params: Sequence[Tensor], names: ParameterNames
) -> None:
    """Raise ``UnsupportedError`` where ``params`` of the optimizer share memory with each other,
    without being one ``Parameter``."""
    params = list({id(p): p for p in params}.values())
    for group in overlapping(params):
        both = " and ".join(names.of((params[i] for i in group[:2]), optimizer))
        raise UnsupportedError(
            f"{type(optimizer).__name__}: {both} share memory and are not one Parameter: each "
            "would be updated apart from the other. Use one Parameter for both (decoder.weight = "
            "encoder.weight; torch.nn.functional.linear(x, weight.t()) for a transposed one), or "
            "float32 parameters without offload."
        )


def overlapping(params: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their indices, whose memory overlaps; ascending, each of two or more.

    Views that only interleave, as columns of one matrix do, count as well. Costs some microseconds
    a tensor, reads no element, and so waits for no update. Does not synchronise.
    """
    found: list[tuple[str, int, int, int]] = []
    with torch._C.DisableTorchFunctionSubclass():  # which waits for an update that is due
        for i, p in enumerate(params):
            t = local(p.detach()) if hasattr(p, "to_local") else p
            if t.layout is torch.strided and not t.is_meta and t.numel():
                start = t.data_ptr()
                found.append((str(t.device), start, start + length_of(t) * t.element_size(), i))
    groups: list[list[int]] = []
    reached = "", 0
    for device, start, after, i in sorted(found):
        if (device, start) < reached:
            groups[-1].append(i)
        else:
            groups.append([i])
        reached = max(reached, (device, after))
    return sorted(sorted(group) for group in groups if len(group) > 1)
