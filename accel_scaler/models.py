"""Questions about a model that more than one folder asks, answered in one way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Module

_this_thread = threading.local()


def unwrap(model: Module) -> Module:
    """The model that is compiled, or replicated on each rank."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, parallel):
            model = model.module
        else:
            return model


def is_compiled(module: Any) -> bool:
    """Whether torch.compile or TorchScript runs it, so that hooks see nothing."""
    return (
        isinstance(module, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule))
        or module._compiled_call_impl is not None
    )


def is_in_backward() -> bool:
    """Whether this thread runs one: a forward in it is a checkpoint's second."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether this thread is in a transform of ``torch.func``: tensors have no memory there."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_fsdp2(module: Any) -> bool:
    """Whether ``fully_shard`` was called on it."""
    # To import it takes a second; who has such a module has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def inert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``__reduce__`` of a hook returns: a function that takes anything and does nothing.

    A model is copied and pickled along with its hooks; nobody listens to the copy, and who loads
    it may not have this package.
    """
    return getattr, (nullcontext(), "__exit__")


def is_replaying() -> bool:
    """Whether this thread runs a window again: hooks that count or time forwards look away."""
    return getattr(_this_thread, "replays", False)


@contextmanager
def as_replay() -> Iterator[None]:
    """Within the block :func:`is_replaying`."""
    before, _this_thread.replays = is_replaying(), True
    try:
        yield
    finally:
        _this_thread.replays = before
