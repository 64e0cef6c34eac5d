"""The reference of the random histories: a network and its training in plain torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from histories import Short
from references import GROWTH_INTERVAL, INIT_SCALE
from references import OPTIMIZERS as COMMON
from torch import Tensor, nn

LAYERS = ("inner", "gain", "outer", "extra")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **COMMON,
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
}
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LOW = (HALF, BRAIN)
NORMS, FIRST = 4, 2
"""Norms in the median that tells a spike, and how many there must be; the package has more."""
DTYPES = {
    "float32": (FULL, FULL, FULL),
    "float16": (HALF, HALF, HALF),
    "bfloat16": (BRAIN, BRAIN, BRAIN),
    "both": (HALF, FULL, FULL),
    "all": (BRAIN, HALF, FULL),
}


@dataclass(frozen=True, repr=False)
class Setup(Short):
    """What is chosen before the first step, for both sides."""

    mode: str = "overlap"
    offload: str = "none"
    """On a device."""
    budget: int | str = "auto"
    """``offload_budget``."""
    attached: bool = False
    """An attached accelerator; else one ``AsyncOptimizer``."""
    optimizer: str = "sgd"
    dtype: str = "float32"
    """Of the parameters: a dtype, ``both`` float16 and float32, or ``all`` three."""
    two: bool = False
    """Attached: two optimizers, one of them for ``outer``."""
    parts: bool = False
    """Each parameter is a part of the update; else most parameters are in one part."""
    width: int = 3
    inner_schedule: bool = False
    """The schedule is the inner optimizer's."""
    other_stream: bool = False
    """On a device: trains on a stream that is not the default one."""
    finds: bool = False
    """An overflowed window runs again, to find where it began."""
    hysteresis: int = 1
    bounds: tuple[float | None, float | None] = (None, None)
    """``min_scale`` and ``max_scale``."""
    stock: bool = False
    """Attached to an accelerator that has a scaler of its own."""
    telemetry: bool = False
    """Attached, with a telemetry file."""
    precision: str = "fp16"
    """Else nothing is scaled. Raw, ``bf16`` has a disabled scaler, and ``no`` none."""
    guards: bool = True
    """Attached: ``skip_nonfinite``."""
    limit: float | str | None = None
    """Attached: ``skip_norm_above``."""
    masters: str = "auto"
    retry: bool = False
    """Attached, one optimizer: an overflowed window runs again. The reference has the lower scale
    from its start."""

    @property
    def scaled(self) -> bool:
        return self.precision == "fp16"

    @property
    def checks(self) -> bool:
        """A window whose gradients are not finite is skipped; else stepped, as in stock."""
        return self.scaled or (self.attached and self.guards)

    @property
    def in_place(self) -> bool:
        """bfloat16 parameters are stepped as they are."""
        masters = self.masters == "fp32" or self.offload == "cpu"
        return not (self.scaled or masters or self.dtype != "bfloat16")

    @property
    def exact(self) -> torch.dtype:
        """Of what is stepped."""
        return BRAIN if self.in_place else FULL

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return DTYPES[self.dtype]

    def groups(self, net: Net) -> list[list[dict[str, Any]]]:
        """For each optimizer its groups; the order is unlike that of the forward."""
        outer = {"params": list(net.outer.parameters()), "lr": 0.02}
        rest = {"params": [net.gain, *net.inner.parameters()]}
        return [[outer], [rest]] if self.two else [[outer, rest]]


