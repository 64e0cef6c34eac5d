"""How a model is wrapped, compiled or run, for every folder."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn import Module

_this_thread = threading.local()

untraced = _disable_dynamo
"""Decorates a call that ends a window, hands an update over, or waits. Where a compiled function
has it, the graph ends, the call runs as it is, and a graph begins: traced in pieces, it would meet
a parameter that waits for a task which the following piece is to submit. torch's own optimizers use
the same; it imports dynamo with the first call."""


def unwrap(model: Module) -> Module:
    """The model inside of compiled, ``DataParallel`` and DDP wrappers."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, parallel):
            model = model.module
        else:
            return model


def is_compiled(module: Module) -> bool:
    """Whether its forward, or the whole call, is compiled or scripted."""
    is_wrapper = isinstance(module, (torch._dynamo.OptimizedModule, torch.jit.ScriptModule))
    own = module.__dict__.get("forward")
    is_function = hasattr(own, "_torchdynamo_orig_callable")
    return is_wrapper or is_function or getattr(module, "_compiled_call_impl", None) is not None


def is_in_backward() -> bool:
    """Whether this thread runs a backward; a forward in it is of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether this thread is in a transform of ``torch.func``: tensors have no memory there."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_fsdp2(module: Any) -> bool:
    """Whether ``fully_shard`` was called on it."""
    # The import takes a second; it was made already where there is such a module.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def inert() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The result of a hook's ``__reduce__``: a function that takes anything and does nothing.

    A model is copied and pickled with its hooks, which mean nothing in the copy and may be loaded
    without this package.
    """
    return getattr, (nullcontext(), "__exit__")


def is_replaying() -> bool:
    """Whether this thread runs a window again, in which hooks neither count nor time."""
    return getattr(_this_thread, "replays", False)


@contextmanager
def as_replay() -> Iterator[None]:
    """Within the block :func:`is_replaying`."""
    before, _this_thread.replays = is_replaying(), True
    try:
        yield
    finally:
        _this_thread.replays = before
