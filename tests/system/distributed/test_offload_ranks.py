"""Offload under DDP and FSDP2, on two gloo ranks: torch's numbers, bit for bit.

There is no accelerator with several ranks here, so a CPU stands for the device: host memory is
another part of its memory, and copies are done when they are asked for. Their order on real
streams is shown by tests/gpu/test_offload_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import compare
from versions import before_torch

from accel_scaler.optimizer_step import host_memory, masters, offloaded, ring

RUNS: dict[str, dict[str, Any]] = {
    f"budget {budget}": {
        "step_mode": "sync",
        "offload": {"offload": "cpu", "offload_budget": budget},
    }
    for budget in ("auto", 0, "1KiB")
}


class Done:
    """A stream or an event: all that it was asked for is done."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class ImmediateRing(ring.Ring):
    """Copies at once."""

    _stream = Done()  # type: ignore[assignment]

    def _end_of(self, stream: Any) -> Any:
        return stream


def stand_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(length: int, device: torch.device) -> tuple[Tensor, None]:
        return torch.zeros(length), None

    for module in (ring, host_memory):
        monkeypatch.setattr(module, "copy_streams", lambda device: (Done(), Done()))
    monkeypatch.setattr(ring, "on_stream", lambda stream: nullcontext())
    monkeypatch.setattr(host_memory, "pinned_zeros", zeros)
    monkeypatch.setattr(offloaded, "Ring", ImmediateRing)
    for module in (masters, ring):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", 64)
    monkeypatch.setattr(offloaded, "BLOCKS", 1 << 30)


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model.head, model):
        fully_shard(block, mesh=mesh)
    return model


def replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
@pytest.mark.parametrize("kind", ["fused", "sgd"])
@pytest.mark.parametrize("wrap", [shard, replicate])
def test_offload_equals_torch(
    wrap: Callable[[Any], Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_for_a_device(monkeypatch)
    on_two_ranks(lambda: compare(RUNS, wrap, kind), tmp_path)
