"""What ran when on the training thread: forward, backward, clip and step of the present window."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from ..overflow_finder import Hook, is_replaying
from .record import Span

MOST_SPANS = 256
"""Of one window; what comes after is left out."""


class Timeline:
    """Spans of host time since the last :meth:`take`. On a GPU they are those of enqueueing.

    Nothing here synchronises with a device.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._handles: list[Any] = []
        self._watched: weakref.WeakSet[Module] = weakref.WeakSet()

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """What runs inside is one span."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, start)

    def add(self, kind: str, start: float) -> None:
        """A span from ``start`` (of ``perf_counter``) to now."""
        if len(self._spans) < MOST_SPANS:
            self._spans.append((kind, start, time.perf_counter() - start))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def watch(self, model: Module) -> None:
        """Note this model's training forwards. Once each; :meth:`close` removes the hooks."""
        if model in self._watched:
            return
        self._watched.add(model)
        starts: list[float] = []
        self._handles += [
            model.register_forward_pre_hook(Hook(self, "forward_begins", starts), prepend=True),
            model.register_forward_hook(Hook(self, "forward_ends", starts)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Called by hooks.

    def forward_begins(self, starts: list[float], *_: Any) -> None:
        """Note when; one that failed before is forgotten."""
        is_training = torch.is_grad_enabled() and not is_replaying()
        starts[:] = [time.perf_counter()] if is_training else []

    def forward_ends(self, starts: list[float], *_: Any) -> None:
        """A training forward is a span."""
        if starts and torch.is_grad_enabled():
            self.add("forward", starts.pop())
