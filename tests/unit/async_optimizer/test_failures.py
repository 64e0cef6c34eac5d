"""An optimizer that fails, a thread that is gone, a forked process: no hang, nothing is lost."""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from async_support import one_part_each, values
from support import same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, OrderError, StepError
from accel_scaler.async_optimizer.pending_parameter import PendingParameter
from accel_scaler.async_optimizer.worker import Task
from accel_scaler.optimizer_step.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.5
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hang ends the test, and well before the ten minutes that a user's would take."""
    wait = Task.wait

    def soon(self: Task, parts: int | None = None, limit_s: float = LIMIT_S) -> bool:
        return wait(self, parts, min(limit_s, LIMIT_S))

    monkeypatch.setattr(Task, "wait", soon)
    with one_part_each():
        yield


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(4)])

    def forward(self) -> Tensor:
        return torch.stack(list(self.ws)).sum()


def gradients(model: Four, bad: int | None = None) -> list[Tensor]:
    for number, w in enumerate(model.ws):
        w.grad = torch.full((3,), 13.0 if number == bad else 1.0 + number)
    return [w.grad.clone() for w in model.ws if w.grad is not None]


@pytest.fixture
def fragile_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD's own step fails at the parameter whose gradient says so."""
    step = torch.optim.SGD.step

    def tremble(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and bool((p.grad == 13.0).any()):
                    raise ValueError("it trembled")
        return step(self)

    tremble.hooked = False  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.SGD, "step", tremble)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_the_error_of_a_failed_step_lists_what_was_updated(fragile_parts: None, bad: int) -> None:
    model = Four()
    optimizer = AsyncOptimizer(sgd(model), model)
    before = values(model)
    grads = gradients(model, bad)
    optimizer.step()
    with pytest.raises(StepError, match="it trembled") as caught:
        optimizer.synchronize()
    optimizer.synchronize()  # told once
    after = [w - LR * g for w, g in zip(before, grads, strict=True)]
    assert same(values(model), after[:bad] + before[bad:])
    names = [f"ws.{number}" for number in range(4)]
    said = str(caught.value)
    assert f"Updated: {', '.join(names[:bad]) or 'none'}." in said
    assert f"Of {names[bad]} some may have moved" in said
    assert f"As before the step: {', '.join(names[bad + 1 :]) or 'none'}." in said
    # The next step works, with what is there.
    now, grads = values(model), gradients(model)
    optimizer.step()
    optimizer.close()
    assert same(values(model), [w - LR * g for w, g in zip(now, grads, strict=True)])


def call_sum(model: Any, optimizer: AsyncOptimizer) -> None:
    model.ws[3].sum()


def call_forward(model: Any, optimizer: AsyncOptimizer) -> None:
    model()


def call_step(model: Any, optimizer: AsyncOptimizer) -> None:
    gradients(model)
    optimizer.step()


