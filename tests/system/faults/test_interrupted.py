"""An interrupt while the training thread waits for the optimizer thread."""

from __future__ import annotations

import functools
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from fault_run import Run, same

from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.worker import Task
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 4
"""The one that is interrupted; neither it nor those beside it overflow."""


@functools.cache
def after_the_window(mode: str) -> dict[str, Any]:
    run = Run(mode).train(WINDOW + 1)
    state = run.state()
    run.close()
    return state


KEYS = ("weights", "state", "scaler")
"""What one update moves together; the schedule is the user's to step."""


@pytest.mark.parametrize("mode", ["overlap", "delayed", "overlap offload", "delayed offload"])
def test_an_interrupt_while_the_training_thread_waits_for_the_other_is_handled_at_once(
    mode: str, tmp_path: Path
) -> None:
    """Not once the update is over: the one here does not end before the interrupt was handled.

    In ``overlap`` the forward waits; in ``delayed`` the next boundary, for all of the update.
    """

    def body() -> None:
        expected = after_the_window(mode)
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
            awaited = mode.startswith("overlap") == (args[0] is not None)  # a part, or all
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
