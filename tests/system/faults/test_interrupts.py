"""Ctrl-C, and what else a signal's handler raises, inside an update: logged, and training goes on.

The interrupt is a real signal on the training thread, at a place of a boundary, of this package or
of torch's optimizers. ``FAULT_MOMENTS=50`` tries fifty times as many places.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from children import many, seeded
from fault_run import MODES, Run, momentum
from support import same

import accel_scaler
from accel_scaler.async_optimizer.worker import Task, Worker
from accel_scaler.optimizer_step.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 4
"""The one that is interrupted; at its end the scale grows."""
MOMENTS = 8
WATCHED = (str(Path(accel_scaler.__file__).parent), str(Path(torch.optim.__file__).parent))
PARTLY = "may have moved"
"""The log says this of an update that may be made in part."""


class At:
    """Counts the places where this thread may meet a signal in ``WATCHED``: where a function of
    Python begins, where one of C is over. Raises SIGINT at one of them."""

    def __init__(self, place: int | None = None) -> None:
        self.count, self.place, self.where = 0, place, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(WATCHED):
            # Python drops what the callback of a weak reference raises, or a generator at its end.
            if code.co_name in ("_forget", "<genexpr>"):
                return
            self.count += 1
            if self.count == self.place:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> At:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: "\n".join(caplog.messages)
    signal.signal(signal.SIGINT, before)


def state_of(run: Run) -> list[Any]:
    """Weights and momentum; the scaler's."""
    state = run.state()
    return [state["weights"] + state["state"], state["scaler"]]


def states(mode: str, optimizer: Any = momentum) -> tuple[list[Any], list[Any], int]:
    """Before and after window ``WINDOW``, and how many places its step has."""
    run = Run(mode, optimizer).train(WINDOW)
    before = state_of(run)
    run.close()
    run, at = Run(mode, optimizer).train(WINDOW), At()
    run.around_step = at
    after = state_of(run.train(WINDOW + 1))
    run.close()
    return before, after, at.count


def goes_on(run: Run, folder: Path) -> None:
    """From here it equals, bit for bit, a run that begins with a checkpoint made here."""
    run.around_step = nullcontext()
    run.optimizer.zero_grad()
    run.progress.window, run.seen = WINDOW + 1, []
    run.accelerator.save_state(str(folder))
    mine = run.train(WINDOW + 3).result()
    mode, kind = run.mode, type(run.optimizer.optimizer)
    run.close()
    fresh = Run(mode, partial(momentum, kind=kind))
    fresh.accelerator.load_state(str(folder))
    assert same(mine, fresh.train(WINDOW + 3).result())
    fresh.close()


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_a_random_place_of_a_step_is_logged_and_training_goes_on(
    mode: str, logged: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    before, after, places = states(mode)
    assert places > 100
    draw = seeded(mode)
    for place in [draw.randrange(1, places + 1) for _ in range(many(MOMENTS))]:
        caplog.clear()
        run, at = Run(mode).train(WINDOW), At(place)
        run.around_step = at
        try:
            run.train(WINDOW + 1)
        except KeyboardInterrupt:
            pass
        else:  # a wait looked less often this time, so the place never came
            assert at.count < place, f"swallowed at {at.where}"
            run.close()
            continue
        moved, scaler = state_of(run)
        assert scaler in (before[1], after[1]), at.where
        if PARTLY in logged() or mode == "sync":  # where it is a loop of torch's own
            entries = zip(moved, before[0], after[0], strict=True)
            torn = [m for m, *either in entries if not any(same(m, each) for each in either)]
            assert len(torn) <= 1, at.where  # a momentum that was multiplied, and not added to yet
        else:
            assert any(same(moved, each) for each in (before[0], after[0])), at.where
        goes_on(run, tmp_path / f"{place}")


class StopsHalfWay(torch.optim.SGD):
    """Once, when it has stepped the first parameter, something raises."""

    error: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(buffer.mul_(group["momentum"]).add_(p.grad), alpha=group["lr"])
                error, self.error = self.error, None
                if error is not None:
                    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_run_goes_on_after_an_update_that_was_ended_half_way(
    error: type[BaseException], tmp_path: Path
) -> None:
    """``TimeoutError``: what a handler of SIGALRM raises, usually."""
    before, after, _ = states("sync", partial(momentum, kind=StopsHalfWay))
    run = Run("sync", partial(momentum, kind=StopsHalfWay)).train(WINDOW)
    run.optimizer.optimizer.error = error()
    with pytest.raises(error):
        run.train(WINDOW + 1)
    moved, scaler = state_of(run)
    assert same(scaler, after[1])
    assert same(moved[0], after[0][0])
    assert same(moved[1:4], before[0][1:4])
    goes_on(run, tmp_path)


def test_an_interrupted_hand_over_moves_nothing_and_is_logged(logged: Any, tmp_path: Path) -> None:
    before, after, _ = states("overlap")
    run = Run("overlap").train(WINDOW)
    run.around_step = mock.patch.object(Worker, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train(WINDOW + 1)
    assert "was not handed over (KeyboardInterrupt): no parameter has moved" in logged()
    assert same(state_of(run), [before[0], after[1]])
    goes_on(run, tmp_path)


def test_an_interrupt_while_the_forward_waits_for_the_update_is_handled_at_once(
    logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once the update is over: the one here does not end before the interrupt was handled."""
    _, after, _ = states("overlap")
    run = Run("overlap").train(WINDOW)
    run.optimizer.synchronize()
    gate, late = threading.Event(), []
    step_part, wait = Replica.step_part, Task.wait

    def gated(self: Replica, *args: Any) -> None:
        late.append(not gate.wait(20))
        step_part(self, *args)

    def waiting(self: Task, *args: Any) -> bool:
        is_for_a_part = bool(args) and args[0] is not None
        if is_for_a_part and not self.finished and not gate.is_set():
            interrupt()
        return wait(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "step_part", gated)
        patch.setattr(Task, "wait", waiting)
        with pytest.raises(KeyboardInterrupt):
            run.train(WINDOW + 2)
        gate.set()
        mine = state_of(run)
    assert late
    assert not any(late), "the interrupt was handled when the update was over"
    assert same(mine, after)
    run.close()
