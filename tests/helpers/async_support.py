"""Workers that misbehave, and what they are compared with.

``lazy`` is the worst worker there can be: it updates a part only when somebody waits for it. A
use that does not wait then surely sees the old value, and a hyperparameter that is not frozen
surely the next one; no luck with threads is involved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accel_scaler.async_optimizer.worker import Task, Worker
from accel_scaler.optimizer_step import replica as replica_module

LIMIT_S = 60.0


@contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def one_part_each() -> AbstractContextManager[None]:
    """Every parameter is a part of its own, however small."""
    return _replaced(
        (replica_module, "SMALLEST_PART", 1),
        (replica_module, "PARTS", 1 << 30),
    )


class Gate:
    """Holds each part of a task back until somebody waits for that part.

    Tasks of one worker run in the order of submission, so a wait for one needs all before it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: list[Task] = []
        self.wanted: dict[int, int] = {}

    def want(self, task: Task, parts: int) -> None:
        if task.finished:
            return
        with self.changed:
            for earlier in self.order if task in self.order else ():
                if earlier is task:
                    break
                self.wanted[id(earlier)] = earlier.parts + 1
            self.wanted[id(task)] = max(parts, self.wanted.get(id(task), 0))
            self.changed.notify_all()

    def pass_through(self, task: Task) -> None:
        """Block until somebody waits for the next part of ``task``."""
        with self.changed:
            ok = self.changed.wait_for(
                lambda: self.wanted.get(id(task), 0) > task.done, timeout=LIMIT_S
            )
        if not ok:
            raise TimeoutError("nobody has waited for this part")


@contextmanager
def lazy() -> Iterator[Gate]:
    """The worker starts a part when somebody waits for it, not before."""
    gate = Gate()
    wait, execute, advance, submit = Task.wait, Task.execute, Task.advance, Worker.submit

    def waiting(self: Task, parts: int | None = None, limit_s: float = LIMIT_S) -> bool:
        gate.want(self, self.parts + 1 if parts is None else parts)
        return wait(self, parts, limit_s)

    def executing(self: Task) -> None:
        gate.pass_through(self)
        execute(self)
        with gate.changed:
            gate.order.remove(self)
            gate.wanted.pop(id(self), None)

    def advancing(self: Task) -> None:
        advance(self)
        if self.done < self.parts:
            gate.pass_through(self)

    def submitting(self: Worker, task: Task) -> None:
        with gate.changed:
            gate.order.append(task)
            gate.wanted.setdefault(id(task), 0)  # another thread may want it already
        submit(self, task)

    with (
        one_part_each(),
        _replaced(
            (Task, "wait", waiting),
            (Task, "execute", executing),
            (Task, "advance", advancing),
            (Worker, "submit", submitting),
        ),
    ):
        yield gate


def values(model: nn.Module) -> list[Tensor]:
    """A copy of the parameters' memory as it is, without waiting for anything."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: Any, reference: Any, where: str = "") -> None:
    """Equal bit for bit, all the way down."""
    assert type(ours) is type(reference) or isinstance(ours, Tensor), where
    if isinstance(reference, Tensor):
        assert ours.dtype == reference.dtype, where
        assert torch.equal(ours, reference), where
    elif isinstance(reference, dict):
        assert ours.keys() == reference.keys(), where
        for key, value in reference.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(reference, (list, tuple)):
        assert len(ours) == len(reference), where
        for place, (mine, other) in enumerate(zip(ours, reference, strict=True)):
            assert_same(mine, other, f"{where}[{place}]")
    else:
        assert ours == reference, where
