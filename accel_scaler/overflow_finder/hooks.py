"""The hooks of ``find_overflow``. They know the finder weakly, and compiled code not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .trace import Call

__all__ = [
    "AtInput",
    "AtParameter",
    "AtTensor",
    "Enter",
    "Leave",
    "edge_of",
    "hook_inputs",
    "inert",
]

MOST_NODES = 64
"""Nodes of one module's graph that are searched for the edge to its input."""

Edge = tuple[Any, int]
"""``(node, number)``: where the gradient of one tensor goes."""


def inert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``__reduce__`` of a hook returns: a function that takes anything and does nothing.

    A model is copied and pickled along with its hooks; nobody listens to the copy, and who loads
    it may not have this package.
    """
    return getattr, (nullcontext(), "__exit__")


class _Hook:
    def __init__(self, finder: Any, *about: Any) -> None:
        self._finder, self._about = weakref.ref(finder), about

    def __reduce__(self) -> Any:
        return inert()

    def find(self) -> Any:
        """The finder; None when it is gone, or while a compiler traces.

        Traced to nothing, a hook does not break the graph of a compiled model.
        """
        return None if torch.compiler.is_compiling() else self._finder()


class Enter(_Hook):
    """Before the forward of a module. About: its place."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        finder = self.find()
        if finder is not None:
            finder.enter(*self._about, {**dict(enumerate(args)), **kwargs})


class Leave(_Hook):
    """After it. About: its place."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        finder = self.find()
        if finder is not None:
            finder.leave(*self._about, output)


class AtTensor(_Hook):
    """A gradient came to a tensor. About: its listener."""

    def __call__(self, grad: Any) -> None:
        finder = self.find()
        if finder is not None:
            finder.arrive(*self._about, grad)


class AtParameter(_Hook):
    """A gradient came to a parameter. About: its module's place, its name."""

    def __call__(self, grad: Any) -> None:
        finder = self.find()
        if finder is not None:
            finder.arrive_at_parameter(*self._about, grad)


class AtInput(_Hook):
    """A module's share in the gradient of its input. About: its call, a number."""

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        finder = self.find()
        if finder is not None:
            call, number = self._about
            finder.share(call, grad_inputs[number])


def edge_of(tensor: Tensor) -> Edge:
    """Where a tensor's gradient goes."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def hook_inputs(finder: Any, call: Call, inputs: list[Edge], outputs: list[Tensor]) -> None:
    """Watch what a module adds to the gradient of each input: others may have taken it too."""
    ends = {node for node, _ in inputs}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        for number, (after, output) in enumerate(node.next_functions):
            if after is None:
                continue
            if any(after is end and output == at for end, at in inputs):
                node.register_hook(AtInput(finder, call, number))
            stack.append(after)
