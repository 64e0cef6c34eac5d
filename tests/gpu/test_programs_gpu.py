"""Training loops on a device give a CPU's numbers: masters, the state on the host, streams.

On a simulated device each test fails on an access that nothing orders, too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerators import adamw, fused_adamw, is_simulated, sgd
from device_training import STEPS, Program, Training, assert_as_on_a_cpu
from torch import nn

HALF = torch.float16

KEPT: dict[str, dict[str, Any]] = {
    "masters": {"dtype": HALF},
    "offload": {"offload": "cpu"},
    "masters, offload": {"dtype": HALF, "offload": "cpu"},
}
"""The state that a step keeps beside the parameters, or on the host. A step that keeps none is
torch's own: test_steps_gpu.py."""

each_kept = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def plain(t: Training) -> None:
    t.train(*range(STEPS))


def on_changing_streams(t: Training) -> None:
    """A step on one stream follows a step on another one."""
    for step in range(STEPS):
        (side,) = t.streams(1)
        if step % 2 == 0:
            t.train(step)
        else:
            t.beside(side, lambda step=step: t.train(step))  # type: ignore[misc]
        t.litter()


def gradients_written(t: Training) -> None:
    """After the step: zeroed in place, dropped, or written on another stream."""
    (side,) = t.streams(1)
    for step in range(STEPS):
        t.backward(step)
        t.busy()
        t.optimizer.step()
        grads = [p.grad for p in t.params if p.grad is not None]
        if step % 3 == 2:
            t.beside(side, lambda grads=grads: [g.fill_(7.0) for g in grads])  # type: ignore[misc]
        t.optimizer.zero_grad(set_to_none=step % 3 > 0)
        del grads
        t.litter()


def a_branch_joins(t: Training) -> None:
    """Its parameters have no gradient and no state at first, and a scheduler changes the rate."""
    for step in range(STEPS):
        t.model.is_used = step in (2, 3, 6)
        t.train(step)
        t.inner.param_groups[0]["lr"] *= 0.5 if step % 2 else 1.0


def submitted(t: Training) -> None:
    """Some steps are a function of the user's, on the optimizer thread; one moves nothing."""

    def job() -> None:
        t.scaler.unscale_(t.optimizer)
        nn.utils.clip_grad_norm_(t.inner.param_groups[0]["params"], 0.1)
        t.scaler.step(t.optimizer)

    for step in range(STEPS):
        t.backward(step)
        t.busy()
        if step % 3 == 0:
            t.optimizer.step()
        else:
            t.optimizer.submit(job if step % 3 == 1 else lambda: None)
            t.scaler.update()
        t.optimizer.zero_grad()


def submitted_from_a_stream(t: Training) -> None:
    """The optimizer thread works there, too, so it sees an edit that is still to come."""
    (side,) = t.streams(1)

    def edited_and_submitted() -> None:
        for step in range(STEPS):
            t.backward(step)
            t.busy()
            t.model.layers[0].weight.data[::2].clamp_(-0.1, 0.1)
            t.optimizer.submit(lambda: t.scaler.step(t.optimizer))
            t.scaler.update()
            t.optimizer.zero_grad()

    t.beside(side, edited_and_submitted)


def resumed(t: Training) -> None:
    t.train(0, 1, 2)
    saved = copy.deepcopy(t.optimizer.state_dict())
    t.optimizer.close()
    t.wrap()
    t.optimizer.load_state_dict(saved)
    del saved
    for step in range(3, STEPS):
        t.train(step)
        t.litter()


def masters_that_are_edited(t: Training) -> None:
    """One weight is frozen in turns, another is written past autograd."""
    first, last = t.model.layers[0].weight, t.model.layers[3].weight
    for step in range(STEPS):
        last.requires_grad_(step % 2 == 0)
        if step == 3:
            first.data[::2].clamp_(-0.1, 0.1)
        t.train(step)


PROGRAMS: tuple[Program, ...] = (
    *(plain, on_changing_streams, gradients_written, a_branch_joins),
    *(submitted, submitted_from_a_stream, resumed, masters_that_are_edited),
)


@each_kept
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_what_it_gives_on_a_cpu(program: Program, kept: dict[str, Any]) -> None:
    if "offload" in kept and program in (submitted, submitted_from_a_stream):
        pytest.skip("refused: test_submit_is_refused_with_offload")
    # Real kernels round a float16 product otherwise, which AdamW makes a step of full length.
    assert_as_on_a_cpu(program, make=adamw if is_simulated() else sgd, **kept)


@each_kept
@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_each_kind_of_optimizer_gives_a_cpus_numbers(make: Any, kept: dict[str, Any]) -> None:
    if kept.get("dtype") is HALF and make is fused_adamw and not is_simulated():
        pytest.skip("real kernels round a float16 product otherwise")
    assert_as_on_a_cpu(plain, make=make, **kept)
