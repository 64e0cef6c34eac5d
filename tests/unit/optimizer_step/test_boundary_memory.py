"""A boundary allocates nothing that grows with the model."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_scaler import attach


class Allocations(TorchDispatchMode):
    """Bytes of storage that each operation returns and was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors([args, kwargs])}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for v in items for t in _tensors(v)] if isinstance(items, (list, tuple)) else []


@pytest.mark.parametrize("overflow", [False, True])
def test_a_boundary_allocates_only_scalars(overflow: bool) -> None:
    accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"))
    params = [torch.nn.Parameter(torch.randn(400, 400)) for _ in range(4)]
    optimizer = accelerator.prepare(torch.optim.AdamW(params, fused=True))
    for turn in range(3):
        accelerator.scaler.scale(torch.ones(()))
        for p in params:
            p.grad = torch.randn_like(p)
        if overflow and turn == 2:
            params[-1].grad[-1, -1] = float("inf")
        with Allocations() as seen:
            accelerator.clip_grad_norm_(params, 1.0)
            optimizer.step()
    assert accelerator.optimizer_step_was_skipped is overflow
    assert seen.sizes, "the watch saw nothing"
    if not overflow:
        assert max(seen.sizes) <= 64
    # To tell an overflow from a large norm, one gradient is read with a mask of a byte each.
    assert sum(size for size in seen.sizes if size > 64) <= 2 * 400 * 400 * int(overflow) * 4
