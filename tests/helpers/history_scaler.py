"""Random calls on torch's scaler and on ours, side by side, compared bit for bit after each."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from histories import INF, NAN, Call, Choices, Kind, Short, drawn

from accel_scaler import GradScaler

Stock = torch.amp.GradScaler


@dataclass(frozen=True, repr=False)
class Setup(Short):
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2
    fused: bool = False


class Side:
    """One scaler with its own two optimizers."""

    def __init__(self, kind: type[Stock], setup: Setup) -> None:
        self.kind = kind
        arguments = dict(vars(setup))
        fused = arguments.pop("fused")
        self.scaler: Any = kind("cpu", **arguments)
        self.params = [torch.nn.Parameter(torch.tensor(v)) for v in ([1.0, -2.0], [0.5], [3.0])]
        self.optimizers: list[Any] = [
            torch.optim.SGD(self.params[:2], lr=0.125, momentum=0.9),
            torch.optim.AdamW(self.params[2:], lr=0.1, fused=fused, weight_decay=0.1),
        ]

    def observed(self) -> tuple[Any, ...]:
        """Everything that must agree, floats as their bits."""
        sgd, adam = (optimizer.state for optimizer in self.optimizers)
        tensors = [*self.params, *(p.grad for p in self.params)]
        tensors += [sgd[p].get("momentum_buffer") if p in sgd else None for p in self.params[:2]]
        last, scaler = self.params[2], self.scaler
        return (
            scaler.get_scale(),
            scaler._get_growth_tracker(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
            [None if t is None else t.detach().numpy().tobytes() for t in tensors],
            float(adam[last].get("step", 0.0)) if last in adam else 0.0,
        )

    # What may be called. Each returns what must be the same.

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

    def assign(self, which: int, value: float) -> None:
        for p in self.optimizers[which].param_groups[0]["params"]:
            p.grad = torch.full_like(p, value * min(self.scaler.get_scale(), 1e30))

    def overflow(self, param: int, value: float) -> None:
        grad = self.params[param].grad
        if grad is not None:
            grad[-1] = value

    def zero_grad(self, which: int, to_none: bool) -> None:
        self.optimizers[which].zero_grad(set_to_none=to_none)

    def unscale_(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def step(self, which: int) -> Any:
        return self.scaler.step(self.optimizers[which])

    def step_with_closure(self, which: int) -> Any:
        return self.scaler.step(self.optimizers[which], closure=lambda: None)

    def update(self) -> None:
        self.scaler.update()

    def iteration(self, factor: float) -> Any:
        losses = self.scale("tensor", factor)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return losses

    def set_scale(self, value: float, tensor: bool) -> None:
        self.scaler.update(torch.tensor(value) if tensor else value)

    def set_factors(self, growth: float, backoff: float, interval: int) -> None:
        self.scaler.set_growth_factor(growth)
        self.scaler.set_backoff_factor(backoff)
        self.scaler.set_growth_interval(interval)

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)

    def replace(self, how: str) -> None:
        if how == "pickle":
            self.scaler = pickle.loads(pickle.dumps(self.scaler))
        elif how == "deepcopy":
            self.scaler = copy.deepcopy(self.scaler)
        else:
            fresh = self.kind("cpu", init_scale=7.0, growth_factor=9.0, growth_interval=99)
            fresh.load_state_dict(self.scaler.state_dict())
            self.scaler = fresh


WHICH = (0, 0, 1)
CHOICES: Choices = {
    "scale": {
        "shape": ("tensor", "tensor", "list", "tuple", "nested", "iterable", "first only"),
        "factor": (1.0, 0.1, -3.0),
    },
    "assign": {"which": WHICH, "value": (1.0, 1e-3, 0.7)},
    "overflow": {"param": (0, 1, 2), "value": (INF, -INF, NAN)},
    "zero_grad": {"which": WHICH, "to_none": (False, True)},
    "unscale_": {"which": WHICH},
    "step": {"which": WHICH},
    "step_with_closure": {"which": WHICH},
    "update": {},
    "iteration": {"factor": (1.0, 0.1)},
    "set_scale": {"value": (1.0, 4096.0, 0.3, 1e-20), "tensor": (False, True)},
    "set_factors": {"growth": (2.0, 4.0, 1.0), "backoff": (0.5, 0.3, 1.0), "interval": (1, 2, 3)},
    "exchange": {},
    "replace": {"how": ("resume", "pickle", "deepcopy")},
}
OFTEN = (*CHOICES, *["scale", "scale", "unscale_", "step", "step", "update", "update", "iteration"])


def draw(r: random.Random) -> tuple[Setup, list[Call]]:
    setup = Setup(
        init_scale=r.choice((2.0**16, 1000.0, 3.0, 2.0**126)),
        growth_factor=r.choice((2.0, 1.5, 3.0)),
        backoff_factor=r.choice((0.5, 0.7, 0.25)),
        growth_interval=r.randint(1, 4),
        fused=r.random() < 0.5,
    )
    return setup, [drawn(r, r.choice(OFTEN), CHOICES) for _ in range(r.randint(12, 30))]


def play(setup: Setup, calls: Sequence[Call], seen: Counter[str] | None = None) -> None:
    """Results, exceptions and all state must be the same."""
    seen = Counter() if seen is None else seen
    stock, ours = Side(Stock, setup), Side(GradScaler, setup)
    for name, arguments in calls:
        each = [dict(arguments), dict(arguments)]
        if name == "exchange":
            states = [side.scaler.state_dict() for side in (ours, stock)]
            assert {key: states[0][key] for key in states[1]} == states[1]
            each = [{"state": state} for state in states]
        before = stock.scaler.get_scale()
        (theirs, expected), (mine, found) = (
            outcome(getattr(side, "load" if name == "exchange" else name), its)
            for side, its in zip((stock, ours), each, strict=True)
        )
        assert theirs == mine, f"{name}: torch {theirs} {expected!r}, ours {mine} {found!r}"
        if theirs == "raised":
            same = isinstance(found, type(expected))
            if isinstance(expected, AttributeError):
                # A fused optimizer that was unscaled before it had gradients: torch trips over
                # its own integer 0, and leaves attributes behind that break every later step.
                same = "No inf checks were recorded" in str(found)
                del stock.optimizers[1].grad_scale, stock.optimizers[1].found_inf
            assert same, f"{name}: {expected!r} became {found!r}"
            seen[f"{name} raised {type(expected).__name__}"] += 1
        else:
            assert repr(expected) == repr(found), name
            seen[f"replace by {arguments['how']}" if name == "replace" else name] += 1
        seen["grew"] += name == "update" and stock.scaler.get_scale() > before
        seen["fell"] += name == "update" and stock.scaler.get_scale() < before
        assert ours.observed() == stock.observed(), name


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "returned", call(**arguments)
    except Exception as error:
        return "raised", error


KIND = Kind(draw, play)
