"""The package's side of a random history: an ``AsyncOptimizer``, or an attached accelerator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import async_support
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from async_support import lazy
from history_reference import OPTIMIZERS, Net, Setup
from references import GROWTH_INTERVAL, INIT_SCALE, no_bfloat16_in_torchs_kernel
from support import reset, stock_fp16_on_cpu
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach
from accel_scaler.optimizer_step.replica import Part, Replica


class InjectedError(Exception):
    """A fault of the optimizer."""


class Fault:
    """Makes the next step fail at one of its parts, and records the parameters done by then."""

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
def lazy_worker() -> Iterator[None]:
    """:func:`async_support.lazy`, with a :class:`Fault` where one is armed."""
    step = Replica.step_part

    def stepping(self: Replica, part: Part, *rest: Any) -> None:
        FAULT.pass_part(part)
        step(self, part, *rest)

    with pytest.MonkeyPatch.context() as patch, no_bfloat16_in_torchs_kernel(), lazy():
        patch.setattr(async_support, "LIMIT_S", 20.0)
        patch.setattr(Replica, "step_part", stepping)
        yield


class Raw:
    """One ``AsyncOptimizer`` with its scaler, without Accelerate."""

    def __init__(self, setup: Setup, device: str, telemetry: str | None) -> None:
        self.setup, self.telemetry, self.net = setup, telemetry, Net(setup, device)
        self.make(INIT_SCALE)

    def make(self, init_scale: float) -> None:
        groups = self.setup.groups(self.net)
        self.inners: list[Any] = [OPTIMIZERS[self.setup.optimizer](each) for each in groups]
        for p in self.net.extra:
            self.inners[-1].add_param_group({"params": [p]})
        self.init_scale = init_scale
        self.open()

    @property
    def settings(self) -> dict[str, Any]:
        setup = self.setup
        return {
            "offload": setup.offload,
            "offload_budget": setup.budget,
            "master_weights": setup.masters,
        }

    @property
    def scale_rule(self) -> dict[str, Any]:
        low, high = self.setup.bounds
        if not self.setup.scaled:
            return {"enabled": False}
        return {
            "init_scale": self.init_scale,
            "growth_interval": GROWTH_INTERVAL,
            "hysteresis": self.setup.hysteresis,
            "min_scale": low,
            "max_scale": high,
        }

    def open(self) -> None:
        self.scaler: Any = GradScaler(torch.device(self.net.device).type, **self.scale_rule)
        self.wrap()

    @property
    def growth_tracker(self) -> int:
        return int(self.scaler.state_dict().get("_growth_tracker", 0))

    def wrap(self) -> None:
        scaler = None if self.setup.precision == "no" else self.scaler
        self.optimizer = AsyncOptimizer(
            self.inners[0], self.net, scaler=scaler, step_mode=self.setup.mode, **self.settings
        )
        self.optimizers: list[Any] = [self.optimizer]

    def backward(self, loss: Tensor, plain: bool) -> None:
        self.scaler.scale(loss).backward()

    def clip_norm(self, limit: float, kind: float, params: list[nn.Parameter] | None) -> Any:
        return self.optimizer.clip_grad_norm_(limit, kind, params)

    def unscale(self, number: int, how: str) -> None:
        self.scaler.unscale_(self.optimizers[number])

    def close(self) -> None:
        self.optimizer.close()

    def reopen(self, setup: Setup) -> None:
        self.close()
        assert {type(p) for p in self.net.parameters()} == {nn.Parameter}
        self.setup = setup
        self.wrap()

    def fresh(self) -> Raw:
        """Another pair, of the same shape, which has not been trained."""
        other = copy.copy(self)
        other.net = Net(self.setup, self.net.device)
        for _ in self.net.extra:
            other.net.grow()
        for p, own in zip(other.net.parameters(), self.net.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
        other.make(2.0 if self.setup.bounds[0] is None else 512.0)
        return other


class Attached(Raw):
    """An attached accelerator with one optimizer or two."""

    def open(self) -> None:
        reset()
        on_host = self.net.device == "cpu"
        handler = GradScalerKwargs(init_scale=self.init_scale, growth_interval=GROWTH_INTERVAL)
        self.accelerator: Any = Accelerator(
            cpu=on_host,
            mixed_precision=self.setup.precision,
            kwargs_handlers=[handler] * self.setup.stock,
        )
        if not on_host and self.setup.scaled:  # Accelerate makes one for CUDA, which is not there
            self.accelerator.scaler = torch.amp.GradScaler(self.accelerator.device.type)
        elif self.setup.stock and self.setup.scaled:
            stock_fp16_on_cpu(self.accelerator)
        self.attach()
        self.prepared, *self.optimizers = self.accelerator.prepare(self.net, *self.inners)

    def attach(self) -> None:
        config = ScalerConfig(
            step_mode=self.setup.mode,
            find_overflow="replay" if self.setup.finds else "off",
            telemetry=self.telemetry,
            skip_nonfinite=self.setup.guards,
            skip_norm_above=self.setup.limit,
            on_overflow="retry" if self.setup.retry else "skip",
            **self.settings,
            **(self.scale_rule if self.setup.scaled else {}),
        )
        attach(self.accelerator, config)
        self.take_scaler()

    def take_scaler(self) -> None:
        """Where nothing is scaled there is none: one that does nothing."""
        self.scaler = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)

    def backward(self, loss: Tensor, plain: bool) -> None:
        if plain:
            self.scaler.scale(loss).backward()
        else:
            self.accelerator.backward(loss)

    def clip_norm(self, limit: float, kind: float, params: list[nn.Parameter] | None) -> Any:
        return self.accelerator.clip_grad_norm_(params or self.net.parameters(), limit, kind)

    def unscale(self, number: int, how: str) -> None:
        optimizer = self.optimizers[number]
        if how == "accelerator":
            self.accelerator.unscale_gradients(optimizer)
        else:
            self.scaler.unscale_(optimizer.optimizer if how == "inner" else optimizer)

    def close(self) -> None:
        if self.setup.scaled:
            self.scaler.abandon_window()
        detach(self.accelerator)

    def detach(self) -> None:
        """Back to stock, whose scaler goes on from this scale."""
        detach(self.accelerator)
        self.take_scaler()

    def reopen(self, setup: Setup) -> None:
        saved = self.scaler.state_dict()
        detach(self.accelerator)
        self.setup = setup
        self.attach()
        self.scaler.load_state_dict(saved)
