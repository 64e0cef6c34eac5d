"""The only collectives of the package; all run on the training thread, in program order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["agree_on_overflow", "whole"]


def agree_on_overflow(found_inf: bool, device: torch.device, sharded: bool) -> bool:
    """Whether any rank found an overflow.

    Args:
        found_inf: this rank's finding.
        device: where the process group communicates.
        sharded: each rank holds other gradients (FSDP). Where False nothing is sent: after
            DDP's all-reduce an inf or NaN of one rank stands in every rank's gradients.

    Synchronises with the device and with the other ranks if ``sharded``.
    """
    if not sharded or not dist.is_initialized() or dist.get_world_size() == 1:
        return found_inf
    flag = torch.full((), float(found_inf), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def whole(t: Any) -> Tensor:
    """A sharded tensor's elements from all ranks, as a plain tensor; others as they are.

    Communicates if ``t`` is a DTensor.
    """
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full
