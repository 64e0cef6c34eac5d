"""Training runs that tests of the asynchronous optimizer compare, and workers that misbehave.

``lazy`` is the worst worker there can be: it updates a part only when somebody waits for it. A
use that does not wait then surely sees the old value, and a hyperparameter that is not frozen
surely the next one; no luck with threads is involved.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from support import reset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.worker import Task, Worker

INF = float("inf")
STEPS = 30
ACCUMULATION = 2
OVERFLOWS = frozenset({0, 3, 4, 21, 30, 31, 32, 50})
"""Windows whose gradients overflow."""
SCALER = {"init_scale": 2.0**12, "growth_interval": 9, "optimizer_threads": 1}
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
    return _replaced((replica_module, "SMALLEST_PART", 1), (replica_module, "PARTS", 1 << 30))


class Gate:
    """Holds each part of a task back until somebody waits for that part.

    Tasks of one worker run in the order of submission, so a wait for one needs all before it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: list[Task] = []
        self.wanted: dict[int, int] = {}
        self.threads: set[int] = set()
        """Idents of the threads that ran a task."""

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
        gate.threads.add(threading.get_ident())
        if self not in gate.order:  # on the training thread, which does not wait for itself
            with gate.changed:
                gate.order.append(self)
            gate.want(self, self.parts + 1)
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


@contextmanager
def sleepy(longest_s: float, seed: int = 0) -> Iterator[None]:
    """The worker sleeps for a random time before and after many parts."""
    generator, step = random.Random(seed), Replica.step_part

    def stepping(self: Replica, *args: Any) -> None:
        time.sleep(generator.choice((0.0, 0.0, generator.uniform(0.0, longest_s))))
        step(self, *args)
        time.sleep(generator.choice((0.0, 0.0, generator.uniform(0.0, longest_s))))

    with one_part_each(), _replaced((Replica, "step_part", stepping)):
        yield


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


@dataclass
class Trace:
    """All that a run shows of itself, a value a step or micro-batch."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def assert_equals(self, reference: Trace) -> None:
        assert_same(self.losses, reference.losses, "losses")
        assert_same(vars(self), vars(reference))

    def assert_lively(self, steps: int) -> None:
        """The reference has trained, skipped where it should, and grown its scale."""
        skips = {n for n, skipped in enumerate(self.skipped) if skipped}
        assert skips >= {n for n in OVERFLOWS if n < steps}
        assert len(skips) < steps // 4
        assert any(b > a for a, b in zip(self.scales, self.scales[1:], strict=False))
        assert len(set(self.losses)) > steps // 2


@contextmanager
def accelerator_for(mode: str, accumulation: int = ACCUMULATION) -> Iterator[Any]:
    """A fresh attached accelerator, detached at the end."""
    reset()
    accelerator: Any = attach(
        Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=accumulation),
        ScalerConfig(step_mode=mode, **SCALER),  # type: ignore[arg-type]
    )
    try:
        yield accelerator
    finally:
        accelerator.scaler.abandon_window()  # detach would raise, and hide an error
        detach(accelerator)


def rate_of(step: int) -> float:
    """A learning rate that is another one after each step."""
    return 1.0 / (1.0 + 0.03 * step)


Loss = Callable[[Any, int], Tensor]
"""Of the model and a number that says which micro-batch."""


@dataclass
class Script:
    """What a user's training script says."""

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int = STEPS
    accumulation: int = ACCUMULATION

    def run(self, mode: str) -> Trace:
        with accelerator_for(mode, self.accumulation) as accelerator:
            return self.train(accelerator)

    def train(self, accelerator: Any) -> Trace:
        trace, model = Trace(), self.model()
        inner = self.optimizer(model)
        schedule = LambdaLR(inner, rate_of)
        model, optimizer, scheduler = accelerator.prepare(model, inner, schedule)
        for step in range(self.steps):
            for micro in range(self.accumulation):
                with accelerator.accumulate(model):
                    loss = self.loss(model, step * self.accumulation + micro)
                    trace.losses.append(loss.item())
                    overflows = step in OVERFLOWS and micro == step % self.accumulation
                    accelerator.backward(loss * INF if overflows else loss)
                    if accelerator.sync_gradients:
                        held = [p for group in optimizer.param_groups for p in group["params"]]
                        norm = accelerator.clip_grad_norm_(held, 0.5)
                        trace.norms.append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            trace.scales.append(accelerator.scaler.get_scale())
            trace.skipped.append(optimizer.step_was_skipped)
            trace.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        trace.weights = {n: t.detach().clone() for n, t in model.state_dict().items()}
        trace.state = optimizer.state_dict()
        return trace


def check(script: Script) -> Trace:
    """Overlap equals sync, and the run was worth comparing."""
    reference = script.run("sync")
    with lazy():
        script.run("overlap").assert_equals(reference)
    reference.assert_lively(script.steps)
    return reference


def generator_of(number: int) -> torch.Generator:
    """Random numbers of one micro-batch."""
    return torch.Generator().manual_seed(1000 + number)


def regression(model: Any, number: int) -> Tensor:
    """For models from 8 numbers to 4."""
    generator = generator_of(number)
    x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
    return nn.functional.mse_loss(model(x).float(), y)


def language(model: Any, number: int) -> Tensor:
    """For models of transformers with 32 tokens."""
    tokens = torch.randint(32, (2, 6), generator=generator_of(number))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def layers(width: int = 8) -> nn.Sequential:
    """Four layers from 8 to 4."""
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def momentum(model: nn.Module, lr: float = 0.05) -> Optimizer:
    """SGD shows a wrong scale; its momentum shows a lost step for long."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def unlike_forward(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with and without decay, both in the opposite order of the forward."""
    params = list(reversed(list(model.parameters())))
    return [
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.05},
    ]


def names_of(params: Sequence[Tensor], model: nn.Module) -> list[str]:
    """What the model calls them."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in params]
