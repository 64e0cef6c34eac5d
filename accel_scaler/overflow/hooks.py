"""Hooks on models."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..models import inert


class Hook:
    """Calls ``listener.method(*about, *arguments of the hook)`` while the listener lives.

    A copy or a pickle of it does nothing.
    """

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
