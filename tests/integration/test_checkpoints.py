"""save_state and load_state of a raw Accelerate loop: stock reads ours, ours reads stock's.

A new process that goes on bit for bit: tests/system/faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_run import OVERFLOWS, STOCK, WINDOWS, Run, momentum
from support import same

from accel_scaler import GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = 5
"""Windows before the checkpoint; one of them overflowed, two of those after it do."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def half_equals_whole(half: dict[str, Any], whole: dict[str, Any]) -> None:
    for run in (half, whole):
        assert run["scaler"].pop("_consecutive_skips", 0) == 0
    assert same(half, whole | {"seen": whole["seen"][HALF:]})
    assert [window for window, *_, skipped in whole["seen"] if skipped] == list(OVERFLOWS)


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize(("first", "second"), [(STOCK, "sync"), ("sync", STOCK)])
def test_checkpoints_go_on_in_stock_as_in_ours(
    tmp_path: Path, optimizer: Any, first: str, second: str
) -> None:
    run = Run(first, optimizer).train(HALF)
    run.accelerator.save_state(str(tmp_path))
    whole = run.train(WINDOWS).result()
    run.close()
    half = Run(second, optimizer)
    half.accelerator.load_state(str(tmp_path))
    assert isinstance(half.accelerator.scaler, GradScaler) is (second != STOCK)
    half_equals_whole(half.train(WINDOWS).result(), whole)
    half.close()


@pytest.mark.parametrize("clipped", [False, True], ids=["half a window", "clipped, not stepped"])
def test_load_state_in_the_middle_of_a_window(tmp_path: Path, clipped: bool) -> None:
    """The open window is given up; after zeroing the gradients training goes on as saved."""
    run = Run("sync").train(HALF)
    run.accelerator.save_state(str(tmp_path))
    whole = run.train(WINDOWS).result()
    run.close()
    half = Run("sync")
    half.accelerator.backward(half.loss(next(iter(half.loader))))
    if clipped:
        half.accelerator.clip_grad_norm_(half.model.parameters(), 0.5)
    assert half.accelerator.scaler.window.opened_by is not None
    half.accelerator.load_state(str(tmp_path))
    assert half.accelerator.scaler.window.opened_by is None
    half.model.zero_grad()
    half_equals_whole(half.train(WINDOWS).result(), whole)
    half.close()
