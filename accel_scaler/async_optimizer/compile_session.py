"""Steps on the optimizer thread and ``torch.compile`` take turns.

Note [Compile sessions]
-----------------------
While dynamo compiles a frame, ``torch.compiler.is_compiling()`` is True on every thread (torch
2.13). torch's optimizers ask it, for each parameter: where it is True they compute with tensors
that they otherwise compute with Python floats. The results round differently, and some fail. So
no step runs on the optimizer thread beside a compile, whatever is compiled.

Each compile holds dynamo's own lock from before the flag is set until after it is cleared. A step
takes the same lock, so that whichever comes second waits. But where dynamo meets a pending
parameter, the compile waits for a step, which has to run now. During that wait the compile gives up
the lock, and the flag is down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from ..scaling import WAIT_LIMIT_S


def is_compiling_here() -> bool:
    """Whether this thread runs a compiler, which may be working with a real tensor."""
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
