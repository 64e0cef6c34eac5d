"""What a thread brings along that changes the numbers of an optimizer's step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from .compile_session import beside_no_compile


class ThreadContext:
    """Gradient mode, autocast and default device of the thread that makes it."""

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._with_grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.is_autocast_enabled(kind)
        ]
        self._default = torch.get_default_device()

    @contextmanager
    def around(self) -> Iterator[None]:
        """On any thread: autocast and the default device as they were there."""
        if threading.get_ident() == self._thread:
            yield
            return
        with ExitStack() as stack:
            if self._default.type != "cpu":
                stack.enter_context(self._default)
            # Not torch.autocast: as it ends it drops the casts that the training thread's keeps.
            if self._autocast:
                caches = torch.is_autocast_cache_enabled()
                stack.callback(torch.set_autocast_cache_enabled, caches)
                torch.set_autocast_cache_enabled(False)
            for kind, dtype in self._autocast:
                stack.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
                stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_enabled(kind, True)
            yield

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """:meth:`around`, and the gradient mode too; on another thread beside no compile."""
        is_there = threading.get_ident() == self._thread
        turn = nullcontext() if is_there else beside_no_compile()
        with turn, self.around(), torch.set_grad_enabled(self._with_grad):
            yield
