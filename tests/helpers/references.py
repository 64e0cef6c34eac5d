"""Loops in plain torch that asynchronous steps are compared with, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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


class Reference:
    """The scale rule, and an optimizer over float32 masters."""

    def __init__(self, params: Iterable[Tensor], make: Make) -> None:
        self.params = list(params)
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.optimizer = make(self.masters)
        self.scale, self.good = INIT_SCALE, 0

    def boundary(self, *, max_norm: float | None = None) -> bool:
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
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                p.copy_(master)
        return True

    def state(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state[m]) for m in self.masters]


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1000 + step)
        return torch.randn(4, 8).to(dtype), torch.randn(4, 1)


def loss_of(model: nn.Module, step: int, overflow: bool = False) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    loss: Tensor = ((model(x).float() - y) ** 2).mean()
    return loss * math.inf if overflow else loss


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers, the same on each call."""
    return mlp().to(dtype)


@contextmanager
def no_bfloat16_in_torchs_kernel() -> Iterator[None]:
    """As on CUDA, where its check of gradients takes none."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def checked(grads: list[Tensor], *rest: Any) -> None:
        if any(grad.dtype is torch.bfloat16 for grad in grads):
            name = "_amp_foreach_non_finite_check_and_unscale_cuda"
            raise NotImplementedError(f"\"{name}\" not implemented for 'BFloat16'")
        kernel(grads, *rest)

    with mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", checked):
        yield
