"""Steps on the optimizer thread and ``torch.compile`` take turns.

Note [Compile sessions]
-----------------------
While dynamo compiles a frame, ``torch.compiler.is_compiling()`` is True on every thread (torch
2.13). torch's optimizers ask it, for each parameter: where it is True they compute with tensors
what they else compute with Python floats, which rounds otherwise, and some fail. So no step runs on
the optimizer thread beside a compile, whatever that one compiles.

Each compile holds dynamo's own lock from before the flag is set until after it is cleared. A step
holds the same lock, so that the second waits for the first.

One compile cannot wait for its own end: where dynamo meets a pending parameter, its step has to run
now. While the compile waits for that, the flag is down and steps run without the lock; it goes on
when none of them runs any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..scaling import WAIT_LIMIT_S

POLL_S = 0.01
"""How often a step that waits for a compile looks whether that one waits for a step."""


def is_compiling_here() -> bool:
    """Whether this thread runs a compiler, which may hold a real tensor in its hands."""
    return torch._guards.CompileContext.try_get() is not None


def is_in_compiled_call() -> bool:
    """Whether this thread compiles, or runs a part of a compiled function that is not compiled."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback is not None or is_compiling_here()


class _Turns:
    """Of all steps in this process, and the one compile that may run."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_waited_for = False
        """The compile that runs waits for a step."""
        self.unlocked = 0
        """Steps that run meanwhile, without the lock."""

    def take(self, lock: Any) -> bool:
        """Wait until a step may run. Whether it holds the lock then."""
        while not lock.acquire(timeout=POLL_S):
            with self.changed:
                if self.is_waited_for:
                    self.unlocked += 1
                    return False
        return True

    def end_unlocked(self) -> None:
        """A step is over that had no lock."""
        with self.changed:
            self.unlocked -= 1
            self.changed.notify_all()


_turns = _Turns()


@contextmanager
def beside_no_compile() -> Iterator[None]:
    """Around a step, on the optimizer thread: nothing is compiled meanwhile."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None:  # nothing was compiled yet
        yield
        return
    has_lock = _turns.take(dynamo.compile_lock)
    try:
        yield
    finally:
        if has_lock:
            dynamo.compile_lock.release()
        else:
            _turns.end_unlocked()


@contextmanager
def waiting_for_step() -> Iterator[None]:
    """Around a wait for the optimizer thread; matters where this thread compiles."""
    if not is_compiling_here():
        yield
        return
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    _turns.is_waited_for = True
    try:
        yield
    finally:
        with _turns.changed:
            _turns.is_waited_for = False
            _turns.changed.wait_for(lambda: not _turns.unlocked, WAIT_LIMIT_S)
            compiler._is_compiling_flag = before
