"""``make soak`` runs and knows growth from noise; and the leaks that it has found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import soak
import torch
from accelerate import Accelerator
from soak import Sample
from support import reset

from accel_scaler import attach, detach

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def test_growth_is_what_goes_on_after_the_warm_up() -> None:
    def found(rise: float, objects: int) -> list[str]:
        warm = [min(20.0, n) for n in range(60)]
        samples = [Sample(60.0 * n, w + rise * n, 1, 6, objects) for n, w in enumerate(warm)]
        return [sentence.split(":")[0] for sentence in soak.grown(Sample(0, 0, 1, 6, 2), samples)]

    assert found(0.1, 2) == []
    assert found(0.5, 2) == ["memory"]
    assert found(0.0, 9) == ["objects"]


def test_the_kinds_run_in_turn_and_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(minutes=0.02, seed=3, every=0.5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " min  " in lines[0]
    assert lines[-1] == "passed, seed 3"


# What the soak has found.


def train(steps: int, mode: Any, leave: Callable[[Any], object]) -> list[weakref.ref[Any]]:
    """With masters, then left; references to the model's parameters."""
    reset()
    model = torch.nn.Linear(2, 2).half()
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), step_mode=mode)
    held = list(model.parameters())
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(held, lr=0.1))
    for _ in range(steps):
        accelerator.backward(prepared(torch.ones(1, 2).half()).sum())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    leave(accelerator)
    assert leave is not detach or not any(p._post_accumulate_grad_hooks for p in held)
    return [weakref.ref(p) for p in held]


@pytest.mark.parametrize("leave", [detach, lambda _: None], ids=["detached", "dropped"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_that_had_masters_are_let_go(
    steps: int, mode: str, leave: Callable[[Any], object]
) -> None:
    kept = train(steps, mode, leave)
    reset()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
