"""A network, and its training in plain torch: what random asynchronous histories must equal."""

from __future__ import annotations

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
LOW, FULL = torch.float16, torch.float32
DTYPES = {"float32": (FULL, FULL, FULL), "float16": (LOW, LOW, LOW), "both": (LOW, FULL, FULL)}


@dataclass(frozen=True, repr=False)
class Setup(Short):
    """What the two sides have in common."""

    mode: str = "overlap"
    offload: str = "none"
    attached: bool = False
    """To an accelerator; else one ``AsyncOptimizer``."""
    optimizer: str = "sgd"
    dtype: str = "float32"
    """Of the parameters: ``float32``, ``float16``, or ``both``."""
    warmup: int = 0
    two: bool = False
    """Two optimizers, one for ``outer``: of an accelerator alone."""
    parts: bool = False
    """Each parameter is a part of the update; else most are in one."""
    width: int = 3
    fold: bool = False
    inner_schedule: bool = False
    """The schedule is the inner optimizer's."""
    other_stream: bool = False
    """On a device: trains on a stream that is not the default one."""
    dropped: bool = False
    """On a device: at the end without ``close``."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return DTYPES[self.dtype]

    @property
    def split(self) -> bool:
        return self.two and self.attached

    def groups(self, net: Net) -> list[list[dict[str, Any]]]:
        """For each optimizer its groups; the order is unlike that of the forward."""
        outer = {"params": list(net.outer.parameters()), "lr": 0.02}
        rest = {"params": [net.gain, *net.inner.parameters()]}
        return [[outer], [rest]] if self.split else [[outer, rest]]


class Net(nn.Module):
    """Layers that a forward may leave out; one parameter has no module of its own."""

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
        # From the back to the front of `parameters()`, so that the parts are put in order.
        for p in self.extra if "extra" in used else ():
            x = x + p
        if "gain" in used:
            x = x * self.gain
        if "inner" in used:
            x = x + self.inner(x.to(self.inner.weight.dtype)).tanh()
        if "outer" in used:
            x = self.outer(x.to(self.outer.weight.dtype))
        return (x.float() ** 2).mean()

    def loss(self, seed: int, used: Sequence[str]) -> Tensor:
        x = torch.randn(2, self.width, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = self(x.to(self.device), used)
        return loss


class Twin:
    """The same training in plain torch: float32 masters, a scale, and when the model sees them."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup)
        groups = setup.groups(self.net)
        self.masters: dict[Tensor, nn.Parameter] = {}
        for p in self.net.parameters():
            self.masters[p] = nn.Parameter(p.detach().float().clone())
        self.optimizers = [
            OPTIMIZERS[setup.optimizer](
                [{**g, "params": [self.masters[p] for p in g["params"]]} for g in each]
            )
            for each in groups
        ]
        self.owned = [[p for g in each for p in g["params"]] for each in groups]
        self.steps = [0 for _ in groups]
        self.waiting = [False for _ in groups]
        self.scale, self.good = INIT_SCALE, 0
        self.opened, self.before, self.found = False, (INIT_SCALE, 0), False
        self.stepped: set[int] = set()
        self.final: dict[Tensor, Tensor] = {}
        """Gradients that were clipped in this window."""
        self.refused = False
        """An overflow that a clipped norm has shown: nobody steps."""

    def has_master(self, p: Tensor) -> bool:
        everywhere = self.setup.mode == "delayed" or self.setup.offload == "cpu"
        return p.requires_grad and (everywhere or p.dtype is torch.float16)

    def backward(self, loss: Tensor) -> None:
        if self.stepped or not self.opened:  # the first backward after a step opens a window
            self.stepped, self.found, self.refused, self.final = set(), False, False, {}
        self.opened = True
        self.before = (self.scale, self.good)
        (loss * self.scale).backward()

    @torch.no_grad()
    def publish(self, number: int) -> None:
        if self.waiting[number]:
            for p in self.owned[number]:
                p.copy_(self.masters[p])
        self.waiting[number] = False

    def publish_all(self) -> None:
        for number in range(len(self.owned)):
            self.publish(number)

    @torch.no_grad()
    def follow(self, number: int) -> None:
        """A master stays where it rounds to the parameter; a frozen one holds nothing more."""
        self.publish(number)
        for p in self.owned[number]:
            master, now = self.masters[p], p.detach()
            kept = (master.to(now.dtype) == now) & p.requires_grad
            master.copy_(torch.where(kept, master, now.float()))

    def unscaled(self, number: int) -> dict[Tensor, Tensor]:
        inverse = 1.0 / self.before[0] if self.opened else 1.0
        return {p: p.grad.float() * inverse for p in self.owned[number] if p.grad is not None}

    @property
    def overflows(self) -> bool:
        grads = [g for n in range(len(self.owned)) for g in self.unscaled(n).values()]
        return not all(bool(g.isfinite().all()) for g in grads)

    def clip(self, order: Sequence[Tensor], clip: Callable[[list[Tensor]], Any]) -> Any:
        """``clip`` on masters whose gradients are what the optimizers will see."""
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

    def step(
        self,
        number: int,
        *,
        fails: set[Tensor] | None = None,
        submitted: bool = False,
    ) -> bool:
        """One optimizer's boundary; ``fails``: only these parameters are updated."""
        if all(p.grad is None for p in self.owned[number]):
            return True
        grads = self.unscaled(number)
        finite = all(bool(g.isfinite().all()) for g in grads.values()) and not self.refused
        grads = {p: self.final.get(p, g) for p, g in grads.items()}
        if self.opened:
            self.found = self.found or not finite
            self.scale, self.good = self.before[0], self.before[1] + 1
            if self.found:
                self.scale, self.good = self.scale * 0.5, 0
            elif self.good == GROWTH_INTERVAL:
                self.scale, self.good = self.scale * 2.0, 0
            self.stepped.add(number)
        if not finite and not submitted:
            self.publish(number)
            return False
        self.follow(number)
        self.steps[number] += 1
        for p, g in grads.items():
            if submitted or fails is not None:  # a function's, or lost
                p.grad = None
            elif not (self.has_master(p) and p.dtype is torch.float16):
                p.grad = g.clone()
        if finite:
            for p, g in grads.items():
                self.masters[p].grad = g if fails is None or p in fails else None
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()
        self.waiting[number] = True
        if self.setup.mode != "delayed" or self.steps[number] <= self.setup.warmup:
            self.publish(number)
        return finite

    def end_window(self) -> None:
        """What ``scaler.update()`` does after the step."""
        self.opened, self.stepped, self.refused, self.final = False, set(), False, {}

    def zero_grad(self, number: int, to_none: bool) -> None:
        for p in self.owned[number]:
            if p.grad is not None:
                p.grad = None if to_none else torch.zeros_like(p)

    def add_group(self) -> None:
        p = self.net.grow()
        self.masters[p] = nn.Parameter(p.detach().float().clone())
        self.optimizers[-1].add_param_group({"params": [self.masters[p]], "lr": 0.03})
        self.owned[-1].append(p)

    def entries(self, number: int) -> list[dict[str, Any]]:
        optimizer = self.optimizers[number]
        return [dict(optimizer.state.get(self.masters[p], {})) for p in self.owned[number]]

    @torch.no_grad()
    def forget_masters(self) -> None:
        """What a plain optimizer can hold: masters are gone, state has the parameters' dtype."""
        self.publish_all()
        engines = range(len(self.owned))
        for number in engines:
            if not any(map(self.has_master, self.owned[number])):
                continue
            for p in self.owned[number]:
                self.masters[p].copy_(p)
                self.round_state(number, p)

    def round_state(self, number: int, p: Tensor) -> None:
        entry = self.optimizers[number].state.get(self.masters[p], {})
        for key, value in entry.items():
            if key != "step" and isinstance(value, Tensor):
                entry[key] = value.to(p.dtype).float()
