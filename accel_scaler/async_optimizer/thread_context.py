"""What a thread brings along that changes the numbers of an optimizer's step, and what ties a
step to the training thread: random numbers and collectives, whose order is that thread's.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import StepError

__all__ = ["OrderedOpsMode", "ThreadContext"]


class ThreadContext:
    """Of the thread that makes it: gradient mode, autocast, default device."""

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
        """On whatever thread: autocast and the default device as they were there."""
        if threading.get_ident() == self._thread:
            yield
            return
        with ExitStack() as stack:
            if self._default.type != "cpu":
                stack.enter_context(self._default)
            # Not torch.autocast: as it ends it drops the casts that the training thread's keeps.
            caches = torch.is_autocast_cache_enabled()
            if self._autocast:
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
        """:meth:`around`, and the gradient mode too."""
        with self.around(), torch.set_grad_enabled(self._with_grad):
            yield


class OrderedOpsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for random numbers and collectives in a step.

    Args:
        forbid: raise ``StepError`` before one is done, with this text after what it is; None: note
            the first in ``seen``.
    """

    def __init__(self, forbid: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forbid = forbid
        self.seen: str | None = None
        self._before: Any = None

    # Not the base's: it notes modes in flags of the whole process, which dynamo reads on others.
    def __enter__(self) -> OrderedOpsMode:
        if self.forbid is None:
            self._before = _random_states()
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *_: Any) -> None:
        torch._C._pop_torch_dispatch_stack(None)
        if self.forbid is None and self.seen is None and _random_states() != self._before:
            self.seen = "draws random numbers"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _bound_to_order(func)
        if what is not None:
            if self.forbid is not None:
                self.seen = what
                raise StepError(
                    f"the step {what}, which it did not in its first step. {self.forbid}"
                )
            self.seen = self.seen or what
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled step stays compiled; the seeds it draws and its collectives are seen."""
        return True


@cache
def _bound_to_order(func: Any) -> str | None:
    """What ``func`` does that has a place among the training thread's operations."""
    name = str(func)
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return f"draws random numbers ({name})"
    if getattr(func, "namespace", "").startswith(("c10d", "_c10d_functional")):
        return f"communicates ({name})"
    return None


def _random_states() -> list[Any]:
    """Python's, numpy's and torch's on the CPU."""
    states: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states.append((state[1].tobytes(), *state[2:]))
    return states
