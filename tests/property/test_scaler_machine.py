"""Random calls on torch's scaler and on ours, side by side, compared bit for bit after each."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from accel_scaler import GradScaler

SEQUENCES = 2000
QUIET = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

Stock = torch.amp.GradScaler


class Side:
    """One scaler with its own two optimizers."""

    def __init__(self, kind: type[Stock], fused: bool, **kwargs: Any) -> None:
        self.kind = kind
        self.scaler: Any = kind("cpu", **kwargs)
        self.params = [torch.nn.Parameter(torch.tensor(v)) for v in ([1.0, -2.0], [0.5], [3.0])]
        self.optimizers: list[Any] = [
            torch.optim.SGD(self.params[:2], lr=0.125, momentum=0.9),
            torch.optim.AdamW(self.params[2:], lr=0.1, fused=fused, weight_decay=0.1),
        ]

    def scale(self, shape: str, factor: float) -> Any:
        """Scale two losses in the given container and run their backward."""
        a = factor * (self.params[0].sum() + self.params[1].sum())
        b = factor * self.params[2].sum()
        if shape == "tensor":
            scaled = [self.scaler.scale(a + b)]
        elif shape == "list":
            scaled = self.scaler.scale([a, b])
        elif shape == "tuple":
            scaled = list(self.scaler.scale((a, b)))
        elif shape == "nested":
            (first,), second = self.scaler.scale([(a,), b])
            scaled = [first, second]
        elif shape == "iterable":
            scaled = list(self.scaler.scale(x for x in (a, b)))
        else:
            scaled = [self.scaler.scale(a)]
        for loss in scaled:
            loss.backward()
        return [loss.item() for loss in scaled]

    def observed(self) -> tuple[Any, ...]:
        """Everything that must agree, floats as their bits."""
        bits = [
            (
                p.detach().numpy().tobytes(),
                None if p.grad is None else p.grad.numpy().tobytes(),
            )
            for p in self.params
        ]
        sgd, adam = (optimizer.state for optimizer in self.optimizers)
        momentum = [
            None if buffer is None else buffer.numpy().tobytes()
            for p in self.params[:2]
            for buffer in [sgd[p].get("momentum_buffer") if p in sgd else None]
        ]
        steps = float(adam[self.params[2]].get("step", 0.0)) if self.params[2] in adam else 0.0
        scaler = self.scaler
        return (
            scaler.get_scale(),
            scaler._get_growth_tracker(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
            bits,
            momentum,
            steps,
        )


WHICH = st.sampled_from([0, 0, 1])

Call = tuple[str, tuple[Any, ...]]

CALLS: list[Call] = [
    ("scale", ("tensor", 0.1)),
    ("scale", ("nested", 1.0)),
    ("unscale", (0,)),
    ("unscale", (1,)),
    ("step", (0,)),
    ("step", (1,)),
    ("update", ()),
    ("update", ()),
    ("whole_iteration", (0.1,)),
    ("overflow", (0, float("inf"))),
    ("overflow", (2, float("nan"))),
    ("zero_grad", (0, True)),
    ("zero_grad", (1, False)),
    ("set_scale", (0.3, False)),
    ("scale", ("tensor", 1.0)),
    ("exchange_state_dicts", ()),
    ("replace_the_scaler", ("deepcopy",)),
    ("replace_the_scaler", ("pickle",)),
]


class SideBySide(RuleBasedStateMachine):
    """Each rule calls both scalers; results, exceptions and all state must be the same."""

    runs: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        init_scale=st.sampled_from([2.0**16, 1000.0, 3.0, 2.0**126]),
        growth_factor=st.sampled_from([2.0, 1.5, 3.0]),
        backoff_factor=st.sampled_from([0.5, 0.7, 0.25]),
        growth_interval=st.integers(1, 4),
        fused=st.booleans(),
        calls=st.lists(st.sampled_from(CALLS), min_size=10, max_size=20),
    )
    def start(self, fused: bool, calls: list[Call], **kwargs: Any) -> None:
        type(self).runs += 1
        self.stock = Side(Stock, fused, **kwargs)
        self.ours = Side(GradScaler, fused, **kwargs)
        # Hypothesis chooses rules unevenly, few of most kinds; this gives every run a mixture.
        for name, arguments in calls:
            getattr(self, name)(*arguments)
            self.all_is_the_same()

    def both(self, name: str, call: Callable[[Side], Any]) -> None:
        outcomes = []
        for side in (self.stock, self.ours):
            try:
                outcomes.append(("returned", call(side)))
            except Exception as error:
                outcomes.append(("raised", error))
        (stock, theirs), (ours, mine) = outcomes
        assert stock == ours, f"{name}: torch {stock} {theirs!r}, ours {ours} {mine!r}"
        if stock == "raised":
            same = isinstance(mine, type(theirs))
            if isinstance(theirs, AttributeError):
                # A fused optimizer that was unscaled before it had gradients: torch trips over
                # its own integer 0, and leaves attributes behind that break every later step.
                same = "No inf checks were recorded" in str(mine)
                del self.stock.optimizers[1].grad_scale, self.stock.optimizers[1].found_inf
            assert same, f"{name}: {theirs!r} became {mine!r}"
            self.seen[f"{name} raised {type(theirs).__name__}"] += 1
        else:
            assert repr(theirs) == repr(mine), name
            self.seen[name] += 1

    @rule(
        shape=st.sampled_from(["tensor", "list", "tuple", "nested", "iterable", "first only"]),
        factor=st.sampled_from([1.0, 0.1, -3.0]),
    )
    def scale(self, shape: str, factor: float) -> None:
        self.both("scale", lambda side: side.scale(shape, factor))

    @rule()
    def scale_what_is_no_tensor(self) -> None:
        self.both("scale(3)", lambda side: side.scaler.scale(3))

    @rule(which=WHICH, value=st.sampled_from([1.0, 1e-3, 0.7]))
    def assign_gradients(self, which: int, value: float) -> None:
        def assign(side: Side) -> None:
            for p in side.optimizers[which].param_groups[0]["params"]:
                p.grad = torch.full_like(p, value * min(side.scaler.get_scale(), 1e30))

        self.both("assign", assign)

    @rule(
        param=st.sampled_from([0, 1, 2]),
        value=st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    )
    def overflow(self, param: int, value: float) -> None:
        def inject(side: Side) -> None:
            grad = side.params[param].grad
            if grad is not None:
                grad[-1] = value

        self.both("overflow", inject)

    @rule(which=WHICH, to_none=st.booleans())
    def zero_grad(self, which: int, to_none: bool) -> None:
        self.both("zero_grad", lambda side: side.optimizers[which].zero_grad(set_to_none=to_none))

    @rule(which=WHICH)
    def unscale(self, which: int) -> None:
        self.both("unscale_", lambda side: side.scaler.unscale_(side.optimizers[which]))

    @rule(which=WHICH)
    def step(self, which: int) -> None:
        self.both("step", lambda side: side.scaler.step(side.optimizers[which]))

    @rule(which=WHICH)
    def step_with_closure(self, which: int) -> None:
        self.both(
            "closure",
            lambda side: side.scaler.step(side.optimizers[which], closure=lambda: None),
        )

    @rule()
    def update(self) -> None:
        before = self.stock.scaler.get_scale()
        self.both("update", lambda side: side.scaler.update())
        after = self.stock.scaler.get_scale()
        self.seen["grew"] += after > before
        self.seen["fell"] += after < before

    @rule(factor=st.sampled_from([1.0, 0.1]))
    def whole_iteration(self, factor: float) -> None:
        def run(side: Side) -> Any:
            losses = side.scale("tensor", factor)
            for optimizer in side.optimizers:
                side.scaler.step(optimizer)
            side.scaler.update()
            for optimizer in side.optimizers:
                optimizer.zero_grad()
            return losses

        self.both("iteration", run)

    @rule(value=st.sampled_from([1.0, 4096.0, 0.3, 1e-20]), tensor=st.booleans())
    def set_scale(self, value: float, tensor: bool) -> None:
        self.both(
            "update(new)",
            lambda side: side.scaler.update(torch.tensor(value) if tensor else value),
        )

    @rule(bad=st.sampled_from([torch.ones(2), torch.ones(1, requires_grad=True)]))
    def set_scale_to_a_bad_tensor(self, bad: Tensor) -> None:
        self.both("update(bad)", lambda side: side.scaler.update(bad))

    @rule(
        growth=st.sampled_from([2.0, 4.0, 1.0]),
        backoff=st.sampled_from([0.5, 0.3, 1.0]),
        interval=st.integers(1, 3),
    )
    def setters(self, growth: float, backoff: float, interval: int) -> None:
        def assign(side: Side) -> None:
            side.scaler.set_growth_factor(growth)
            side.scaler.set_backoff_factor(backoff)
            side.scaler.set_growth_interval(interval)

        self.both("setters", assign)

    @rule()
    def exchange_state_dicts(self) -> None:
        stock, ours = self.stock.scaler.state_dict(), self.ours.scaler.state_dict()
        assert {key: ours[key] for key in stock} == stock
        self.stock.scaler.load_state_dict(ours)
        self.ours.scaler.load_state_dict(stock)
        self.seen["exchange"] += 1

    @rule(how=st.sampled_from(["resume", "pickle", "deepcopy"]))
    def replace_the_scaler(self, how: str) -> None:
        def replace(side: Side) -> None:
            if how == "pickle":
                side.scaler = pickle.loads(pickle.dumps(side.scaler))
            elif how == "deepcopy":
                side.scaler = copy.deepcopy(side.scaler)
            else:
                fresh = side.kind("cpu", init_scale=7.0, growth_factor=9.0, growth_interval=99)
                fresh.load_state_dict(side.scaler.state_dict())
                side.scaler = fresh

        self.both(how, replace)

    @invariant()
    def all_is_the_same(self) -> None:
        if hasattr(self, "ours"):
            assert self.ours.observed() == self.stock.observed()


def test_thousands_of_sequences_agree_with_torch() -> None:
    SideBySide.runs, SideBySide.seen = 0, Counter()
    run_state_machine_as_test(
        SideBySide,
        settings=settings(QUIET, max_examples=SEQUENCES, stateful_step_count=6),
    )
    assert SideBySide.runs >= SEQUENCES
    # The sequences went everywhere: each call worked, each illegal one was refused.
    for event in (
        *("scale", "unscale_", "step", "update", "update(new)", "exchange", "resume", "pickle"),
        *("deepcopy", "iteration", "grew", "fell", "scale(3) raised ValueError"),
        *("unscale_ raised RuntimeError", "unscale_ raised AssertionError"),
        *("step raised RuntimeError", "step raised AssertionError", "closure raised RuntimeError"),
        *("update raised AssertionError", "update(bad) raised AssertionError"),
        *("pickle raised AssertionError", "deepcopy raised AssertionError"),
    ):
        assert SideBySide.seen[event] >= 50, (event, SideBySide.seen)


def modelled(
    verdicts: list[bool], interval: int, low: float | None, high: float | None, hysteresis: int
) -> list[tuple[float, bool]]:
    """The scale that each window sees after it, and whether it steps, in ten plain lines."""
    scale, good, bad, out = 1024.0, 0, 0, []
    for overflowed in verdicts:
        good, bad = (0, bad + 1) if overflowed else (good + 1, 0)
        if overflowed and bad >= hysteresis:
            scale *= 0.5
        if good == interval:
            scale, good = scale * 2.0, 0
        scale = scale if low is None else max(scale, low)
        scale = scale if high is None else min(scale, high)
        out.append((scale, not overflowed))
    return out


@settings(QUIET, max_examples=300)
@given(
    verdicts=st.lists(st.booleans(), max_size=25),
    interval=st.integers(1, 4),
    low=st.sampled_from([None, 256.0, 1024.0, 300.0]),
    high=st.sampled_from([None, 4096.0, 1024.0, 3000.0]),
    hysteresis=st.integers(1, 3),
    fused=st.booleans(),
)
def test_bounds_and_hysteresis_follow_the_model(
    verdicts: list[bool],
    interval: int,
    low: float | None,
    high: float | None,
    hysteresis: int,
    fused: bool,
) -> None:
    scaler = GradScaler(
        "cpu",
        init_scale=1024.0,
        growth_interval=interval,
        min_scale=low,
        max_scale=high,
        hysteresis=hysteresis,
    )
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    for overflowed, (scale, stepped) in zip(
        verdicts, modelled(verdicts, interval, low, high, hysteresis), strict=True
    ):
        before = p.detach().clone()
        scaler.scale(p.sum()).backward()
        if overflowed:
            assert p.grad is not None
            p.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        assert torch.equal(p, before - 1.0 if stepped else before)
