"""What a boundary knows of one optimizer in its window, and arithmetic on gradients left scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from .config import UnsupportedError
from .due import Due, stepper_of
from .gradients import LOW_PRECISION, clip_coefficient, gradients_of, parameters_of

__all__ = [
    "Note",
    "clip_scaled_norm",
    "clip_scaled_value",
    "dtypes_of",
    "is_low",
    "takes_grad_scale",
    "total_norm",
    "unscale_due",
]


@dataclass(slots=True)
class Note:
    """What the boundary knows of one optimizer in the present window."""

    found_inf: bool = False
    due: Due = field(default_factory=Due)
    """Left for the update to do: the gradients are still scaled, not clipped."""
    overflowed: Sequence[Tensor] = ()
    names: Sequence[str] = ()
    """Names of ``overflowed``, once it has been put on record."""

    @property
    def factor(self) -> Tensor | float:
        """What the gradients are still to be multiplied by."""
        if self.due.multiply is not None:
            return self.due.multiply
        return 1.0 if self.due.divide is None else 1.0 / self.due.divide


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether its kernel divides gradients by ``grad_scale`` itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_low(optimizer: Optimizer) -> bool:
    """Whether its gradients are float16 or bfloat16, so must not be unscaled in place."""
    stepper = stepper_of(optimizer)
    return stepper is not None and stepper.low_precision


def dtypes_of(optimizers: Sequence[Optimizer]) -> frozenset[torch.dtype]:
    """Dtypes of gradients that one pass takes."""
    full = frozenset({torch.float32})
    return full | LOW_PRECISION if any(map(is_low, optimizers)) else full


def unscale_due(optimizer: Optimizer, note: Note) -> None:
    """Do in place what is due, because somebody wants to see unscaled gradients.

    Raises:
        UnsupportedError: they are float16 or bfloat16.
    """
    if is_low(optimizer):
        raise UnsupportedError(
            "unscale_gradients: some gradients are float16 or bfloat16; unscaled, they would "
            "lose what is small, so they are unscaled in float32 within the step. Use "
            "clip_grad_norm_ or clip_grad_value_, which know this, or load the model in float32."
        )
    grads = gradients_of(parameters_of(optimizer))
    if note.due.multiply is not None:
        torch._foreach_mul_(grads, note.due.multiply)
    elif note.due.divide is not None:
        torch._foreach_div_(grads, note.due.divide)
    note.due = Due()


def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all elements together, float32, shape ()."""
    if all(grad.dtype not in LOW_PRECISION for grad in grads):
        total: Tensor = torch.nn.utils.get_total_norm(list(grads), norm_type)
        return total
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads]
    return _norm_of(norms, norm_type)


def _norm_of(norms: list[Tensor], norm_type: float) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def clip_scaled_norm(
    owners: Sequence[Optimizer],
    notes: Sequence[Note],
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Clip gradients that stay scaled; where all of an optimizer's are meant, along with its step.

    Returns the unscaled norm before clipping. Does not synchronise.
    """
    asked = {id(p) for p in parameters}
    norms, mine = [], []
    for owner, note in zip(owners, notes, strict=True):
        own = [p for p in parameters_of(owner) if p.grad is not None]
        chosen = [p for p in own if id(p) in asked]
        asked.difference_update(map(id, chosen))
        norms.append(total_norm(gradients_of(chosen), norm_type) * note.factor)
        mine.append((note, chosen, len(chosen) == len(own)))
    strays = [p for p in parameters if id(p) in asked]
    if strays:
        norms.append(total_norm(gradients_of(strays), norm_type))
        mine.append((Note(), strays, False))
    total = _norm_of(norms, norm_type)
    coefficient = clip_coefficient(total, max_norm)
    for note, chosen, whole in mine:
        if whole and note.due.multiply is not None:
            note.due = Due(multiply=note.due.multiply * coefficient)
        else:
            torch._foreach_mul_(gradients_of(chosen), coefficient)
    return total


def clip_scaled_value(owner: Optimizer, note: Note, asked: set[int], clip_value: float) -> None:
    """Clip each element of gradients that stay scaled to ``clip_value`` of the unscaled ones."""
    limit = clip_value / float(note.factor)
    for p in parameters_of(owner):
        if p.grad is not None and id(p) in asked:
            most = min(limit, torch.finfo(p.grad.dtype).max)
            p.grad.clamp_(-most, most)
