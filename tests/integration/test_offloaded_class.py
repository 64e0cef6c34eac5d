"""``offloaded(cls)`` on a CPU, beside ``cls``: the numbers of a plain loop and of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offloaded_loops import PLAYS, Loop, assert_checkpoints_interchange, assert_play_as_stock
from offloaded_trainer import assert_trainers_are_equal
from torch.optim import SGD, AdamW


@pytest.mark.parametrize("play", PLAYS)
def test_a_loop_gives_the_numbers_of_the_class(play: Callable[[Loop], None]) -> None:
    assert_play_as_stock(play, AdamW, "cpu", lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize(
    ("cls", "kwargs"), [(AdamW, {"lr": 0.05, "fused": True}), (SGD, {"lr": 0.1, "momentum": 0.9})]
)
def test_checkpoints_interchange_with_the_class(cls: Any, kwargs: dict[str, Any]) -> None:
    assert_checkpoints_interchange("cpu", cls, **kwargs)


def test_a_trainer_without_attach(tmp_path: Path) -> None:
    assert_trainers_are_equal(tmp_path)
