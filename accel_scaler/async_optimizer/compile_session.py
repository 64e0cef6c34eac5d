"""Steps on the optimizer thread and ``torch.compile`` take turns.

Note [Compile sessions]
-----------------------
While dynamo compiles a frame, ``torch.compiler.is_compiling()`` is True on every thread (torch
2.13). torch's optimizers ask it, for each parameter: where it is True they compute with tensors
what they else compute with Python floats, which rounds otherwise, and some fail. So no step runs on
the optimizer thread beside a compile, whatever that one compiles.

Each compile holds dynamo's own lock from before the flag is set until after it is cleared. A step
holds the same lock, so that the second waits for the first. One compile cannot wait for its own
end: where dynamo meets a pending parameter, its step has to run now. While the compile waits for
that, it gives the lock away, and the flag is down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from ..scaling import WAIT_LIMIT_S


def is_compiling_here() -> bool:
    """Whether this thread runs a compiler, which may hold a real tensor in its hands."""
    return torch._guards.CompileContext.try_get() is not None


def is_in_compiled_call() -> bool:
    """Whether this thread compiles, or runs a part of a compiled function that is not compiled."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback is not None or is_compiling_here()


def beside_no_compile() -> Any:
    """Around a step, on the optimizer thread: nothing is compiled meanwhile."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    return nullcontext() if dynamo is None else dynamo.compile_lock  # nothing was compiled yet


@contextmanager
def waiting_for_step() -> Iterator[None]:
    """Around a wait for the optimizer thread; matters where this thread compiles."""
    if not is_compiling_here():
        yield
        return
    compiler, lock = torch.compiler, beside_no_compile()
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    depth = 0
    with suppress(RuntimeError):  # a compiled backward is compiled without the lock
        while True:
            lock.release()
            depth += 1
    try:
        yield
    finally:
        for _ in range(depth):
            lock.acquire(timeout=WAIT_LIMIT_S)
        compiler._is_compiling_flag = before
