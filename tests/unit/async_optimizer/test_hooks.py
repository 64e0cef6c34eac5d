"""Whoever looks from outside the training step sees finished parameters and state.

The worker here is ``lazy``: it updates a part only when somebody waits for it, so a look that
does not wait surely sees what was before the step.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_support import assert_same, values
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.5


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.5)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.linspace(-1.0, 1.0, 6).reshape(2, 3) + step
    result: Tensor = (model(x) ** 2).sum()
    return result


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain torch."""
    model = network()
    optimizer = sgd(model.parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def evaluated(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 3))


def in_inference_mode(model: nn.Module, _: Any) -> None:
    with torch.inference_mode():
        model(torch.zeros(1, 3))


def in_eval_mode(model: nn.Module, _: Any) -> None:
    model.eval()(torch.zeros(1, 3))
    model.train()


def left(_: Any, optimizer: AsyncOptimizer) -> None:
    with optimizer:
        pass


FENCES: dict[str, Callable[[Any, Any], object]] = {
    "no_grad": evaluated,
    "inference_mode": in_inference_mode,
    "eval": in_eval_mode,
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, _: model.state_dict(),
    "a layer's state_dict": lambda model, _: (model[0].state_dict(), model[2].state_dict()),
    "the optimizer's state_dict": lambda _, optimizer: optimizer.state_dict(),
    "the inner optimizer's state_dict": lambda _, optimizer: optimizer.optimizer.state_dict(),
    "the optimizer's load_state_dict": lambda _, optimizer: optimizer.optimizer.load_state_dict(
        optimizer.optimizer.state_dict()
    ),
    "close": lambda _, optimizer: optimizer.close(),
    "leaving the context": left,
}


def test_every_fence_sees_the_newest_parameters(late: None) -> None:
    expected = values(reference(3)[0])
    for name, fence in FENCES.items():
        model = network()
        optimizer = AsyncOptimizer(sgd(model.parameters()), model)
        train(model, optimizer, range(3))
        before = values(model)
        assert not all(map(torch.equal, before, expected)), "the step was finished already"
        fence(model, optimizer)
        assert all(map(torch.equal, values(model), expected)), name
        optimizer.close()


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_async_optimizer_is_not_copied_and_its_state_goes_on_elsewhere(
    late: None, how: Callable[[Any], Any]
) -> None:
    model, other = network(), network()
    with AsyncOptimizer(sgd(model.parameters()), model) as optimizer:
        train(model, optimizer, range(1))
        with pytest.raises(UnsupportedError, match=r"not copied or pickled.*state_dict\(\)"):
            how(optimizer)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        with AsyncOptimizer(sgd(other.parameters()), other) as another:
            another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(other, another, range(1, 2))
            another.synchronize()
            assert_same(values(other), values(reference(2)[0]))
        assert_same(values(model), values(reference(1)[0]))


PREFACE = """
import time
import torch
from accel_scaler import AsyncOptimizer, StepError
from accel_scaler.optimizer_step.replica import Replica

def fail(self, *args):
    raise ValueError("the last step")

w = torch.nn.Parameter(torch.zeros(3))
model = torch.nn.ParameterList([w])
step_part = Replica.step_part
"""


def run(program: str) -> tuple[int, str, str]:
    """Exit status, output, errors of a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PREFACE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300.0,  # most of it is imports, beside other work
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.process
def test_the_interpreter_exits_right_after_a_step_and_the_step_is_finished() -> None:
    status, out, err = run(
        """
        optimizer = AsyncOptimizer(torch.optim.SGD([w], lr=1.0), model)
        memory = w.detach()
        def slowly(self, *args):
            time.sleep(0.3)
            step_part(self, *args)
            print(memory.tolist(), flush=True)
        Replica.step_part = slowly
        w.grad = torch.ones(3)
        optimizer.step()
        print(memory.tolist(), flush=True)
        """
    )
    assert (status, out.splitlines(), err) == (0, ["[0.0, 0.0, 0.0]", "[-1.0, -1.0, -1.0]"], "")


def break_off(optimizer: AsyncOptimizer, model: nn.Module, steps: range) -> None:
    with optimizer:
        train(model, optimizer, steps)
        raise ZeroDivisionError


def test_an_exception_in_the_loop_leaves_finished_parameters_and_is_not_replaced(
    late: None,
) -> None:
    model = network()
    with pytest.raises(ZeroDivisionError):
        break_off(AsyncOptimizer(sgd(model.parameters()), model), model, range(2))
    assert_same(values(model), values(reference(2)[0]))
