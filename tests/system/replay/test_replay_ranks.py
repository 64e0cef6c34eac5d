"""Two gloo ranks: the first one on which an overflow began saves it; one process runs it again."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from children import on_two_ranks
from support import reset
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from versions import before_torch

from accel_scaler import ScalerConfig, attach, cli, detach
from accel_scaler.overflow_finder import read


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.25), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.body(x)))
        return out


def attached(folder: Path) -> Any:
    config = ScalerConfig(init_scale=64.0, save_overflow=str(folder))
    return attach(Accelerator(mixed_precision="fp16"), config)


def train(accelerator: Any, model: Any, optimizer: Any, loud: tuple[int, ...]) -> None:
    """Three windows, the second one overflows on these ranks."""
    torch.manual_seed(dist.get_rank())
    for number in range(3):
        x = torch.randn(4, 8) * (1e6 if number == 1 and dist.get_rank() in loud else 1.0)
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.scaler.abandon_window()
    detach(accelerator)


@pytest.mark.parametrize("loud", [(0,), (1,), (0, 1)])
def test_ddp(loud: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        accelerator = attached(tmp_path / "out")
        plain = Net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        train(accelerator, *accelerator.prepare(plain, optimizer), loud)

    on_two_ranks(body, tmp_path)
    assert os.listdir(tmp_path / "out") == [f"overflow-000001-rank{loud[0]}.pt"]
    (path,) = (tmp_path / "out").iterdir()
    assert read(path).about["ranks"] == 2
    reset()
    assert cli.main(["replay", str(path), "--model", f"{__file__}:Net"]) == 0
    assert "The same verdict, bit for bit: forward of " in capsys.readouterr().out
    reset()


@before_torch(2, 7, "torch 2.6: fully_shard wants the streams of a device")
def test_shards_are_refused(tmp_path: Path) -> None:
    def body() -> None:
        logging.getLogger("accel_scaler").addHandler(logging.StreamHandler(sys.stdout))
        accelerator = attached(tmp_path / "out")
        accelerator.scaler.sharded = True
        plain = Net()
        fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        accelerator._models.append(plain)
        model = accelerator.prepare_model(plain, evaluation_mode=True)
        optimizer = accelerator.prepare_optimizer(torch.optim.SGD(plain.parameters(), lr=0.1))
        train(accelerator, model, optimizer, (0, 1))

    on_two_ranks(body, tmp_path)
    assert not os.listdir(tmp_path / "out")
    assert "is sharded (a DTensor, as of FSDP2)" in (tmp_path / "rank0.txt").read_text()
