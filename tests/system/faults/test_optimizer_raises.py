"""The optimizer raises at step k: who is told, when, with what, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_run import MODES, Run
from support import same

from accel_scaler import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

FAILING = 4
"""The window whose update raises, before it has changed anything."""

WORKER = [mode for mode in MODES if mode != "sync"]


def failing_at(update: int) -> type[torch.optim.SGD]:
    """SGD whose step raises once, on whichever thread steps it."""
    step, calls = torch.optim.SGD.step, 0

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            nonlocal calls
            calls += 1
            if calls == update:
                raise ArithmeticError(f"the kernel failed in update {update}")
            return step(self, closure)

    return Failing


def fails(run: Run, kind: type[BaseException]) -> BaseException:
    """Train until it raises; the error."""
    with pytest.raises(kind, match="the kernel failed") as caught:  # noqa: PT012
        run.train(FAILING + 2)
        run.optimizer.synchronize()
    return caught.value


def test_the_optimizer_raises_on_the_training_thread_in_sync() -> None:
    """Its own error, out of ``optimizer.step()`` of the same window; nothing was changed."""
    reference = Run("sync").train(FAILING)
    expected = reference.state()
    reference.close()
    run = Run("sync", failing_at(FAILING))  # window 2 overflowed: window 4's update is the fourth
    error = fails(run, ArithmeticError)
    assert type(error) is ArithmeticError
    assert run.progress.window == FAILING
    assert same(run.state()["weights"], expected["weights"])
    assert same(run.state()["state"], expected["state"])
    run.model.zero_grad()
    run.train()
    assert run.progress.window == 12
    run.close()


@pytest.mark.parametrize("mode", WORKER)
def test_the_optimizer_raises_on_its_thread(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``StepError``, with the optimizer's own as its cause, by the end of the next window; it
    names what was updated, and training can go on from there."""
    reference = Run(mode).train(FAILING)
    expected = reference.state()
    reference.close()
    monkeypatch.setattr(torch.optim.SGD, "step", failing_at(FAILING).step)
    run = Run(mode)
    error = fails(run, StepError)
    assert type(error.__cause__) is ArithmeticError
    assert "optimizer thread" in str(error)
    said = "Updated: none. As before the step: 0.weight, 0.bias, 3.weight, 3.bias;"
    assert said in str(error)
    assert run.progress.window in ((FAILING,) if mode == "sync offload" else (FAILING, FAILING + 1))
    state = run.state()
    assert same(state["weights"], expected["weights"]), "the update that failed left a trace"
    assert same(state["state"], expected["state"])
    run.model.zero_grad()
    run.train()
    assert run.progress.window == 12
    assert all(bool(p.isfinite().all()) for p in run.layers.parameters())
    run.close()
