"""Rules of the random asynchronous histories: a window and how it ends."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from async_pair_support import FAULT
from async_twin_support import LAYERS
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from references import DECAY
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiplicativeLR

from accel_scaler import OrderError, StepError


class Training(RuleBasedStateMachine):
    """What trains, on both sides: ``ours`` and ``twin``."""

    mode: ClassVar[str] = "overlap"
    offload: ClassVar[str] = "none"
    attached: ClassVar[bool] = False
    runs: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    ours: Any = None
    twin: Any
    clips: list[str]
    saved: Any
    count: int
    inner_schedule: bool

    # Both sides.

    @property
    def low(self) -> bool:
        return torch.float16 in self.twin.setup.dtypes

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.ours.net.parameters(), self.twin.net.parameters(), strict=True))

    @property
    def numbers(self) -> range:
        return range(len(self.twin.owned))

    def schedule(self) -> None:
        inner = self.inner_schedule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.schedules = [
                MultiplicativeLR(o.optimizer if inner else o, lambda _: DECAY)
                for o in self.ours.optimizers
            ]

    def synchronized(self) -> None:
        for optimizer in self.ours.optimizers:
            optimizer.synchronize()
        self.twin.publish_all()

    def loss_of_twin(self, used: Sequence[str]) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.attached):
            return self.twin.loss(self.count, used)

    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.twin.net.parameters())

    def is_open(self) -> bool:
        return self.twin.opened and not self.twin.stepped

    def forget_gradients(self) -> None:
        for p, q in self.pairs:
            p.grad = q.grad = None

    @rule(
        used=st.lists(st.sampled_from(LAYERS), min_size=1, unique=True),
        overflow=st.sampled_from([False] * 5 + [True]),
    )
    @precondition(lambda self: not self.clips)
    def backward(self, used: Sequence[str], overflow: bool) -> None:
        self.count += 1
        mine, other = self.ours.loss(self.count, used), self.loss_of_twin(used)
        assert repr(mine.item()) == repr(other.item())
        if not mine.requires_grad:
            return
        factor, again = math.inf if overflow else 1.0, self.is_open()
        self.ours.backward(mine * factor)
        self.twin.backward(other * factor)
        self.seen["backward"] += 1
        self.seen["overflow"] += overflow
        self.seen["several micro-batches"] += again

    @rule(most=st.sampled_from([0.125, 0.01, 100.0]), kind=st.sampled_from([2.0, 2.0, math.inf]))
    @precondition(lambda self: self.is_open() and self.has_gradients())
    def clip_norm(self, most: float, kind: float) -> None:
        if self.low and "norm" in self.clips:
            return  # the second factor would round on its own
        order = self.twin.owned[0] if not self.attached else list(self.twin.net.parameters())

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(masters, most, kind)

        mine, other = self.ours.clip_norm(most, kind), self.twin.clip(order, clip)
        if not math.isfinite(other):
            self.twin.refused = True
            other = torch.tensor(math.inf)
        assert torch.equal(mine, other), (mine, other)
        self.clips.append("norm")
        self.seen["clip_norm"] += 1

    @rule(most=st.sampled_from([2.0**-5, 2.0**-9, 8.0]))
    @precondition(lambda self: self.attached and self.is_open() and self.has_gradients())
    def clip_value(self, most: float) -> None:
        if self.low and "norm" in self.clips:
            return

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_value_(masters, most)

        self.ours.clip_value(most)
        self.twin.clip(list(self.twin.net.parameters()), clip)
        self.clips.append("value")
        self.seen["clip_value"] += 1

    @rule(
        zero=st.sampled_from(["none", "none", "zeros", "model none", "model zeros", "nothing"]),
        fails=st.sampled_from([None, None, None, 0, 1, 3]),
        told=st.sampled_from(["synchronize", "state_dict", "evaluation"]),
    )
    def step(self, zero: str, fails: int | None, told: str) -> None:
        skipped = False
        if fails is not None:
            self.synchronized()  # the fault is for this step
        for number in self.numbers:
            optimizer = self.ours.optimizers[number]
            grads = [p.grad for p in self.twin.owned[number] if p.grad is not None]
            nonzero = any(bool(g.count_nonzero()) for g in grads)
            again = self.twin.opened and number in self.twin.stepped
            if grads and (again or (nonzero and not self.twin.opened)):
                with pytest.raises(OrderError):
                    optimizer.step()
                self.seen["refused"] += 1
                continue
            FAULT.arm(fails)
            optimizer.step()
            done = self.failure(number, told) if fails is not None else None
            FAULT.arm(None)
            stepped = self.twin.step(number, fails=done)
            if fails is not None:
                self.synchronized()
                if told == "state_dict" and done is None:
                    self.twin.follow(number)
            assert optimizer.step_was_skipped is not stepped
            skipped = skipped or not stepped
            self.seen["skipped"] += not stepped
            self.seen["stepped"] += bool(stepped and grads)
        self.clips = []
        self.zero_grad(zero)
        if skipped and (self.twin.setup.split or zero == "nothing"):
            self.zero_grad("none")  # they are scaled still, and would be refused

    def failure(self, number: int, told: str) -> set[Tensor] | None:
        """Wait for the step, which perhaps fails; then what was updated all the same."""
        optimizer = self.ours.optimizers[number]
        try:
            if told == "synchronize":
                optimizer.synchronize()
            elif told == "state_dict":
                optimizer.state_dict()
            else:
                with torch.no_grad():
                    self.ours.loss(0, LAYERS)
        except StepError:
            self.seen["failed"] += 1
            mine = {id(p) for p in FAULT.done}
            return {q for p, q in self.pairs if id(p) in mine}
        return None

    @rule(how=st.sampled_from(["none", "zeros", "model none", "model zeros"]))
    @precondition(lambda self: not self.clips)
    def zero_grad(self, how: str) -> None:
        to_none = how.endswith("none")
        if how.startswith("model"):
            self.ours.net.zero_grad(set_to_none=to_none)
            self.twin.net.zero_grad(set_to_none=to_none)
        elif how != "nothing":
            for number in self.numbers:
                self.ours.optimizers[number].zero_grad(set_to_none=to_none)
                self.twin.zero_grad(number, to_none)
        self.seen[f"zero_grad {how}"] += 1

    @rule(most=st.sampled_from([None, 0.125, 0.01]))
    @precondition(lambda self: not self.attached and self.is_open() and self.has_gradients())
    def submit(self, most: float | None) -> None:
        if self.clips:
            return
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, most or 0.0)

        def update() -> None:
            if most is not None:
                scaler.unscale_(optimizer)
                clip([p for group in optimizer.param_groups for p in group["params"]])
            scaler.step(optimizer)

        optimizer.submit(update)
        scaler.update()
        if most is not None:
            self.twin.clip(self.twin.owned[0], clip)
        self.twin.step(0, submitted=True)
        self.twin.end_window()
        self.seen["submit"] += 1

    @rule(most=st.sampled_from([None, 0.125]))
    @precondition(lambda self: not self.attached and self.is_open() and self.has_gradients())
    def torch_loop(self, most: float | None) -> None:
        """``scaler.unscale_``, torch's clip, ``scaler.step``, ``scaler.update``."""
        if self.clips or self.low:
            return
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, most or 0.0)

        if most is not None:
            scaler.unscale_(optimizer)
            clip([p for group in optimizer.param_groups for p in group["params"]])
            self.twin.clip(self.twin.owned[0], clip)
        scaler.step(optimizer)
        scaler.update()
        assert self.twin.step(0) is not optimizer.step_was_skipped
        self.twin.end_window()
        self.zero_grad("none")
        self.seen["torch's loop"] += 1

    @rule(number=st.integers(0, 5), lr=st.sampled_from([0.03, 0.01, 0.05]), inner=st.booleans())
    def change_lr(self, number: int, lr: float, inner: bool) -> None:
        optimizer = self.ours.optimizers[number % len(self.numbers)]
        groups = (optimizer.optimizer if inner else optimizer).param_groups
        groups[number % len(groups)]["lr"] = lr
        theirs = self.twin.optimizers[number % len(self.numbers)].param_groups
        theirs[number % len(groups)]["lr"] = lr
        self.seen["lr"] += 1

    @rule()
    def scheduler_step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for schedule in self.schedules:
                schedule.step()
        for optimizer in self.twin.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= DECAY
        self.seen["scheduler"] += 1
