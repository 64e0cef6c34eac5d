"""Loops in plain torch that asynchronous steps are compared with, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from support import mlp
from torch import Tensor, nn

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
}
GROWTH_INTERVAL = 4
INIT_SCALE = 1024.0
DECAY = 0.9
NEVER_STALE = 10**9


class Reference:
    """The scale rule, float32 masters, and the model published one boundary late.

    The first ``prompt`` updates are published at once; ``NEVER_STALE``: a synchronous run.
    """

    def __init__(self, params: Iterable[Tensor], make: Make, prompt: int = NEVER_STALE) -> None:
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer = make(self.masters)
        self.prompt, self.steps = prompt, 0
        self.scale, self.good = INIT_SCALE, 0

    @torch.no_grad()
    def publish(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)

    def boundary(
        self,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        max_value: float | None = None,
        only: Collection[int] | None = None,
    ) -> bool:
        """Clips all masters' gradients, or those of the indices in ``only``."""
        self.publish()
        grads, scale = [p.grad for p in self.params], self.scale
        finite = all(bool(g.isfinite().all()) for g in grads if g is not None)
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = scale * 0.5
        elif self.good == GROWTH_INTERVAL:
            self.scale, self.good = scale * 2.0, 0
        for p in self.params:
            p.grad = None
        if not finite:
            return False
        for master, g in zip(self.masters, grads, strict=True):
            master.grad = None if g is None else g.float() * (1.0 / scale)
        chosen = [m for i, m in enumerate(self.masters) if only is None or i in only]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type=norm_type)
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(chosen, max_value)
        self.optimizer.step()
        self.steps += 1
        if self.steps <= self.prompt:
            self.publish()
        return True

    def state(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state[m]) for m in self.masters]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers, the same on each call."""
    return mlp().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1000 + step)
        return torch.randn(4, 8).to(dtype), torch.randn(4, 1)


def loss_of(model: nn.Module, step: int, overflow: bool = False) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    loss: Tensor = ((model(x).float() - y) ** 2).mean()
    return loss * math.inf if overflow else loss


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, tensors in dicts and lists too."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
