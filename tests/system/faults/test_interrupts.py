"""Ctrl-C, and what else a signal's handler raises, inside an update: told, and training goes on.

The interrupt is a real signal on the training thread, at a place of a boundary, of this package or
of torch's optimizers. ``FAULT_MOMENTS=50`` tries fifty times as many places.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from children import many, seeded
from fault_run import MODES
from support import reset, same
from torch import nn

import accel_scaler
from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.worker import Task, Worker
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 3
"""The one that is interrupted; at its end the scale grows."""
SCALE = 2.0**10
MOMENTS = 8
WATCHED = (str(Path(accel_scaler.__file__).parent), str(Path(torch.optim.__file__).parent))
PARTLY = "may have moved"
"""What the log says of an update that may be made in part."""


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


class Run:
    """A loop whose window ``n`` has batch ``n``."""

    def __init__(self, mode: str, optimizer: Any = torch.optim.SGD) -> None:
        self.mode, self.kind = mode, optimizer
        torch.manual_seed(3)
        settings = {"init_scale": SCALE, "growth_interval": WINDOW + 1, "optimizer_threads": 1}
        config = ScalerConfig(**MODES[mode], **settings)
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        inner = optimizer(layers.parameters(), lr=0.1, momentum=0.9)
        self.layers, self.inner = layers, inner
        self.model, self.optimizer = self.accelerator.prepare(layers, inner)

    def backward(self, window: int) -> None:
        x = torch.sin(torch.arange(12.0).reshape(3, 4) + window)
        loss = nn.functional.mse_loss(self.model(x).float(), x[:, :2])
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)

    def train(self, *windows: int) -> Run:
        for window in windows:
            self.backward(window)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> list[list[Any]]:
        """Weights with momentum; scale with counters."""
        self.optimizer.synchronize()
        saved = self.inner.state_dict()["state"]
        moved = [p.detach().clone() for p in self.layers.parameters()]
        moved += [saved[key]["momentum_buffer"].clone() for key in sorted(saved)]
        return [moved, sorted(self.accelerator.scaler.state_dict().items())]

    def close(self) -> None:
        self.accelerator.scaler.abandon_window()
        detach(self.accelerator)
        reset()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What was logged, as one text."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: "\n".join(record.getMessage() for record in caplog.records)
    signal.signal(signal.SIGINT, before)


def goes_on(run: Run, folder: Path) -> None:
    """From here it is, bit for bit, a run that was never interrupted, through a checkpoint."""
    run.optimizer.zero_grad()
    run.accelerator.save_state(str(folder))
    mine = run.train(WINDOW + 1, WINDOW + 2).state()
    run.close()
    fresh = Run(run.mode, run.kind)
    fresh.accelerator.load_state(str(folder))
    assert same(mine, fresh.train(WINDOW + 1, WINDOW + 2).state())
    fresh.close()


def states(mode: str, optimizer: Any = torch.optim.SGD) -> tuple[list[Any], list[Any], int]:
    """Before and after window ``WINDOW``, and how many places its step has."""
    run = Run(mode, optimizer).train(*range(WINDOW))
    before = run.state()
    run.close()
    run = Run(mode, optimizer).train(*range(WINDOW))
    run.backward(WINDOW)
    with At() as at:
        run.optimizer.step()
    after = run.state()
    run.close()
    return before, after, at.count


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_a_random_place_of_a_step_is_told_and_training_goes_on(
    mode: str, told: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    before, after, places = states(mode)
    assert places > 100
    draw = seeded(mode)
    for place in [draw.randrange(1, places + 1) for _ in range(many(MOMENTS))]:
        caplog.clear()
        run, at = Run(mode).train(*range(WINDOW)), At(place)
        run.backward(WINDOW)
        was_interrupted = True
        with suppress(KeyboardInterrupt), at:
            run.optimizer.step()
            was_interrupted = False
        if not was_interrupted:  # a wait looked less often this time, so the place never came
            assert at.count < place, f"swallowed at {at.where}"
            run.close()
            continue
        moved, scaler = run.state()
        assert scaler in (before[1], after[1]), at.where
        if PARTLY in told():
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
def test_an_update_that_is_ended_half_way_says_so(
    error: type[BaseException], told: Any, tmp_path: Path
) -> None:
    """``TimeoutError``: what a handler of SIGALRM raises, usually."""
    before, after, _ = states("sync", StopsHalfWay)
    run = Run("sync", StopsHalfWay).train(*range(WINDOW))
    run.backward(WINDOW)
    run.inner.error = error()
    with pytest.raises(error):
        run.optimizer.step()
    assert f"the update of StopsHalfWay ended in {error.__name__}: of its 4 parameters" in told()
    moved, scaler = run.state()
    assert same(scaler, after[1])
    assert same(moved[0], after[0][0])
    assert same(moved[1:4], before[0][1:4])
    goes_on(run, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_once_the_step_is_made_leaves_it_whole(
    mode: str, told: Any, tmp_path: Path
) -> None:
    """In a post hook: on the training thread, after the update or its hand-over."""
    _, after, _ = states(mode)
    run = Run(mode).train(*range(WINDOW))
    hook = run.inner.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    run.backward(WINDOW)
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    hook.remove()
    assert same(run.state(), after)
    goes_on(run, tmp_path)


@pytest.mark.parametrize("mode", ["overlap", "delayed", "sync offload"])
def test_an_interrupted_hand_over_moves_nothing_and_says_so(
    mode: str, told: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, after, _ = states(mode)
    run = Run(mode).train(*range(WINDOW))
    run.backward(WINDOW)

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
    assert "was not handed over (KeyboardInterrupt): no parameter has moved" in told()
    assert same(run.state(), [before[0], after[1]])
    goes_on(run, tmp_path)


@pytest.mark.parametrize("mode", ["overlap", "delayed", "overlap offload", "delayed offload"])
def test_an_interrupt_while_the_training_thread_waits_for_the_other_is_handled_at_once(
    mode: str, told: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not once the update is over: the one here does not end before the interrupt was handled.

    In ``overlap`` the forward waits; in ``delayed`` the next boundary, for all of the update.
    """
    _, after, _ = states(mode)
    run = Run(mode).train(*range(WINDOW))
    stepper = async_stepper_of(run.inner)
    assert stepper is not None
    stepper.wait("the test")  # synchronize() would publish, and change what delayed computes
    gate, late = threading.Event(), []
    step_part, wait = Replica.step_part, Task.wait

    def gated(self: Replica, *args: Any) -> None:
        late.append(not gate.wait(20))
        step_part(self, *args)

    def waiting(self: Task, *args: Any) -> bool:
        awaited = mode.startswith("overlap") == bool(args and args[0] is not None)  # a part, or all
        is_update = self.parts > 0  # not what is made for the next boundary
        if awaited and is_update and not self.finished and not gate.is_set():
            signal.raise_signal(signal.SIGINT)
        return wait(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "step_part", gated)
        patch.setattr(Task, "wait", waiting)
        with pytest.raises(KeyboardInterrupt):
            run.train(WINDOW, WINDOW + 1)
        gate.set()
        mine = run.state()
    assert late
    assert not any(late), "the interrupt was handled when the update was over"
    assert same(mine, after)
    run.close()
