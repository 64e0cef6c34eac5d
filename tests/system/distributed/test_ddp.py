"""A Trainer under DDP on two gloo ranks: one rank overflows, both skip; numbers are stock's."""

from __future__ import annotations

from typing import Any

import torch
from launching import accelerate_launch


def test_a_trainer_under_ddp_equals_the_stock_trainer(tmp_path: Any) -> None:
    ranks = accelerate_launch("trainer_script.py", tmp_path)
    for rank, result in enumerate(ranks):
        ours, theirs = result["attached"], result["stock"]
        assert ours["scaler"].startswith("accel_scaler")
        assert theirs["scaler"].startswith("torch")
        assert theirs["skipped"] == [False, True, False, False]
        for key in ("skipped", "scales", "logs"):
            assert ours[key] == theirs[key], key
        assert torch.equal(ours["weights"], theirs["weights"])
        assert torch.equal(ours["weights"], ranks[1 - rank]["attached"]["weights"])
