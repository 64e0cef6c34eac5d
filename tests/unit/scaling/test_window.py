"""What a window knows of optimizers."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from accel_scaler.scaling.window import Window


def test_an_optimizer_at_the_address_of_one_that_is_gone_is_a_new_one() -> None:
    window = Window(0)
    gone, new = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    old = window.record(gone)
    old.stage = OptState.STEPPED
    window.states[id(new)] = old
    del gone
    assert window.known(new) is None
    assert window.record(new).stage is OptState.READY
    assert any(each is old for each in window.states.values())  # its verdict still counts
