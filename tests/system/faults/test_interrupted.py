"""KeyboardInterrupt and SIGTERM at seeded moments: what is saved then is a whole number of updates.

A signal is raised at a line of a boundary, of this package or of the optimizer, on the training
thread; the user's ``finally`` saves. ``FAULT_MOMENTS=50`` tries fifty times as many lines.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from children import in_child, many, seeded
from fault_run import MODES, Run, same

import accel_scaler
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.worker import Task
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 4
"""The one that is interrupted; neither it nor those beside it overflow."""
MOMENTS = 8
WATCHED = (str(Path(accel_scaler.__file__).parent), str(Path(torch.optim.__file__).parent))


class At:
    """Counts lines that this thread runs in ``WATCHED``; raises a signal at one of them."""

    def __init__(self, line: int | None = None, number: int = signal.SIGINT) -> None:
        self.count, self.line, self.number = 0, line, number
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(self.number)
        return self

    def __enter__(self) -> At:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@functools.cache
def boundaries(mode: str) -> tuple[list[Any], int]:
    """The state before and after window ``WINDOW``, and how many lines that takes."""
    states = []
    for windows in (WINDOW, WINDOW + 1):
        run = Run(mode).train(windows)
        states.append(run.state())
        run.close()
    run = Run(mode).train(WINDOW)
    with At() as at:
        run.train(WINDOW + 1)
    run.close()
    return states, at.count


KEYS = ("weights", "state", "scaler")
"""What one update moves together; the schedule is the user's to step."""


def interrupted(mode: str, line: int, number: int, folder: Path) -> tuple[int, str]:
    """Which of the two states was saved, and where the signal came."""
    states, _ = boundaries(mode)
    run = Run(mode).train(WINDOW)
    at = At(line, number)
    try:
        with at:
            run.train(WINDOW + 1)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        run.accelerator.save_state(str(folder))
    run.close()
    fresh = Run(mode)
    fresh.accelerator.load_state(str(folder))
    mine = fresh.state()
    fresh.train(WINDOW + 3)  # it goes on
    fresh.close()
    found = [n for n, state in enumerate(states) if all(same(mine[k], state[k]) for k in KEYS)]
    print(line, at.where, found)
    assert len(found) == 1, f"neither before nor after the update, at {at.where} (line {line})"
    return found[0], at.where


@pytest.mark.parametrize("mode", ["overlap", "delayed", "overlap offload", "delayed offload"])
def test_an_interrupt_while_the_training_thread_waits_for_the_other_is_handled_at_once(
    mode: str, tmp_path: Path
) -> None:
    """Not once the update is over: the one here does not end before the interrupt was handled.

    In ``overlap`` the forward waits; in ``delayed`` the next boundary, for all of the update.
    """

    def body() -> None:
        expected = boundaries(mode)[0][1]
        gate, late = threading.Event(), []
        step_part, wait = Replica.step_part, Task.wait
        run = Run(mode).train(WINDOW)
        stepper = async_stepper_of(run.optimizer.optimizer)
        assert stepper is not None
        stepper.wait("the test")  # synchronize() would publish, and change what delayed computes

        def gated(self: Replica, *args: Any) -> None:
            late.append(not gate.wait(20))
            step_part(self, *args)

        def waiting(self: Task, *args: Any) -> bool:
            awaited = mode.startswith("overlap") == bool(args)
            if awaited and not self.finished and not gate.is_set():
                signal.raise_signal(signal.SIGINT)
            return wait(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Replica, "step_part", gated)
            patch.setattr(Task, "wait", waiting)
            with pytest.raises(KeyboardInterrupt):
                run.train(WINDOW + 2)
            gate.set()
            mine = run.state()
        assert late
        assert not any(late), "the interrupt was handled when the update was over"
        assert all(same(mine[key], expected[key]) for key in KEYS)
        run.close()

    status = in_child(body, tmp_path / "child.txt")
    assert status == 0, (tmp_path / "child.txt").read_text()


def test_a_second_interrupt_ends_an_update_that_does_not_end(tmp_path: Path) -> None:
    """In the midst: of its parameters the first has moved. The checkpoint before is as it was."""

    def body() -> None:
        expected = boundaries("sync")[0]
        run, came = Run("sync").train(WINDOW), []
        run.accelerator.save_state(str(tmp_path / "before"))
        first, *others = run.layers.parameters()

        def stuck(closure: Any = None) -> None:
            with torch.no_grad():
                first.zero_()
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                came.append("held back")
            raise AssertionError("the second one was held back, too")

        run.optimizer.optimizer.step = stuck
        with pytest.raises(KeyboardInterrupt):
            run.train(WINDOW + 1)
        assert came == ["held back"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not first.any()
        assert all(map(same, others, expected[0]["weights"][1:]))
        run.close()
        fresh = Run("sync")
        fresh.accelerator.load_state(str(tmp_path / "before"))
        fresh.train(WINDOW + 1)
        assert all(same(fresh.state()[key], expected[1][key]) for key in KEYS)
        fresh.close()

    status = in_child(body, tmp_path / "child.txt")
    assert status == 0, (tmp_path / "child.txt").read_text()


def raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_a_random_moment_leaves_a_whole_number_of_updates(
    mode: str, number: signal.Signals, tmp_path: Path
) -> None:
    """In weights, momentum and scale. SIGTERM with the handler that many scripts have."""
    draw, lines = seeded(f"{number.name} {mode}"), boundaries(mode)[1]
    assert lines > 300
    moments = sorted(draw.randrange(1, lines) for _ in range(many(MOMENTS // 2)))

    def body() -> None:
        signal.signal(signal.SIGTERM, raise_exit)
        saved = [interrupted(mode, line, number, tmp_path / "saved")[0] for line in moments]
        assert saved == sorted(saved), "an update that was made before was not made later"

    status = in_child(body, tmp_path / "child.txt")
    assert status == 0, (tmp_path / "child.txt").read_text()
