"""What the two-rank scripts of the asynchronous optimizer share: a network, a slow worker, a watch
on collectives, and the reference: torch's own loop, with the one-step delay written out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accel_scaler.async_optimizer.replica as replica_module
from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer.master_params import ParameterPair
from accel_scaler.async_optimizer.replica import Replica

WINDOWS = 7
ACCUMULATION = 2
OVERFLOW = 3
"""The window that overflows, on rank 1 only."""
WARMUP = 2
CLIP = 0.5
SCALER: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}

Result = dict[str, Any]
Wrap = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    """Some blocks, a frozen parameter, and rows that two ranks cannot share out evenly."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.frozen
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def net() -> Net:
    """The same on each call and each rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net()


def batch(window: int, index: int) -> tuple[Tensor, Tensor]:
    """This rank's rows."""
    seeded = torch.Generator().manual_seed(100 * window + index)
    x, y = torch.randn(8, 8, generator=seeded), torch.randn(8, 1, generator=seeded)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return x[rank::ranks], y[rank::ranks]


def optimizer_of(kind: str, params: Any) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=0.01, fused=kind == "fused")


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def whole(t: Any) -> Tensor:
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full.detach().clone()


def weights(params: Any) -> Tensor:
    return torch.cat([whole(p).float().flatten() for p in params])


def state_of(optimizer: Any) -> list[Tensor]:
    """Every tensor of the optimizer's state, in order."""
    state = optimizer.state_dict()["state"]
    return [
        whole(value)
        for index in sorted(state)
        for _, value in sorted(state[index].items())
        if isinstance(value, Tensor)
    ]


@contextmanager
def slow_worker(most_s: float = 0.004) -> Iterator[None]:
    """Every parameter is a part of its own, and the worker sleeps before it updates or writes one.

    A use of a parameter that does not wait for it then meets the old value.
    """
    step_part, publish = Replica.step_part, ParameterPair.publish
    smallest = replica_module.SMALLEST_PART
    main = threading.get_ident()
    draw = torch.Generator().manual_seed(1 + dist.get_rank())

    def sleep() -> None:
        if threading.get_ident() != main:
            time.sleep(most_s * (0.5 + 0.5 * float(torch.rand((), generator=draw))))

    def slow_step(self: Replica, *args: Any) -> None:
        sleep()
        step_part(self, *args)

    def slow_publish(self: ParameterPair, streams: Any) -> None:
        sleep()
        publish(self, streams)

    patched: Any = Replica
    patched.step_part, ParameterPair.publish = slow_step, slow_publish  # type: ignore[method-assign]
    replica_module.SMALLEST_PART = 1
    try:
        yield
    finally:
        patched.step_part, ParameterPair.publish = step_part, publish  # type: ignore[method-assign]
        replica_module.SMALLEST_PART = smallest


class Watch:
    """Which collective ran on which thread.

    A kernel in front of every operator of torch's c10d library: whatever communicates goes
    through one of them, DDP's reducer, FSDP2 and DTensor too.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._library = torch.library.Library("c10d", "IMPL")
        for full_name in torch._C._dispatch_get_all_op_names():
            library, _, name = full_name.partition("::")
            if library == "c10d" and "." not in name and hasattr(torch.ops.c10d, name):
                self._library.impl(name, self._kernel(name), "AutogradCPU")

    def _kernel(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, threading.get_ident()))
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args, **kwargs)

        return kernel

    def take(self) -> tuple[list[str], int]:
        """Names in order, and how many of them ran on another thread than this; forgets them."""
        seen, self.seen = self.seen, []
        here = threading.get_ident()
        return [name for name, _ in seen], sum(thread != here for _, thread in seen)


def control(watch: Watch) -> int:
    """What the watch says of a thread that does communicate (alone, so that nobody waits)."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    watch.take()
    thread = threading.Thread(
        target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": groups[dist.get_rank()]}
    )
    thread.start()
    thread.join(30)
    return watch.take()[1]


def spoil(model: nn.Module, window: int) -> None:
    """One element of rank 1's gradients becomes inf, on that rank only, once they are reduced."""
    if window != OVERFLOW or dist.get_rank() != 1:
        return
    grad: Any = next(p.grad for p in model.parameters() if p.grad is not None)
    shard = grad.to_local() if hasattr(grad, "to_local") else grad
    shard.view(-1)[0] = float("inf")


