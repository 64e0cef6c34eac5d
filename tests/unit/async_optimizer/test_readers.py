"""A second thread that only reads changes no number of the training and stops nothing.

The readers read without end while another thread trains. What they see is a race with the update,
as in torch; the training thread must end, bit for bit, where a plain torch run ends.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from async_support import assert_same, one_part_each
from references import OPTIMIZERS, loss_of, network
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, StepError
from accel_scaler.async_optimizer.pending_parameter import PendingParameter, hold, release
from accel_scaler.optimizer_step.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_S = 60.0
STEPS = 10


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


Result = tuple[list[float], list[Tensor], list[Any]]


def result(losses: list[float], model: nn.Module, optimizer: torch.optim.Optimizer) -> Result:
    params = list(model.parameters())
    return losses, [p.detach() for p in params], [optimizer.state[p] for p in params]


def plain() -> Result:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return result(train(model, optimizer), model, optimizer)


def evaluates(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        model(torch.ones(1, 8))


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, _: {k: v.clone() for k, v in model.state_dict().items()},
    "an evaluation": evaluates,
    "one parameter": lambda model, _: model[0].weight.detach().sum().item(),
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "the optimizer's state_dict": lambda _, optimizer: optimizer.state_dict(),
    "without __torch_function__": lambda model, _: torch.Tensor(model[2].bias),
}


class Readers:
    """Threads that read until they are told to stop; an error is kept."""

    def __init__(self, reads: list[Callable[[], Any]]) -> None:
        self.errors: list[BaseException] = []
        self.counts = [0] * len(reads)
        self._stop = threading.Event()
        self._begin = threading.Barrier(len(reads) + 1)
        self.threads = [
            threading.Thread(target=self._read, args=(place, read))
            for place, read in enumerate(reads)
        ]

    def _read(self, place: int, read: Callable[[], Any]) -> None:
        self._begin.wait(LIMIT_S)
        while not self._stop.is_set():
            try:
                read()
            except BaseException as error:
                self.errors.append(error)
                return
            self.counts[place] += 1

    def __enter__(self) -> Readers:
        for thread in self.threads:
            thread.start()
        self._begin.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in self.threads)


@contextmanager
def switching_often() -> Iterator[None]:
    """Enter it before an optimizer: while a step is due the worker has an interval of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def train_beside(reads: list[Callable[[Any, Any], Any]]) -> Result:
    model = network()
    inner = OPTIMIZERS["adamw"](model.parameters())
    with one_part_each(), switching_often(), AsyncOptimizer(inner, model) as optimizer:
        train_first = [lambda read=read: read(model, optimizer) for read in reads]
        with Readers(train_first) as readers:
            losses = train(model, optimizer)
        assert readers.errors == []
        assert all(readers.counts)
        optimizer.synchronize()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
    return result(losses, model, inner)


def test_all_readers_at_once_change_no_bit() -> None:
    assert_same(train_beside(list(READERS.values())), plain())


class Source:
    """A step that ends when somebody says so."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.inside, self.go, self.waits = threading.Semaphore(0), threading.Event(), 0
        self.params, self.ref = params, weakref.ref(self)
        hold(params, self.ref)

    def wait_for(self, t: Tensor) -> None:
        self.inside.release()
        assert self.go.wait(LIMIT_S)
        self.waits += 1
        release(self.params, self.ref)


def test_a_slow_reader_of_an_earlier_step_leaves_the_later_one_its_parameters() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first = Source(params)
    reader = threading.Thread(target=lambda: params[1].sum())
    reader.start()
    assert first.inside.acquire(timeout=LIMIT_S)
    release(params, first.ref)  # the thread that trains has finished the step
    second = Source(params)
    first.go.set()
    assert second.inside.acquire(timeout=LIMIT_S), "the reader went on to a value of no step"
    assert [type(p) for p in params] == [PendingParameter] * 2
    second.go.set()
    reader.join(LIMIT_S)
    assert second.waits == 1
    assert [type(p) for p in params] == [nn.Parameter] * 2


def fail(*_: Any) -> None:
    raise RuntimeError("no")


def test_a_failure_that_a_reader_meets_is_told_to_the_thread_that_trains_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    with AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model) as optimizer:
        monkeypatch.setattr(Replica, "step_part", fail)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        with Readers([lambda: model.state_dict()] * 2) as readers:
            for thread in readers.threads:
                thread.join(LIMIT_S)
        assert [type(error) for error in readers.errors] == [StepError] * 2
        with pytest.raises(StepError, match=r"on the optimizer thread .* As before"):
            optimizer.step()
        monkeypatch.undo()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.synchronize()


def test_state_that_a_step_is_adding_to_is_read_before_it_or_after_it() -> None:
    for _ in range(4):
        params = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(40)])
        with (
            switching_often(),
            AsyncOptimizer(torch.optim.AdamW(params), params) as optimizer,
            Readers([optimizer.state_dict] * 2) as readers,
        ):
            for count in range(5, 41, 5):
                for p in list(params)[:count]:
                    p.grad = torch.ones(2)
                optimizer.step()
        assert readers.errors == []
        assert len(optimizer.state_dict()["state"]) == 40