class Net(nn.Module):
    """Layers that a forward may leave out; one parameter has no module of its own."""

    again = "same"
    """What the window's forwards do when they run again; else ``other``, or ``raise``."""

    def __init__(self, setup: Setup, device: str = "cpu") -> None:
        super().__init__()
        self.width, self.device, dtypes = setup.width, device, setup.dtypes
        width = self.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.inner = nn.Linear(width, width).to(dtypes[0])
            self.gain = nn.Parameter(torch.ones(width, dtype=dtypes[1]))
            self.outer = nn.Linear(width, 2).to(dtypes[2])
        self.extra = nn.ParameterList()
        self.to(device)

    def grow(self) -> nn.Parameter:
        some = torch.full((self.width,), 0.25, dtype=self.gain.dtype, device=self.device)
        self.extra.append(nn.Parameter(some))
        return self.extra[-1]

    def forward(self, x: Tensor, used: Sequence[str]) -> Tensor:
        if self.again == "raise" and torch.is_grad_enabled():
            raise RuntimeError("not again")
        # From the back to the front of `parameters()`, so that the parts are put in order.
        for p in self.extra if "extra" in used else ():
            x = x + p
        if "gain" in used:
            x = x * self.gain
        if "inner" in used:
            x = x + self.inner(x.to(self.inner.weight.dtype)).tanh()
        if "outer" in used:
            x = self.outer(x.to(self.outer.weight.dtype))
        out = (x.float() ** 2).mean()
        return 2.0 * out + 1.0 if self.again == "other" and torch.is_grad_enabled() else out

    def loss(self, seed: int, used: Sequence[str], penalised: bool = False) -> Tensor:
        """``penalised``: with a penalty on a weight, which is used outside of a forward."""
        penalty = self.outer.weight.float().square().mean() if penalised else 0.0
        x = torch.randn(2, self.width, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = self(x.to(self.device), used) + penalty
        return loss


def double_averages(entry: dict[str, Any]) -> None:
    """Put other tensors into a parameter's state, with twice the values."""
    for name in ("momentum_buffer", "exp_avg"):
        if entry.get(name) is not None:
            entry[name] = entry[name] * 2.0


@dataclass
class Window:
    """What telemetry records of a window; ``norm``: None where it is not compared."""

    scale: float
    next_scale: float
    skipped: bool
    lr: list[float]
    norm: float | None = None
    spike: bool = False


class PlainTorch:
    """The training in plain torch: float32 masters, and a loss scale."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup)
        groups = setup.groups(self.net)
        self.masters: dict[Tensor, nn.Parameter] = {}
        for p in self.net.parameters():
            self.masters[p] = nn.Parameter(p.detach().to(setup.exact, copy=True))
        self.optimizers = [
            OPTIMIZERS[setup.optimizer](
                [{**g, "params": [self.masters[p] for p in g["params"]]} for g in each]
            )
            for each in groups
        ]
        self.owned = [[p for g in each for p in g["params"]] for each in groups]
        self.events: Counter[str] = Counter()
        self.lasting: set[Tensor] = set()
        """Parameters that were trained once: frozen, they keep their masters."""
        for number in range(len(groups)):
            self.refresh(number)
        self.scale, self.good, self.bad = INIT_SCALE if setup.scaled else 1.0, 0, 0
        self.opened, self.before = False, (self.scale, 0, 0)
        self.found = self.spiked = False
        self.windows: list[Window] = []
        self.norm: float | None = None
        """The norm before the first clip, where one call has clipped everything."""
        self.stepped: set[int] = set()
        self.joined: set[int] = set()
        """Optimizers in the last record."""
        self.norms: dict[int, float] = {}
        """Of the gradients of each optimizer before the first clip."""
        self.usual: list[list[float]] = [[] for _ in groups]
        """Norms of earlier windows, by optimizer."""
        self.final: dict[Tensor, Tensor] = {}
        """Gradients that were clipped in this window."""
        self.refused: set[int] = set()
        """Optimizers that skip: a clip has found an overflow."""
        self.losses: list[Tensor] = []
        """Of the open window, whose gradients may be made again."""

    def has_master(self, p: Tensor) -> bool:
        may = p.dtype in LOW and not self.setup.in_place
        return may and (p.requires_grad or p in self.lasting)

    def keeps(self, params: Sequence[Tensor]) -> bool:
        """What a clip of ``params`` does is left to the step: an optimizer of theirs has masters of
        float16 or bfloat16, or the gradients are scaled. Else ``.grad`` is clipped."""
        if self.setup.scaled or not self.setup.checks or not self.final.keys().isdisjoint(params):
            return self.setup.scaled or bool(self.final)
        some = [p for n in self.owners(params) for p in self.owned[n] if p.dtype in LOW]
        return any(map(self.has_master, some))

    def owners(self, params: Sequence[Tensor]) -> list[int]:
        return [n for n, own in enumerate(self.owned) if not set(own).isdisjoint(params)]

    def backward(self, loss: Tensor, is_seen: bool = True) -> None:
        """``is_seen``: by the package, which else finds out when it steps."""
        if self.stepped or not self.opened:  # the first backward after a step opens a window
            self.carry_over()
            self.start_window()
        self.joined = set() if is_seen or self.setup.scaled else self.joined
        self.opened, self.norms = True, {}
        self.before = (self.scale, self.good, self.bad)
        self.losses += [loss] * self.setup.retry
        (loss * self.scale).backward(retain_graph=self.setup.retry)

    def may_retry(self) -> bool:
        low, _ = self.setup.bounds
        return self.scale * 0.5 >= (low or 1.0)

    def retry(self) -> None:
        """The window has half its scale, from its start."""
        assert self.may_retry()
        for p in self.net.parameters():
            if p.grad is not None:
                p.grad.zero_()
        self.scale, self.good = self.scale * 0.5, 0
        self.before = (self.scale, 0, self.before[2])
        for loss in self.losses:
            (loss * self.scale).backward(retain_graph=True)

    def start_window(self) -> None:
        self.losses.clear()
        self.stepped, self.final, self.norm, self.norms = set(), {}, None, {}
        self.found = self.spiked = False
        self.refused.clear()

    @torch.no_grad()
    def carry_over(self) -> None:
        """Bring the gradients of an optimizer that sat out the last window to the new scale."""
        left = set(range(len(self.owned))) - self.stepped
        if not self.opened or self.scale == self.before[0]:
            return
        for grad in (p.grad for n in left for p in self.owned[n] if p.grad is not None):
            grad.mul_(self.scale / self.before[0])
            self.events["brought to a new scale"] += 1

    @torch.no_grad()
    def refresh(self, number: int) -> None:
        """Bring masters to parameters that were edited; one that rounds to its parameter stays."""
        own = self.owned[number]
        self.lasting.update(p for p in own if p.requires_grad)
        for p in own:
            master, now = self.masters[p], p.detach()
            kept = (master.to(now.dtype) == now) & (p in self.lasting)
            master.copy_(torch.where(kept, master, now.float()))

    def unscaled(self, number: int) -> dict[Tensor, Tensor]:
        inverse = 1.0 / self.before[0] if self.opened else 1.0
        own, exact = self.owned[number], self.setup.exact
        return {p: p.grad.to(exact) * inverse for p in own if p.grad is not None}

    def is_finite(self, number: int) -> bool:
        return all(bool(g.isfinite().all()) for g in self.unscaled(number).values())

    def refuse(self, params: Sequence[Tensor], norm: float) -> bool:
        """The optimizers of ``params`` skip where a clip of them finds an overflow in one."""
        if not self.setup.checks:
            return False
        grads = {n: self.unscaled(n) for n in range(len(self.owned))}
        owners = {n: own for n, own in grads.items() if not own.keys().isdisjoint(params)}
        looks_at_all = self.keeps(params) or self.setup.limit is not None
        finite = not looks_at_all or all(map(self.is_finite, owners))
        self.refused |= set() if finite and math.isfinite(norm) else owners.keys()
        return not self.refused.isdisjoint(owners)

    def clip(
        self,
        order: Sequence[Tensor],
        clip: Callable[[list[Tensor]], Any],
        kind: float = 0.0,
        submitted: bool = False,
    ) -> Any:
        """Call ``clip`` (of a ``kind`` of norm) on masters with their final gradients, or on
        gradients that nothing scales."""
        owners = self.owners([p for p in order if p.grad is not None])
        norms = {n: self.norm_of(n) for n in owners}
        self.look_at(owners)
        result = self.clip_any(order, clip, submitted)
        # A spike is told by the norm that a clip takes, if it takes all, none of them looked at.
        all_of_them = {p for n in owners for p in self.owned[n] if p.grad is not None}
        is_whole = all_of_them <= set(order) and self.norms.keys().isdisjoint(owners)
        for n in owners:
            self.norms.setdefault(n, float(result) if kind == 2.0 and is_whole else norms[n])
        return result

    def look_at(self, owners: Sequence[int]) -> None:
        """Before a step, after another one: a new record."""
        if not (self.setup.scaled or self.joined.isdisjoint(owners)):
            self.joined = set()

    def clip_any(
        self,
        order: Sequence[Tensor],
        clip: Callable[[list[Tensor]], Any],
        submitted: bool = False,
    ) -> Any:
        if not (submitted or self.keeps(order)):
            here = [p for p in order if p.grad is not None]
            finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in here)
            if finite or not self.setup.checks:
                return clip(here)
            self.refused.update(self.owners(order))
            return torch.tensor(math.inf)
        grads = {p: g for n in range(len(self.owned)) for p, g in self.unscaled(n).items()}
        grads.update(self.final)
        chosen = [p for p in order if p in grads]
        for p in chosen:
            self.masters[p].grad = grads[p]
        result = clip([self.masters[p] for p in chosen])
        for p in chosen:
            grad = self.masters[p].grad
            assert grad is not None
            self.final[p], self.masters[p].grad = grad, None
        return result

    def exact_limit(self, order: Sequence[Tensor], kind: float) -> float:
        """A limit of the norm that clips by exactly 2**-18, or one that clips nothing."""

        def norm_of(masters: list[Tensor]) -> Tensor:
            grads = [m.grad for m in masters if m.grad is not None]
            return torch.nn.utils.get_total_norm(grads, kind) + 1e-6

        norm, ends = self.clip_any(order, norm_of), torch.tensor((0.0, math.inf))
        near = norm * 2.0**-18
        limits = [float(t) for t in (near, *torch.nextafter(near.expand(2), ends))]
        return next((limit for limit in limits if limit / norm == 2.0**-18), math.inf)

    def step(
        self, number: int, *, fails: set[Tensor] | None = None, submitted: bool = False
    ) -> bool:
        """End the window for one optimizer; ``fails``: only these parameters are updated."""
        if all(p.grad is None for p in self.owned[number]):
            return True
        if number in self.stepped and not self.setup.scaled:
            self.start_window()
        grads = self.unscaled(number)
        finite = self.is_finite(number)
        self.events["stepped on NaN"] += not (finite or self.setup.checks or submitted)
        finite = (finite or not self.setup.checks) and number not in self.refused
        is_spike = finite and self.is_spike(number)
        grads = {p: self.final.get(p, g) for p, g in grads.items()}
        if self.opened or not self.setup.scaled:
            self.found, self.spiked = self.found or not finite, self.spiked or is_spike
            self.scale, self.good, self.bad = self.next_scale(*self.before)
            self.record(number, not finite, is_spike)
            self.stepped.add(number)
        finite = finite and not is_spike
        if not finite and not submitted:
            return False
        self.refresh(number)
        for p, g in grads.items():
            if submitted or fails is not None:  # a function's, or lost
                p.grad = None
            elif not (self.has_master(p) and p.dtype in LOW):
                p.grad = g.clone()
        if finite:
            for p, g in grads.items():
                self.masters[p].grad = g if fails is None or p in fails else None
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()
        with torch.no_grad():
            for p in self.owned[number]:
                p.copy_(self.masters[p])
        return finite

    def next_scale(self, scale: float, good: int, bad: int) -> tuple[float, int, int]:
        """The scale, and the windows in a row that were finite, and that were not."""
        if not self.setup.scaled or (self.spiked and not self.found):
            return scale, good, bad
        good, bad = (0, bad + 1) if self.found else (good + 1, 0)
        if self.found and bad >= self.setup.hysteresis:
            scale *= 0.5
        if good == GROWTH_INTERVAL:
            scale, good = scale * 2.0, 0
        low, high = self.setup.bounds
        return min(max(scale, low or 0.0), high or math.inf), good, bad

    def record(self, number: int, found: bool, is_spike: bool) -> None:
        if not self.joined or number in self.joined:
            self.joined = set()
            self.windows.append(Window(self.before[0], 0.0, False, [], self.norm))
        self.joined.add(number)
        window = self.windows[-1]
        window.next_scale = self.scale
        # With an optimizer that has stepped before the clip the norm is that of both.
        window.norm = self.norm if window.norm is not None else None
        window.skipped |= found or is_spike
        window.spike |= is_spike
        window.lr += [group["lr"] for group in self.optimizers[number].param_groups]

    def norm_of(self, number: int) -> float:
        """Unscaled, before it is clipped."""
        grads = [g.float() for g in self.unscaled(number).values()]
        return self.norms.get(number, float(torch.nn.utils.get_total_norm(grads)))

    def is_spike(self, number: int) -> bool:
        limit, usual, norm = self.setup.limit, self.usual[number], self.norm_of(number)
        if isinstance(limit, str):
            factor = float(limit.removesuffix("x"))
            limit = factor * statistics.median(usual) if len(usual) >= FIRST else None
            usual[:] = [*usual, *[norm] * (0.0 < norm < math.inf)][-NORMS:]
        found = limit is not None and norm > limit
        self.events["spike"] += found
        return found

    def unscale(self, number: int, is_seen: bool) -> None:
        """By hand. Where nothing is scaled that is a look at them; ``is_seen``: by the package."""
        self.look_at([number] if is_seen else [])
        if self.setup.scaled or is_seen:
            self.norms[number] = self.norm_of(number)
        if self.setup.scaled:
            self.final.update(self.unscaled(number))
        elif is_seen and self.setup.checks and not self.is_finite(number):
            self.refused.add(number)

    @torch.no_grad()
    def replace_state(self, number: int, change: Callable[[Any], None]) -> None:
        for entry in self.optimizers[number].state.values():
            change(entry)

    def end_window(self) -> None:
        """``scaler.update()`` after the step."""
        self.opened, self.stepped, self.refused, self.final = False, set(), set(), {}
        self.joined, self.norms = set(), {}

    def zero_grad(self, number: int, to_none: bool) -> None:
        for p in self.owned[number]:
            if p.grad is not None:
                p.grad = None if to_none else torch.zeros_like(p)

    def add_group(self) -> None:
        p = self.net.grow()
        self.masters[p] = nn.Parameter(p.detach().to(self.setup.exact, copy=True))
        self.optimizers[-1].add_param_group({"params": [self.masters[p]], "lr": 0.03})
        self.owned[-1].append(p)

    def entries(self, number: int) -> list[dict[str, Any]]:
        optimizer = self.optimizers[number]
        return [dict(optimizer.state.get(self.masters[p], {})) for p in self.owned[number]]

    @torch.no_grad()
    def forget_masters(self, setup: Setup) -> None:
        """``close`` or ``detach``: masters are gone, state has the parameters' dtype. The next
        steps are made as ``setup`` says."""
        for number, own in enumerate(self.owned):
            for p in own if any(map(self.has_master, own)) else ():
                self.masters[p].copy_(p)
                self.round_state(number, p)
        self.lasting.clear()
        self.setup = setup
        for p, master in self.masters.items():
            master.data = master.data.to(setup.exact)
            for number in range(len(self.owned)):
                self.round_state(number, p, setup.exact)
        for number in range(len(self.owned)):
            self.refresh(number)

    def round_state(self, number: int, p: Tensor, dtype: torch.dtype | None = None) -> None:
        entry = self.optimizers[number].state.get(self.masters[p], {})
        for key, value in entry.items():
            if key != "step" and isinstance(value, Tensor):
                entry[key] = value.to(dtype or p.dtype).to(self.setup.exact)
