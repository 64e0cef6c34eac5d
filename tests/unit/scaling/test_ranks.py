"""When ranks must be asked, and when nothing may be sent. Two ranks: tests/system/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_scaler.scaling.ranks import Ranks

CPU = torch.device("cpu")


class Other:
    """A second rank, which has found ``found``; notes each all-reduce."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: float, world: int = 2) -> None:
        self.found, self.sent = found, 0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, flag: torch.Tensor, op: Any, group: Any) -> None:
        assert op is dist.ReduceOp.MAX
        assert group is None
        self.sent += 1
        flag.fill_(max(float(flag), self.found))


def agree(mine: bool, sharded: bool) -> bool:
    ranks, optimizer = Ranks(), torch.optim.SGD(nn.Linear(1, 1).parameters())
    ranks.sharded = sharded
    return ranks.agree_on_overflow(mine, optimizer, CPU)


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_one_rank_is_enough(monkeypatch: pytest.MonkeyPatch, mine: bool, found: float) -> None:
    other = Other(monkeypatch, found)
    assert agree(mine, sharded=True) is (mine or found > 0)
    assert other.sent == 1


@pytest.mark.parametrize(("sharded", "world"), [(False, 2), (True, 1)])
def test_nothing_is_sent_where_nothing_can_differ(
    monkeypatch: pytest.MonkeyPatch, sharded: bool, world: int
) -> None:
    other = Other(monkeypatch, 1.0, world)
    assert agree(False, sharded) is False
    assert other.sent == 0
