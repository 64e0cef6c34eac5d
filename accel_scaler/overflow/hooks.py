"""Hooks on models. They know whom they tell weakly, and compiled code not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models import inert

MAX_NODES = 64
"""Nodes of one module's graph that are searched for the edge to its input."""

Edge = tuple[Any, int]
"""``(node, number)``: where the gradient of one tensor goes."""


class Hook:
    """Calls ``listener.method(*about, *what the hook is given)``, while the listener lives."""

    __torch_unserializable__ = True  # a tensor is saved without its hooks, and without a warning

    def __init__(self, listener: Any, method: str, *about: Any) -> None:
        self._listener, self._method, self._about = weakref.ref(listener), method, about

    def __reduce__(self) -> Any:
        return inert()

    def __call__(self, *given: Any) -> None:
        # Traced to nothing, a hook does not break the graph of a compiled model.
        listener = None if torch.compiler.is_compiling() else self._listener()
        if listener is not None:
            getattr(listener, self._method)(*self._about, *given)


def gradient_edge(tensor: Tensor) -> Edge:
    """Where a tensor's gradient goes."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def hook_inputs(
    inputs: list[Edge], outputs: list[Tensor], hook_of: Callable[[int], Callable[..., None]]
) -> None:
    """Watch what a module adds to the gradient of each input: others may have taken it too.

    Args:
        hook_of: the hook on a node whose gradient of this number goes to an input.
    """
    ends = {node for node, _ in inputs}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        for number, (after, output) in enumerate(node.next_functions):
            if after is None:
                continue
            if any(after is end and output == at for end, at in inputs):
                node.register_hook(hook_of(number))
            stack.append(after)
