"""Loops in plain torch that asynchronous steps are compared with, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from support import mlp, same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler

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


@torch.no_grad()
def show(
    compensation: str,
    p: Tensor,
    w: Tensor,
    g: Tensor,
    factor: float,
    state: dict[str, Any],
    group: dict[str, Any],
) -> None:
    """Give ``p``, which has its master ``w``, what it is shown: see docs/one-step-late.md.

    ``factor``: what ``g`` is still to be multiplied by.
    """
    if compensation == "none" or not g.numel():  # nothing, or a shard with no row of it
        return
    g = g.float()  # torch would round the rates to float16
    lr, decay = group["lr"], group["weight_decay"]
    if "betas" not in group:
        momentum = state["momentum_buffer"]
        p.copy_((w * (1.0 - lr * decay)).add_(momentum, alpha=-lr * group["momentum"]))
        p.add_(g, alpha=-lr * factor)
        return
    (b1, b2), k = group["betas"], float(state["step"])
    root = state["exp_avg_sq"].sqrt()
    scale, step = 1.0 / math.sqrt(1.0 - b2**k), lr / (1.0 - b1 ** (k + 1))
    root += group["eps"] / scale
    s, kept = scale * math.sqrt(float(root.norm()) ** 2 / root.numel()), w * (1.0 - lr * decay)
    p.copy_(kept.addcdiv_(state["exp_avg"], root, value=-step * b1 / scale))
    most = math.sqrt((1.0 - b2 ** (k + 1)) / (1.0 - b2)) * s / factor
    p.add_(g.clamp(-most, most), alpha=-step * (1.0 - b1) / s * factor)


class Reference:
    """The scale rule, float32 masters, and the model published one boundary late, compensated.

    The first ``prompt`` updates are published at once; ``NEVER_STALE``: a synchronous run.
    ``place``: of the masters, if not the parameters' own device.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        make: Make,
        prompt: int = NEVER_STALE,
        compensation: str = "none",
        place: str | None = None,
    ) -> None:
        self.compensation = compensation
        self.params = list(params)
        """By how much it was off what the last boundary showed of its update, and the update's
        own norm; None: it showed nothing."""
        copies = [p.detach().float().clone() for p in self.params]
        self.masters = [nn.Parameter(c if place is None else c.to(place)) for c in copies]
        self.optimizer = make(self.masters)
        self.prompt, self.steps = prompt, 0
        self.scale, self.good = INIT_SCALE, 0

    @torch.no_grad()
    def publish(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)

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
            self.publish()
            return False
        for master, g in zip(self.masters, grads, strict=True):
            master.grad = None if g is None else g.float() * (1.0 / scale)
        factor = 1.0 / scale
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
            factor *= float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        is_first = self.compensation == "preview" and any(
            not self.optimizer.state.get(m) for m in self.masters if m.grad is not None
        )
        if self.steps >= self.prompt and not is_first:
            # Narrow gradients stay scaled; the others are what torch leaves, unscaled and clipped.
            exact = [p.dtype is torch.float32 for p in self.params]
            self.show(
                [
                    m.grad if yes else g
                    for yes, m, g in zip(exact, self.masters, grads, strict=True)
                ],
                [1.0 if yes else factor for yes in exact],
            )
        self.optimizer.step()
        self.steps += 1
        if self.steps <= self.prompt or is_first:
            self.publish()
        return True

    @torch.no_grad()
    def show(self, grads: list[Tensor | None], factors: list[float]) -> None:
        self.publish()
        (group,) = self.optimizer.param_groups
        for i, (p, w, g) in enumerate(zip(self.params, self.masters, grads, strict=True)):
            if g is not None:
                show(self.compensation, p, w, g, factors[i], self.optimizer.state[w], group)

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


def run_reference(
    kind: str,
    prompt: int = NEVER_STALE,
    *,
    make: Callable[[], nn.Module] = network,
    steps: int = 12,
    overflows: Collection[int] = (0, 5),
    scale: float = INIT_SCALE,
    compensation: str = "none",
    max_norm: float | None = None,
) -> dict[str, Any]:
    """A training with a :class:`Reference`."""
    model = make()
    reference = Reference(model.parameters(), OPTIMIZERS[kind], prompt, compensation)
    reference.scale = scale
    seen: dict[str, Any] = {"losses": [], "scales": [], "skips": []}
    for step in range(steps):
        loss = loss_of(model, step, step in overflows)
        (loss * reference.scale).backward()
        seen["losses"].append(str(float(loss.detach())))  # nan is equal to nan here
        stepped = reference.boundary(max_norm=max_norm)
        seen["scales"].append(reference.scale)
        seen["skips"].append(not stepped)
    reference.publish()
    seen["params"] = [p.detach() for p in model.parameters()]
    seen["masters"] = [m.detach() for m in reference.masters]
    seen["state"] = reference.state()
    return seen


def run_ours(
    kind: str,
    mode: str = "delayed",
    offload: str = "none",
    *,
    make: Callable[[], nn.Module] = network,
    steps: int = 12,
    overflows: Collection[int] = (0, 5),
    scale: float = INIT_SCALE,
    clip: dict[str, Any] | None = None,
    compensation: str = "none",
    **settings: Any,
) -> dict[str, Any]:
    """The same with an ``AsyncOptimizer``."""
    model = make()
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=GROWTH_INTERVAL)
    inner = OPTIMIZERS[kind](model.parameters())
    seen: dict[str, Any] = {"losses": [], "scales": [], "skips": []}
    options = {"mode": mode, "offload": offload, "delay_compensation": compensation, **settings}
    with AsyncOptimizer(inner, model, scaler=scaler, **options) as optimizer:
        for step in range(steps):
            loss = loss_of(model, step, step in overflows)
            scaler.scale(loss).backward()
            seen["losses"].append(str(float(loss.detach())))
            if clip is not None:
                optimizer.clip_grad_norm_(**clip)
            optimizer.step()
            optimizer.zero_grad()
            seen["scales"].append(scaler.get_scale())
            seen["skips"].append(optimizer.step_was_skipped)
        seen.update(saved_of(model, optimizer.state_dict()))
    return seen


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


def saved_of(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """Parameters, masters and state, as :func:`run_reference` has them."""
    params = [p.detach().clone() for p in model.parameters()]
    state = [dict(saved["state"].get(i, {})) for i in range(len(params))]
    masters = [entry.pop("master", p) for entry, p in zip(state, params, strict=True)]
    return {"params": params, "masters": masters, "state": state}


def assert_same_run(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """All that was seen of ``ours`` is what the reference has."""
    for key in ours:
        assert same(ours[key], reference[key]), key
