"""Gradients in bulk: the non-finite check, norms, unscale and clip, on torch's foreach kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .collectives import whole

_grad_of, _dtype_of, _layout_of = map(attrgetter, ("grad", "dtype", "layout"))

LARGE = 1 << 16
"""Elements from which a gradient on a CPU is read by itself, after all smaller ones."""

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
"""Dtypes in which an update would be lost to rounding."""

NORM_BLOCK = 1 << 17
"""Elements of low precision that are cast at a time for a norm on a CPU, and stay in cache: cast
by torch's kernel for the norm they take six times as long."""

SMALL = 1 << 12
"""Elements up to which one thread works faster on a tensor than several."""

SMALLEST_NORMAL = 2.0**-126
"""Of float32; its reciprocal is about the largest power of two that float32 holds."""

MAX_NAMED = 3
"""Non-finite gradients that a check looks for; to find all would read every one once more."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The ``.grad`` of each parameter that has one, in order."""
    return [grad for p in parameters if (grad := p.grad) is not None]


class Gathered:
    """The gradients of some parameters as they are now: read once, for all who ask about them.

    Args:
        parameters: with and without gradients.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        found = list(map(_grad_of, parameters))
        self.grads: list[Tensor] = [grad for grad in found if grad is not None]
        self.params = parameters
        """The parameters that have one."""
        if len(self.grads) < len(found):
            pairs = zip(parameters, found, strict=True)
            self.params = [p for p, grad in pairs if grad is not None]

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of dense plain tensors on one device; empty where some are others."""
        return dtypes_of(self.grads)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.grads))

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """Whether all of ``grads`` are among these."""
        return are_same(grads, self.grads) or self._ids.issuperset(map(id, grads))


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


def first_version(optimizer: Optimizer) -> int | None:
    """The version of its first gradient, which each write to it raises; None: it has none."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next((grad._version for p in params if (grad := p.grad) is not None), None)


def is_uniform(
    grads: Sequence[Tensor] | Gathered,
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32}),
) -> bool:
    """Whether all are dense plain tensors of these dtypes on one device, as fast paths need."""
    found = grads.dtypes if isinstance(grads, Gathered) else dtypes_of(grads)
    return bool(found) and dtypes.issuperset(found)


def dtypes_of(grads: Sequence[Tensor]) -> frozenset[torch.dtype]:
    """The dtypes of dense plain tensors on one device; empty where some are others."""
    # Maps over C functions: with thousands of gradients a Python loop would show.
    if (
        len(grads) > 0
        and set(map(type, grads)) <= {Tensor, torch.nn.Parameter}
        and set(map(_layout_of, grads)) == {torch.strided}
        and grads[0].device.type != "meta"
        and len(set(map(Tensor.get_device, grads))) == 1
    ):
        return frozenset(map(_dtype_of, grads))
    return frozenset()


def is_power_of_two(scale: float) -> bool:
    """Whether multiplying by ``scale`` only moves the exponent, so that it rounds nothing."""
    return math.frexp(scale)[0] == 0.5


def reciprocal(scale: float) -> float:
    """1 / scale; inf where float32 may not hold it, after some 140 back-offs in a row."""
    return 1.0 / scale if scale >= SMALLEST_NORMAL else math.inf


def norms_of(grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch._foreach_norm(list(grads), 2, dtype=torch.float32)


def on_host(each: Tensor, total: Tensor) -> Tensor:
    """Shape (n + 1,): ``each`` (n,) and ``total`` (), in one transfer."""
    return torch.cat((each, total.reshape(1))).cpu()


def not_finite(values: Tensor) -> list[int]:
    return [i for i, finite in enumerate(torch.isfinite(values).tolist()) if not finite]


@contextmanager
def run_on_one_thread(wanted: bool) -> Iterator[None]:
    """Run CPU kernels without a thread team: to start one costs more than a small tensor."""
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def nonfinite(grad: Tensor) -> bool:
    """Whether any element is inf or NaN. Reads every element; synchronises with the device."""
    return not bool(torch.isfinite(_values(grad)).all())


def nonzero(grad: Tensor) -> bool:
    """Whether any element is other than 0. Reads every element; synchronises with the device."""
    return bool(_values(grad).count_nonzero())


def _values(grad: Tensor) -> Tensor:
    """The elements that this rank holds, as one dense tensor."""
    held = local(grad)
    return held.coalesce().values() if held.is_sparse else held


def local(t: Any) -> Tensor:
    """The elements that this rank holds: of a DTensor its shard, sharing memory."""
    held: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return held


def find_nonfinite(grads: Sequence[Tensor]) -> Iterator[int]:
    """Indices of the gradients, of any kind, with inf or NaN among the elements that this rank
    holds. Reads every element; synchronises once for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held = list(map(_values, grads))
    for i, grad in enumerate(held):
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(i)
    for places in kinds.values():
        yield from (places[i] for i in not_finite(_largest([held[i] for i in places])))


def _largest(grads: list[Tensor]) -> Tensor:
    """The largest magnitude in each, float32, shape (n,); inf or NaN where some element is."""
    # Within autocast to float16 bfloat16 cannot be stacked.
    return torch.stack([norm.float() for norm in torch._foreach_norm(grads, math.inf)])


