"""The same network under this package, with or without Accelerate, and its lazy worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import async_support
import pytest
from accelerate import Accelerator
from async_support import lazy, reset
from async_twin_support import Net, Setup, inputs
from references import GROWTH_INTERVAL, INIT_SCALE, OPTIMIZERS
from torch import Tensor

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach
from accel_scaler.async_optimizer.async_stepper import AsyncStepper
from accel_scaler.async_optimizer.flat_buffers import SmallSteps
from accel_scaler.async_optimizer.replica import Part, Replica


class InjectedError(Exception):
    """A fault of the optimizer."""


class Fault:
    """Makes the next step fail at one of its parts, and knows which were done by then."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.done: list[Tensor] = []

    def arm(self, at: int | None) -> None:
        self.at, self.done = at, []

    def pass_part(self, part: Part) -> None:
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                raise InjectedError("at this part")
            self.done += [pair.param for pair in part.pairs]


FAULT = Fault()


@contextmanager
def lazy_everywhere() -> Iterator[None]:
    """As :func:`lazy`, and what only publishes, small steps and ``submit`` wait as well."""
    patch = pytest.MonkeyPatch()
    patch.setattr(async_support, "LIMIT_S", 20.0)
    with lazy() as gate:
        publish, small, begin = AsyncStepper._publish, SmallSteps.step, SmallSteps.begin
        step, run = Replica.step_part, AsyncStepper._run

        def publishing(self: AsyncStepper, part: Part) -> None:
            gate.pass_through()
            publish(self, part)

        def stepping_small(self: SmallSteps, part: int, *rest: Any) -> None:
            gate.pass_through()
            small(self, part, *rest)

        def beginning(self: SmallSteps, *rest: Any) -> bool:
            if FAULT.at is not None:
                FAULT.at = None
                raise InjectedError("before the first part")
            return begin(self, *rest)

        def running(self: AsyncStepper, *rest: Any) -> None:
            gate.pass_through()
            run(self, *rest)

        def stepping(self: Replica, part: Part, *rest: Any) -> None:
            FAULT.pass_part(part)
            step(self, part, *rest)

        patch.setattr(AsyncStepper, "_publish", publishing)
        patch.setattr(AsyncStepper, "_run", running)
        patch.setattr(SmallSteps, "step", stepping_small)
        patch.setattr(SmallSteps, "begin", beginning)
        patch.setattr(Replica, "step_part", stepping)
        try:
            yield
        finally:
            patch.undo()


class Raw:
    """Ours without Accelerate: one ``AsyncOptimizer`` with its scaler."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup.dtypes)
        self.scaler = GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
        (groups,) = setup.groups(self.net)
        self.inner: Any = OPTIMIZERS[setup.kind](groups)  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        setup = self.setup
        self.optimizer = AsyncOptimizer(
            self.inner,
            self.net,
            scaler=self.scaler,
            mode=setup.mode,
            offload=setup.offload,
            delay_warmup_steps=setup.prompt,
            optimizer_threads=1,
        )

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer]

    def stepper(self, number: int) -> AsyncStepper:
        return self.optimizers[number].optimizer.__dict__["_accel_scaler_stepper"]

    def loss(self, seed: int, used: Sequence[str]) -> Tensor:
        loss: Tensor = self.net(inputs(seed), used)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip_norm(self, most: float, kind: float) -> Any:
        return self.optimizer.clip_grad_norm_(most, kind)

    def close(self) -> None:
        self.optimizer.close()

    def fresh(self) -> Raw:
        """Another pair that goes on from what this one saves."""
        other = copy.copy(self)
        other.net = Net(self.setup.dtypes)
        for _ in self.net.extra:
            other.net.grow()
        for p, own in zip(other.net.parameters(), self.net.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
        (groups,) = self.setup.groups(other.net)
        other.inner = OPTIMIZERS[self.setup.kind](groups)  # type: ignore[arg-type]
        for p in other.net.extra:
            other.inner.add_param_group({"params": [p]})
        other.scaler = GradScaler("cpu", init_scale=2.0, growth_interval=GROWTH_INTERVAL)
        other.scaler.load_state_dict(self.scaler.state_dict())
        other.open()
        return other


class Attached(Raw):
    """Ours under an attached accelerator, with one optimizer or two."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup.dtypes)
        self.inners = [OPTIMIZERS[setup.kind](g) for g in setup.groups(self.net)]  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        reset()
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), self.config)
        _, *self.prepared = self.accelerator.prepare(self.net, *self.inners)

    @property
    def config(self) -> ScalerConfig:
        return ScalerConfig(
            step_mode=self.setup.mode,  # type: ignore[arg-type]
            offload=self.setup.offload,  # type: ignore[arg-type]
            delay_warmup_steps=self.setup.prompt,
            optimizer_threads=1,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
        )

    @property
    def scaler(self) -> Any:  # type: ignore[override]
        return self.accelerator.scaler

    @property
    def optimizers(self) -> list[Any]:
        return self.prepared

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_norm(self, most: float, kind: float) -> Any:
        return self.accelerator.clip_grad_norm_(self.net.parameters(), most, kind)

    def clip_value(self, most: float) -> None:
        self.accelerator.clip_grad_value_(self.net.parameters(), most)

    def close(self) -> None:
        self.accelerator.scaler.abandon_window()
        detach(self.accelerator)

    def reopen(self) -> None:
        saved = self.scaler.state_dict()
        detach(self.accelerator)
        attach(self.accelerator, self.config)
        self.scaler.load_state_dict(saved)
