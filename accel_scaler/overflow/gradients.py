"""The gradients that the backwards of a window have left on parameters.

A gradient that is made again is the sum of the contributions of the recorded backwards. So any
other change of a gradient, or of the parameter, is an obstacle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..scaling import gradients_of, local


class WindowGradients:
    """The gradients of one window after another. Nothing synchronises but where it is said.

    Args:
        parameters: gives all that optimizers step.
    """

    def __init__(self, parameters: Callable[[], list[Tensor]]) -> None:
        self.parameters = parameters
        self.obstacle = ""
        """Why gradients that are made again would differ, as far as that is known."""
        self._states: list[tuple[int, bool]] = []
        """Version and ``requires_grad`` of every parameter, before the first backward."""
        self._left: dict[int, tuple[Tensor | None, int]] = {}
        """By the ``id`` of a parameter: its gradient, and the version of the gradient, after the
        last backward."""
        self._before: dict[int, Tensor] = {}
        """By the ``id`` of a parameter: the largest magnitude in its gradient before the window."""

    def new_window(self) -> None:
        self.obstacle = ""
        self._states, self._left, self._before = [], {}, {}

    def before_backward(self, is_first: bool) -> None:
        """Call before each backward of a window."""
        parameters = self.parameters()
        if is_first:
            self._before, self._states = _largest_of(parameters), self._states_now()
        else:
            self.before_check(parameters)
            self.look_at_parameters()
        self._note(parameters)

    def after_backward(self) -> bool:
        """Call after each backward. Returns whether the backward left gradients: FSDP2 may hold
        them back."""
        parameters = self.parameters()
        has_given = self._are_changed(parameters)
        self._note(parameters)
        return has_given

    def before_check(self, parameters: Sequence[Tensor]) -> None:
        """Call before gradients are unscaled or clipped. A change that the script has made since
        the backward would be lost where they are made again."""
        if self._are_changed(parameters):
            self.obstacle = "its gradients were changed after the backward"

    def let_go(self) -> None:
        """Drop the gradients: the window is over."""
        self._left = {}

    def look_at_parameters(self) -> None:
        """Note if a parameter was written to, frozen or unfrozen since the first backward."""
        if self._states != self._states_now():
            self.obstacle = "its parameters were changed between a forward and the step"

    def _states_now(self) -> list[tuple[int, bool]]:
        return [(version_of(p), p.requires_grad) for p in self.parameters()]

    @property
    def dirty(self) -> set[int]:
        """The ``id`` of parameters that had a gradient, other than zero, before the window.
        Synchronises."""
        return _not_zero(self._before)

    def clear(self, parameters: Sequence[Tensor]) -> set[int]:
        """Make these gradients zero, to be made again. Each stays the same tensor: it may be a view
        of DDP's bucket. Returns the ``id`` of the parameters whose gradient was other than zero.
        Synchronises."""
        found = _not_zero(_largest_of(parameters))
        for grad in gradients_of(parameters):
            grad.zero_()
        self._note(parameters)
        return found

    def take(self, parameters: Sequence[Tensor], before: set[int]) -> bool:
        """Take the gradients that were made again for the window's. Returns whether each of the
        parameters ``before``, which :meth:`clear` has returned, has got one."""
        are_made = all(self._are_changed([p]) for p in parameters if id(p) in before)
        self._note(parameters)
        return are_made

    def _note(self, parameters: Sequence[Tensor]) -> None:
        grads = [(id(p), p.grad) for p in parameters]
        self._left |= {key: (grad, version_of(grad)) for key, grad in grads}

    def _are_changed(self, parameters: Sequence[Tensor]) -> bool:
        return any(
            p.grad is not grad or version_of(grad) != version
            for p in parameters
            if id(p) in self._left
            for grad, version in (self._left[id(p)],)
        )


def _largest_of(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """By the ``id`` of each parameter with a gradient: the largest magnitude in the gradient, shape
    (); 0 where it is empty. Does not synchronise."""
    found = {}
    for p, grad in ((p, local(p.grad)) for p in parameters if p.grad is not None):
        values = grad._values() if grad.is_sparse else grad
        ends = torch.stack(torch.aminmax(values)) if values.numel() else torch.zeros(1)
        found[id(p)] = ends.abs().amax()
    return found


def _not_zero(largest: dict[int, Tensor]) -> set[int]:
    return {key for key, each in largest.items() if float(each) != 0.0}


def version_of(tensor: Tensor | None) -> int:
    """The version counter of a tensor; 0 where it has none."""
    if tensor is None or tensor.is_inference():
        return 0
    # FSDP2 adds to a DTensor's shard, autograd under tensor parallelism to the DTensor.
    return tensor._version + (0 if type(tensor) is Tensor else local(tensor)._version)