def has_nonfinite_gradient(param: Tensor) -> bool:
    """:func:`nonfinite` of its ``.grad``; False without one."""
    return param.grad is not None and nonfinite(param.grad)


def by_size(tensors: Sequence[Tensor]) -> list[int]:
    """Indices of the tensors, small ones first."""
    return sorted(range(len(tensors)), key=lambda i: tensors[i].numel())


def first_nonfinite(optimizer: Optimizer) -> list[Tensor]:
    """Up to ``MAX_NAMED`` parameters with a non-finite gradient, small first. Synchronises."""
    params = parameters_of(optimizer)
    found = (params[i] for i in by_size(params) if has_nonfinite_gradient(params[i]))
    return list(islice(found, MAX_NAMED))


@torch.no_grad()
def unscale_in_place(
    parameters: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor
) -> dict[torch.device, Tensor]:
    """Multiply every gradient by ``inv_scale`` and look for inf and NaN, as torch's scaler does.

    Args:
        inv_scale, found_inf: float32, shape (); copied to each device that gradients are on.

    Returns a flag for each device: above 0 where some element was not finite. Does not
    synchronise. The gradients get new versions, which torch's kernel does not give them. bfloat16
    gradients other than DTensors do not use that kernel: not every device has it for them.
    """
    groups: dict[tuple[torch.device, torch.dtype, Any], list[Tensor]] = {}
    for p in parameters:
        if (grad := p.grad) is None:
            continue
        if grad.is_sparse:
            grad = grad._values()
        key = (grad.device, grad.dtype, getattr(grad, "device_mesh", None))
        groups.setdefault(key, []).append(grad)
    flags: dict[torch.device, Tensor] = {}
    for (device, dtype, mesh), grads in groups.items():
        flag = flags.setdefault(device, found_inf.to(device, copy=True, non_blocking=True))
        inv = inv_scale.to(device, non_blocking=True)
        if dtype is not torch.bfloat16 or mesh is not None:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv)
            torch.autograd.graph.increment_version(grads)
        elif held := [grad for grad in grads if grad.numel()]:
            flag.copy_(torch.maximum(flag, (~_largest(held).isfinite().all()).float()))
            torch._foreach_mul_(held, inv)
    return flags


@torch.no_grad()
def multiply_in_place(grads: Iterable[Tensor], factor: float) -> None:
    """Multiply each by ``factor``; torch's kernels compute in float32 at least. Does not
    synchronise."""
    for grad in grads:
        held = local(grad)
        (held._values() if held.is_sparse else held).mul_(factor)
        torch.autograd.graph.increment_version([grad])


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """DTensors of one mesh together, and plain tensors: torch takes no list of both."""
    meshes: dict[Any, list[Tensor]] = {}
    for t in tensors:
        meshes.setdefault(getattr(t, "device_mesh", None), []).append(t)
    return list(meshes.values())


def total_norm(parameters: Iterable[Tensor], norm_type: float, is_torchs: bool = False) -> Tensor:
    """The norm of all gradient elements together, shape (); float32 for those of low precision,
    except where it ``is_torchs``, bit for bit. Of DTensors, which may stand beside plain tensors,
    every rank's elements count: communicates."""
    grads = [_values(g) if g.is_sparse else g for g in gradients_of(parameters)]
    norms: list[Tensor] = []
    for some in by_mesh(grads) or [[]]:
        if is_torchs or all(grad.dtype not in LOW_PRECISION for grad in some):
            norm = torch.nn.utils.get_total_norm(some, norm_type)
        else:
            norm = norm_of(torch.stack([norm_of(grad, norm_type) for grad in some]), norm_type)
        norms.append(whole(norm))
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def norm_of(grad: Tensor, norm_type: float) -> Tensor:
    """The norm of one tensor, shape (), float32 at least."""
    is_low, is_plain = grad.dtype in LOW_PRECISION, not hasattr(grad, "to_local")
    if is_low and is_plain and grad.device.type == "cpu" and grad.numel() > NORM_BLOCK:
        scratch = torch.empty(NORM_BLOCK)
        parts = torch.split(grad.reshape(-1), NORM_BLOCK)
        blocks = (scratch[: len(part)].copy_(part) for part in parts)
        grad = torch.stack([torch.linalg.vector_norm(block, norm_type) for block in blocks])
    dtype = torch.float32 if is_low else None
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def match_layout(parameters: Iterable[Tensor], state: Mapping[Any, Any]) -> None:
    """Give each gradient, and what ``state`` has for its parameter, the parameter's strides:
    torch's fused CPU kernels walk all of them by one index and ignore strides."""
    for p in parameters:
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
        for key, value in (state.get(p) or {}).items():
            is_alike = isinstance(value, Tensor) and value.shape == p.shape
            if is_alike and value.stride() != p.stride():
                state[p][key] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward from ``outputs`` accumulates into, each once."""
    leaves: list[Tensor] = []
    seen: set[object] = set()
    stack: list[Any] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        stack += [after for after, _ in node.next_functions]
    return leaves
