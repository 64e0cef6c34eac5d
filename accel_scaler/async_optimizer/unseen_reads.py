"""Models that read their parameters where no hook and no class of ours can wait."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn import Module

from ..models import inert, is_compiled, is_fsdp2, is_in_backward
from ..optimizer_step import ReplicaStepper


def unseen_read(model: Module) -> str | None:
    """Why some reads of the model's parameters cannot be seen; None: all can."""
    for name, module in model.named_modules():
        what = f"{name or type(module).__name__!r}"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{what} is a ScriptModule"
        if is_compiled(module):  # its code checks the class of parameters before any of ours runs
            return f"{what} is compiled"
        if is_fsdp2(module):
            return f"{what} is sharded by FSDP2, which gathers ahead of time"
        if isinstance(module, torch.nn.DataParallel):
            return f"{what} is copied to several devices"
    return None


class BeforeEvaluation:
    """A hook on a whole model: its evaluation waits for all parameters at once. torch's fast path
    of Transformer layers is not for pending ones, and a module may have kept a view of one. It
    refers to the stepper weakly, and does nothing in a copy of the model."""

    def __init__(self, stepper: ReplicaStepper) -> None:
        self._stepper = weakref.ref(stepper)

    def __reduce__(self) -> Any:
        return inert()

    def __call__(self, module: Module, *_: Any) -> None:
        is_trained = torch.is_grad_enabled() and module.training
        if is_trained or torch.compiler.is_dynamo_compiling() or is_in_backward():
            return
        if (stepper := self._stepper()) is not None:
            stepper.synchronize()
