"""Who owns parameters that are stepped on a thread, or have masters: what was prepared last.

A notebook cell that is run again prepares another optimizer over the same model, which goes on from
the newest values with fresh state. The reference is a plain loop with masters written out.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from async_support import lazy
from references import INIT_SCALE, Reference
from support import mlp, reset, weights
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from accel_scaler import (
    AsyncOptimizer,
    GradScaler,
    OrderError,
    ScalerConfig,
    attach,
    detach,
)
from accel_scaler.errors import StepError
from accel_scaler.optimizer_step import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
WAYS = [("sync", HALF), ("sync", BRAIN), ("overlap", HALF), ("overlap", FULL)]
ways = pytest.mark.parametrize(("mode", "dtype"), WAYS, ids=str)
REPLACED = "prepared after this SGD|AsyncOptimizer is closed"
AGAIN = ["prepare", "another accelerator", "by hand"]
again = pytest.mark.parametrize("how", AGAIN)


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: Tensor = model(x).float().square().mean()
    return loss


def plain(dtype: torch.dtype, *runs: range) -> Tensor:
    """Each run has an optimizer and masters of its own; returns the model."""
    model = mlp().to(dtype)
    for run in runs:
        reference = Reference(
            model.parameters(), lambda masters: SGD(masters, lr=0.1, momentum=0.9)
        )
        for step in run:
            (loss_of(model, step) * reference.scale).backward()
            assert reference.boundary()
    return weights(model)


class Cell:
    """What a notebook cell makes anew over one model each time that it is run."""

    def __init__(self, how: str, dtype: torch.dtype, mode: Any) -> None:
        self.how, self.model, self.mode = how, mlp().to(dtype), mode
        self.accelerators: list[Any] = []
        self.made: list[Any] = []
        """Every optimizer, as a notebook keeps it."""

    def run(self) -> Any:
        """The optimizer that is to be stepped from now on."""
        inner = sgd(self.model.parameters())
        if self.how == "by hand":
            self.scaler = GradScaler("cpu", init_scale=INIT_SCALE)
            ours: Any = AsyncOptimizer(inner, self.model, scaler=self.scaler, step_mode=self.mode)
            self.backward: Any = lambda loss: self.scaler.scale(loss).backward()
            self.called: Any = self.model
        else:
            if self.how == "another accelerator" or not self.accelerators:
                config = ScalerConfig(init_scale=INIT_SCALE, step_mode=self.mode)
                accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
                accelerator.native_amp = False
                self.accelerators.append(accelerator)
            self.called, ours = self.accelerators[-1].prepare(self.model, inner)
            self.scaler = self.accelerators[-1].scaler
            self.backward = self.accelerators[-1].backward
        self.made.append(ours)
        return ours

    def train(self, optimizer: Any, steps: range) -> None:
        for step in steps:
            self.backward(loss_of(self.called, step))
            optimizer.step()
            optimizer.zero_grad()

    def close(self) -> None:
        self.scaler.abandon_window()
        for accelerator in self.accelerators:
            accelerator.scaler.abandon_window()
            detach(accelerator)
        for optimizer in self.made if self.how == "by hand" else ():
            optimizer.close()


@contextmanager
def cell(how: str, dtype: torch.dtype, mode: str = "sync") -> Iterator[Cell]:
    reset()
    made = Cell(how, dtype, mode)
    try:
        yield made
    finally:
        made.close()


@again
@ways
def test_the_newest_optimizer_goes_on_and_the_old_one_says_so(
    how: str, mode: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with cell(how, dtype, mode) as notebook:
        with lazy() if how != "by hand" else nullcontext():  # two workers there
            old = notebook.run()
            inner = getattr(old, "optimizer", old)
            schedule = LambdaLR(inner, lambda step: 0.5**step)
            notebook.train(old, range(4))
            with caplog.at_level(logging.WARNING, "accel_scaler"):
                new = notebook.run()
            (record,) = [r for r in caplog.records if "prepared after" in r.message]
            assert "both step 4 parameters. " in record.message
            with pytest.raises(OrderError, match=REPLACED):
                old.step()
            notebook.train(new, range(4, 8))
            with pytest.raises(OrderError, match=REPLACED):
                old.step()
            schedule.step()  # of an optimizer that nobody steps
            old.zero_grad()
            old.synchronize()
            assert len(old.state_dict()["state"]) == 4
            new.synchronize()
        assert torch.equal(weights(notebook.model), plain(dtype, range(4), range(4, 8)))
        assert async_stepper_of(inner) is None


@pytest.mark.parametrize(
    ("how", "mode"),
    [("prepare", "sync"), ("another accelerator", "overlap"), ("by hand", "overlap")],
)
def test_the_old_masters_are_freed_and_the_newest_values_are_there(how: str, mode: str) -> None:
    """Though the notebook keeps the old optimizer, whose last update was still to come."""
    with cell(how, HALF, mode) as notebook:
        old = notebook.run()
        notebook.train(old, range(3))
        old.synchronize()
        stepper: Any = async_stepper_of(old.optimizer)
        pairs = stepper.replica.pairs
        newest = torch.cat([pair.stepped.detach().half().flatten() for pair in pairs])
        masters = [weakref.ref(pair.stepped) for pair in pairs]
        del stepper, pairs
        notebook.run()
        gc.collect()
        assert [ref() for ref in masters] == [None] * 4
        assert torch.equal(weights(notebook.model), newest)


@again
def test_an_old_optimizer_that_is_prepared_again_takes_over_with_its_state(how: str) -> None:
    """As a Trainer does that is trained again, after another one over the same model."""
    with cell(how, HALF) as notebook:
        old = notebook.run()
        notebook.train(old, range(3))
        inner = old.optimizer
        momentum = inner.state[next(notebook.model.parameters())]["momentum_buffer"].clone()
        new = notebook.run()
        notebook.train(new, range(3, 6))
        if how == "by hand":
            back: Any = AsyncOptimizer(inner, notebook.model, scaler=notebook.scaler)
            notebook.made.append(back)
        else:
            back = notebook.accelerators[0].prepare(old)
            assert back is old
            notebook.backward = notebook.accelerators[0].backward
        with pytest.raises(OrderError, match=REPLACED):
            new.step()
        found = inner.state[next(notebook.model.parameters())]["momentum_buffer"]
        assert torch.equal(found.float(), momentum.float())
        before = weights(notebook.model)
        notebook.train(back, range(6, 7))
        back.synchronize()
        assert not torch.equal(weights(notebook.model), before)


@pytest.mark.parametrize(("mode", "dtype"), [("sync", HALF), ("overlap", HALF), ("overlap", FULL)])
def test_of_two_in_one_call_the_last_owns_them(mode: str, dtype: torch.dtype) -> None:
    with cell("prepare", dtype, mode) as notebook:
        first = notebook.run()
        (accelerator,) = notebook.accelerators
        some = SGD(list(notebook.model.parameters())[:1], lr=0.1)
        _, some, second = accelerator.prepare(
            notebook.model, some, sgd(notebook.model.parameters())
        )
        assert accelerator._optimizers == [second]
        notebook.train(second, range(4))
        for other in (first, some):
            with pytest.raises(OrderError, match=REPLACED):
                other.step()
        second.synchronize()
        assert torch.equal(weights(notebook.model), plain(dtype, range(4)))


def test_in_sync_without_masters_both_step_as_in_torch() -> None:
    w = nn.Parameter(torch.ones(2))
    accelerator = attach(Accelerator(cpu=True))
    optimizers = accelerator.prepare(SGD([w], lr=0.25), SGD([w], lr=0.5))
    accelerator.backward(w.sum())
    for optimizer in optimizers:
        optimizer.step()
    assert w.tolist() == [0.25, 0.25]
    detach(accelerator)


def test_a_parameter_that_is_added_later_is_owned_from_then_on() -> None:
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = (AsyncOptimizer(SGD([p], lr=0.5)) for p in (a, b))
    with lazy(), second:
        second.add_param_group({"params": [a]})
        for p in (a, b):
            p.grad = torch.ones(2)
        second.step()
        with pytest.raises(OrderError, match="closed"):
            first.step()
    assert [p.tolist() for p in (a, b)] == [[0.5, 0.5]] * 2


@again
def test_a_last_step_that_failed_is_told_and_the_cell_can_be_run_again(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first use of a parameter, or by the end of the old one, which is closed then."""
    with cell(how, HALF, "overlap") as notebook:
        old = notebook.run()
        notebook.train(old, range(1))
        old.synchronize()
        with monkeypatch.context() as patched:
            stepper: Any = async_stepper_of(old.optimizer)
            patched.setattr(stepper.replica, "step_part", failing)
            notebook.train(old, range(1, 2))
            with pytest.raises(StepError, match="no luck"):
                notebook.run()
        new = notebook.run()
        with pytest.raises(OrderError, match=REPLACED):
            old.step()
        notebook.train(new, range(2, 4))
        new.synchronize()


def failing(*args: Any) -> None:
    raise RuntimeError("no luck")
