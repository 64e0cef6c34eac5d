"""Gradients in bulk: the non-finite check, norms, unscale and clip, on torch's foreach kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Norms",
    "clip_coefficient",
    "gradients_of",
    "is_power_of_two",
    "is_uniform",
    "leaves_of",
    "match_layout",
    "nonfinite",
    "scaled_norms",
]

LARGE = 1 << 16
"""Elements from which a gradient is looked at alone, after all smaller ones."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The outcome of :func:`scaled_norms`."""

    total: Tensor | None
    """Unscaled total norm, float32, shape (); None where no norm could be taken."""
    overflowed: tuple[int, ...]
    """Indices of gradients with non-finite elements, of those looked at; empty: all finite."""
    host_total: float = math.nan
    """``total`` as a Python float."""


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The ``.grad`` of each parameter that has one, in order."""
    return [grad for p in parameters if (grad := p.grad) is not None]


def is_uniform(grads: Sequence[Tensor]) -> bool:
    """Whether all are dense float32 plain tensors on one device, as the fast paths need."""
    if not grads:
        return False
    device = grads[0].device
    return set(map(type, grads)) <= {Tensor, torch.nn.Parameter} and all(
        g.dtype is torch.float32 and g.layout is torch.strided and g.device == device for g in grads
    )


def is_power_of_two(scale: float) -> bool:
    """Whether multiplying by ``scale`` only moves the exponent, so that it rounds nothing."""
    return scale > 0 and math.frexp(scale)[0] == 0.5


@torch.no_grad()
def scaled_norms(grads: Sequence[Tensor], inv_scale: Tensor) -> Norms:
    """Norm of the *unscaled* gradients and the non-finite check, from one read of scaled ones.

    With a power-of-two scale the total equals, bit for bit, what
    ``torch.nn.utils.clip_grad_norm_`` returns for gradients that were unscaled first.

    Small gradients are looked at first and large ones one by one, because an overflow in the
    backward reaches the biases and norms of every earlier layer: a skipped window then costs
    a small part of a full pass. On a device other than the CPU all are looked at in one batch.

    Args:
        grads: uniform gradients (see :func:`is_uniform`), scaled.
        inv_scale: reciprocal of their scale, float32, shape (), on their device.

    Returns:
        ``total`` is None when an overflow was found, or when a gradient's own norm leaves
        float32's range though its elements are finite (then ``overflowed`` is empty).

    Synchronises with the device once.
    """
    norms: Sequence[Tensor]
    if grads[0].device.type == "cpu":
        norms, suspects = _norms_until_nonfinite(grads)
        if suspects:
            return Norms(None, tuple(i for i in suspects if nonfinite(grads[i])))
    else:
        norms = torch._foreach_norm(list(grads))
    unscaled = torch.stack(list(norms)) * inv_scale
    total = torch.linalg.vector_norm(unscaled)
    value = float(total)
    if math.isfinite(value):
        return Norms(total, (), value)
    suspects = [i for i, finite in enumerate(torch.isfinite(unscaled).tolist()) if not finite]
    return Norms(None, tuple(i for i in suspects if nonfinite(grads[i])))


def _norms_until_nonfinite(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Per-tensor norms in order; and the indices of the first non-finite ones, if any."""
    small = [i for i, g in enumerate(grads) if g.numel() < LARGE]
    norms = list(torch._foreach_norm([grads[i] for i in small])) if small else []
    if small and not math.isfinite(float(torch.stack(norms).sum())):
        return norms, [i for i, norm in zip(small, norms, strict=True) if not norm.isfinite()]
    if len(small) == len(grads):
        return norms, []
    found = dict(zip(small, norms, strict=True))
    for i, grad in enumerate(grads):
        if i not in found:
            (found[i],) = torch._foreach_norm([grad])
            if not math.isfinite(float(found[i])):
                return norms, [i]
    return [found[i] for i in range(len(grads))], []


def nonfinite(grad: Tensor) -> bool:
    """Whether any element is inf or NaN. Reads every element; synchronises with the device."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    values = local.coalesce().values() if local.is_sparse else local
    return not bool(torch.isfinite(values).all())


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """The factor of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def match_layout(parameters: Iterable[Tensor]) -> None:
    """Give each gradient its parameter's strides.

    torch's fused CPU kernels walk parameter and gradient by one index and ignore strides.
    """
    for p in parameters:
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a backward from ``outputs`` accumulates into, each once."""
    leaves: list[Tensor] = []
    seen: set[object] = set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        stack.extend(after for after, _ in node.next_functions if after is not None)
    return leaves
