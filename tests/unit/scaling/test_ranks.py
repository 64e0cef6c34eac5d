"""When ranks must be asked, and when nothing may be sent. Two ranks: tests/system/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_scaler.scaling.collectives import agree_on_overflow

CPU = torch.device("cpu")


class Ranks:
    """Two ranks, the other of which found ``other``; notes each all-reduce."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: float, world: int = 2) -> None:
        self.other, self.sent = other, 0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, flag: torch.Tensor, op: Any) -> None:
        assert op is dist.ReduceOp.MAX
        self.sent += 1
        flag.fill_(max(float(flag), self.other))


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_one_rank_is_enough(monkeypatch: pytest.MonkeyPatch, mine: bool, other: float) -> None:
    ranks = Ranks(monkeypatch, other)
    assert agree_on_overflow(mine, CPU, sharded=True) is (mine or other > 0)
    assert ranks.sent == 1


@pytest.mark.parametrize(("sharded", "world"), [(False, 2), (True, 1)])
def test_nothing_is_sent_where_nothing_can_differ(
    monkeypatch: pytest.MonkeyPatch, sharded: bool, world: int
) -> None:
    ranks = Ranks(monkeypatch, 1.0, world)
    assert agree_on_overflow(False, CPU, sharded) is False
    assert ranks.sent == 0