CALLS = {
    "a use": call_sum,
    "a forward": call_forward,
    "step": call_step,
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "close": lambda model, optimizer: optimizer.close(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "the inner optimizer's state_dict": lambda model, optimizer: optimizer.optimizer.state_dict(),
    "the model's state_dict": lambda model, optimizer: model.state_dict(),
    "the model's load_state_dict": lambda model, optimizer: model.load_state_dict(
        Four().state_dict()
    ),
    "evaluation": lambda model, optimizer: model.eval()(),
    "submit": lambda model, optimizer: optimizer.submit(lambda: None),
    "deepcopy": lambda model, optimizer: copy.deepcopy(model),
}


def test_whichever_call_comes_next_raises_it_once_with_the_workers_traceback(
    fragile_parts: None,
) -> None:
    for name, call in CALLS.items():
        model = Four()
        optimizer = AsyncOptimizer(sgd(model), model)
        before = values(model)
        gradients(model, bad=0)
        optimizer.step()
        with pytest.raises(StepError, match="it trembled") as caught:
            call(model, optimizer)
        cause = caught.value.__cause__
        assert type(cause) is ValueError, name
        assert "tremble" in [f.name for f in traceback.extract_tb(cause.__traceback__)], name
        assert not any(type(p) is PendingParameter for p in model.parameters()), name
        optimizer.synchronize()  # told once
        model.train()()
        optimizer.close()
        assert same(values(model), before), name


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_in_sync_an_exit_on_the_training_thread_stays_an_exit(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Four()
    optimizer = AsyncOptimizer(sgd(model), model, step_mode="sync")
    before = values(model)

    def leave(*_: Any) -> None:
        raise kind("now")

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "step_part", leave)
        gradients(model)
        with pytest.raises(kind):
            optimizer.step()
    assert same(values(model), before)
    grads = gradients(model)
    optimizer.step()
    optimizer.close()
    assert same(values(model), [w - LR * g for w, g in zip(before, grads, strict=True)])


def test_a_function_given_to_submit_that_fails_is_told_without_false_claims() -> None:
    model = Four()
    with AsyncOptimizer(sgd(model), model) as optimizer:
        before, grads = values(model), gradients(model)

        def steps_then_fails() -> None:
            optimizer.step()
            raise ValueError("too late")

        optimizer.submit(steps_then_fails)
        with pytest.raises(StepError, match="submit") as caught:
            model()
        assert "As before" not in str(caught.value)
        assert type(caught.value.__cause__) is ValueError
        assert same(values(model), [w - LR * g for w, g in zip(before, grads, strict=True)])
        gradients(model)
        optimizer.step()


INSIDE: dict[str, tuple[Any, str]] = {
    "synchronize": (AsyncOptimizer.synchronize, "waits for itself"),
    "close": (AsyncOptimizer.close, "called inside submit"),
    "clip_grad_norm_": (lambda o: o.clip_grad_norm_(1.0), "called inside submit"),
    "load_state_dict": (lambda o: o.load_state_dict({}), "waits for itself"),
    "submit": (lambda o: o.submit(lambda: None), "called inside submit"),
    "state_dict": (AsyncOptimizer.state_dict, "waits for itself"),
    "a parameter": (lambda o: o.model.ws[0] + 1, "waits for itself"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_call_of_the_training_thread_in_a_submitted_function_is_refused(name: str) -> None:
    call, text = INSIDE[name]
    model = Four()
    with AsyncOptimizer(sgd(model), model) as optimizer:
        gradients(model)
        optimizer.submit(lambda: call(optimizer))
        with pytest.raises(StepError, match=text) as caught:
            optimizer.synchronize()
        assert isinstance(caught.value.__cause__, OrderError)
        assert same(values(model), values(Four()))
        gradients(model)
        optimizer.step()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_gone_is_noticed_every_call_refuses_and_another_optimizer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Four()
    optimizer = AsyncOptimizer(sgd(model), model)
    checkpoint = model.state_dict(), optimizer.state_dict()
    checkpoint = copy.deepcopy(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(Task, "execute", lambda task: sys.exit())
        gradients(model)
        optimizer.step()
        with pytest.raises(StepError, match="thread is gone"):
            optimizer.synchronize()
    for _ in range(2):
        gradients(model)
        with pytest.raises(StepError, match="thread is gone"):
            optimizer.step()
    with pytest.raises(StepError, match="thread is gone"):
        optimizer.close()
    optimizer = AsyncOptimizer(optimizer.optimizer, model)
    optimizer.load_state_dict(checkpoint[1])
    model.load_state_dict(checkpoint[0])
    before, grads = values(model), gradients(model)
    optimizer.step()
    optimizer.close()
    assert same(values(model), [w - LR * g for w, g in zip(before, grads, strict=True)])


def test_a_hand_over_that_fails_is_told_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Four()
    with AsyncOptimizer(sgd(model), model) as optimizer:
        gradients(model)
        with monkeypatch.context() as patch:
            patch.setattr(
                threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more"))
            )
            with pytest.raises(RuntimeError, match="no more"):
                optimizer.step()
        assert same(values(model), values(Four()))
        before, grads = values(model), gradients(model)
        optimizer.step()
        optimizer.synchronize()
        assert same(values(model), [w - LR * g for w, g in zip(before, grads, strict=True)])