class Loop:
    """One run: forward and backward are here, the boundary is :meth:`finish`'s."""

    def __init__(self, wrap: Wrap, *, scaled: bool = True, hold_back: bool = True) -> None:
        self.model = wrap(net())
        self.params = list(self.model.parameters())
        self.scaled, self.hold_back = scaled, hold_back
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.looks: list[Tensor] = []

    @property
    def is_sharded(self) -> bool:
        return any(hasattr(p, "to_local") for p in self.params)

    def accumulate(self, scaler: Any, window: int) -> None:
        for index in range(ACCUMULATION):
            last = index == ACCUMULATION - 1
            if self.is_sharded and self.hold_back:
                for module in self.model.modules():
                    if hasattr(module, "set_requires_gradient_sync"):
                        module.set_requires_gradient_sync(last, recurse=False)
            if not self.is_sharded:
                self.model.require_backward_grad_sync = last
            x, y = batch(window, index)
            loss = nn.functional.mse_loss(self.model(x), y) / ACCUMULATION
            self.losses.append(float(loss.detach()))
            if not self.is_sharded and (window, index, dist.get_rank()) == (OVERFLOW, 1, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        if self.is_sharded and self.scaled:
            spoil(self.model, window)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.looks.append(self.model(torch.ones(1, 8)))

    def result(self, optimizer: Any, scaler: Any) -> Result:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "skipped": self.skipped,
            "scales": self.scales,
            "rates": self.rates,
            "looks": torch.cat(self.looks) if self.looks else torch.zeros(0),
            "state": state_of(optimizer),
            "weights": weights(self.params),
            "scaler": scaler.get_scale(),
        }


@torch.no_grad()
def copy(source: Sequence[Any], target: Sequence[Any]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)


def reference(
    wrap: Wrap,
    kind: str,
    *,
    stale_after: int | None = None,
    look: int = -1,
    order: Callable[[list[Any]], Any] = list,
    kind_of_scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    **kwargs: Any,
) -> Result:
    """torch's scaler, clipping and optimizer, on a copy of the parameters.

    The model sees the copy as it is after each step; once there were ``stale_after`` updates, as
    it was before it.
    """
    loop, scaler = Loop(wrap, **kwargs), kind_of_scaler("cpu", **SCALER)
    scaler = scaler if loop.scaled else torch.amp.GradScaler("cpu", enabled=False)
    masters = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in loop.params]
    ordered = order(masters)
    optimizer = optimizer_of(kind, ordered)
    schedule, updates = schedule_of(optimizer), 0
    for window in range(WINDOWS):
        loop.accumulate(scaler, window)
        for p, master in zip(loop.params, masters, strict=True):
            p.grad, master.grad = None, p.grad
        if loop.scaled:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(ordered, CLIP)
            loop.norms.append(float(whole(norm)))
        before, scale = [m.detach().clone() for m in masters], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        loop.skipped.append(scaler.get_scale() < scale)
        stale = stale_after is not None and updates >= stale_after
        updates += not loop.skipped[-1]
        copy(before if stale else masters, loop.params)
        if window == look:  # an evaluation sees the newest, and so does what comes after it
            copy(masters, loop.params)
            loop.evaluate()
        if not loop.skipped[-1]:
            schedule.step()
        optimizer.zero_grad()
        loop.scales.append(scaler.get_scale())
        loop.rates.append(schedule.get_last_lr()[0])
    copy(masters, loop.params)
    return loop.result(optimizer, scaler)


def ours(
    wrap: Wrap,
    kind: str,
    mode: str,
    offload: str = "none",
    *,
    warmup: int = 0,
    look: int = -1,
    order: Callable[[list[Any]], Any] = list,
    **kwargs: Any,
) -> Result:
    """The same with ``AsyncOptimizer``."""
    loop, scaler = Loop(wrap, **kwargs), GradScaler("cpu", **SCALER)
    scaler = scaler if loop.scaled else GradScaler("cpu", enabled=False)
    inner = optimizer_of(kind, order(loop.params))
    schedule = schedule_of(inner)
    settings: Any = {"mode": mode, "offload": offload, "delay_warmup_steps": warmup}
    with AsyncOptimizer(
        inner, loop.model, scaler=scaler, optimizer_threads=1, **settings
    ) as optimizer:
        for window in range(WINDOWS):
            loop.accumulate(scaler, window)
            if loop.scaled:
                norm = optimizer.clip_grad_norm_(CLIP)
                assert type(norm) is Tensor
                loop.norms.append(float(norm))
            optimizer.step()
            loop.skipped.append(optimizer.step_was_skipped)
            if window == look:
                loop.evaluate()
            if not optimizer.step_was_skipped:
                schedule.step()
            optimizer.zero_grad()
            loop.scales.append(scaler.get_scale())
            loop.rates.append(schedule.get_last_lr()[0])
        return loop.result(optimizer, scaler)  # before close(): state_dict is a fence


def differing(mine: Result, theirs: Result) -> list[str]:
    """What two runs do not have in common, bit for bit."""
    found = [k for k in ("losses", "skipped", "scales", "rates", "scaler") if mine[k] != theirs[k]]
    found += [k for k in ("weights", "looks") if not torch.equal(mine[k], theirs[k])]
    states = mine["state"], theirs["state"]
    if len(states[0]) != len(states[1]) or not all(map(torch.equal, *states)):
        found.append("state")
    norms = mine["norms"], theirs["norms"]
    # In the window that overflows ours is inf, torch's inf or NaN.
    pairs = enumerate(zip(*norms, strict=True))
    if any(one != other for window, (one, other) in pairs if window != OVERFLOW):
        found.append("norms")
    return found
