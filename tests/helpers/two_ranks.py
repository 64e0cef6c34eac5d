"""The parts that tests on two ranks share: a network, a watch on collectives, torch's own loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo  # FSDP2 would import it in each rank, for seconds
import torch.distributed as dist
from async_support import lazy
from children import everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_scaler import AsyncOptimizer, GradScaler

WINDOWS = 7
ACCUMULATION = 2
OVERFLOW = 3
"""The window that overflows, on rank 1 only."""
SKIPPED = [window == OVERFLOW for window in range(WINDOWS)]
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0]

OVERLAP: dict[str, Any] = {"step_mode": "overlap"}
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


def prepared_shards(accelerator: Any, model: nn.Module, *parts: nn.Module) -> Any:
    """``model`` and its ``parts``, sharded by torch's FSDP2 and prepared: Accelerate itself shards
    only where there is an accelerator."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*parts, model):
        fully_shard(each, mesh=mesh)
    accelerator._models.append(model)
    return accelerator.prepare_model(model, evaluation_mode=True)


def whole(t: Any) -> Tensor:
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full.detach().clone()


def shard_of(t: Any) -> Tensor:
    """This rank's, where there are shards."""
    local: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return local.detach()


def weights(params: Any) -> Tensor:
    return torch.cat([whole(p).float().flatten() for p in params])


def state_of(optimizer: Any) -> list[Tensor]:
    """Every tensor of the optimizer's state that torch's has too, in order."""
    state = optimizer.state_dict()["state"]
    return [
        whole(value)
        for index in sorted(state)
        for _, value in sorted(state[index].items())
        if isinstance(value, Tensor)
    ]


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


class Loop:
    """One run: forward and backward are here, the boundary is the caller's.

    ``half``: the forward under autocast to it, as Accelerate runs it. ``guards``: what is not
    finite is skipped, scaled or not.
    """

    def __init__(
        self,
        wrap: Wrap,
        *,
        scaled: bool = True,
        guards: bool = False,
        hold_back: bool = True,
        half: torch.dtype | None = None,
    ) -> None:
        self.model = wrap(net())
        self.params = list(self.model.parameters())
        self.scaled, self.hold_back, self.half = scaled, hold_back, half
        self.guards = guards or scaled
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.looks: list[Tensor] = []

    @property
    def is_sharded(self) -> bool:
        return any(hasattr(p, "to_local") for p in self.params)

    def loss(self, window: int, index: int) -> Tensor:
        x, y = batch(window, index)
        with torch.autocast("cpu", self.half) if self.half else nullcontext():
            out = self.model(x.to(self.params[0].dtype))
        loss = nn.functional.mse_loss(out.float(), y) / ACCUMULATION
        self.losses.append(float(loss.detach()))
        if not self.is_sharded and (window, index, dist.get_rank()) == (OVERFLOW, 1, 1):
            loss = loss * float("inf")
        return loss

    def accumulate(self, scaler: Any, window: int) -> None:
        for index in range(ACCUMULATION):
            last = index == ACCUMULATION - 1
            if self.is_sharded and self.hold_back:
                for module in self.model.modules():
                    if hasattr(module, "set_requires_gradient_sync"):
                        module.set_requires_gradient_sync(last, recurse=False)
            if not self.is_sharded:
                self.model.require_backward_grad_sync = last
            scaler.scale(self.loss(window, index)).backward()
        if self.is_sharded and self.scaled and (window, dist.get_rank()) == (OVERFLOW, 1):
            # One element becomes inf, on this rank only, once gradients are reduced.
            grad: Any = next(p.grad for p in self.params if p.grad is not None)
            grad.to_local().view(-1)[0] = float("inf")

    def evaluate(self) -> None:
        with torch.no_grad():
            self.looks.append(self.model(torch.ones(1, 8)))

    def note(self, skipped: bool, scaler: Any, schedule: Any) -> None:
        """A window is over."""
        self.skipped.append(skipped)
        self.scales.append(scaler.get_scale())
        self.rates.append(schedule.get_last_lr()[0])

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
        }


def reference(
    wrap: Wrap,
    kind: str,
    *,
    look: int = -1,
    order: Callable[[list[Any]], Any] = list,
    kind_of_scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler,
    **kwargs: Any,
) -> Result:
    """torch's scaler, clipping and optimizer; ``look``: the window after which it evaluates."""
    loop, scaler = Loop(wrap, **kwargs), kind_of_scaler("cpu", **SCALER)
    scaler = scaler if loop.scaled else torch.amp.GradScaler("cpu", enabled=False)
    ordered = order(loop.params)
    optimizer = optimizer_of(kind, ordered)
    schedule = schedule_of(optimizer)
    for window in range(WINDOWS):
        loop.accumulate(scaler, window)
        if loop.scaled:
            scaler.unscale_(optimizer)
        grads = [shard_of(p.grad) for p in loop.params if p.grad is not None]
        is_bad = not all(bool(g.isfinite().all()) for g in grads)
        if loop.guards:
            norm = nn.utils.clip_grad_norm_(ordered, CLIP)
            loop.norms.append(float(whole(norm)))
        scale = scaler.get_scale()
        skipped = is_bad and loop.guards and not loop.scaled
        if not skipped:
            scaler.step(optimizer)
        scaler.update()
        skipped = skipped or scaler.get_scale() < scale
        if window == look:
            loop.evaluate()
        if not skipped:
            schedule.step()
        optimizer.zero_grad()
        loop.note(skipped, scaler, schedule)
    return loop.result(optimizer, scaler)


def ours(
    wrap: Wrap,
    kind: str,
    step_mode: Any,
    *,
    look: int = -1,
    order: Callable[[list[Any]], Any] = list,
    offload: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Result:
    """The same with ``AsyncOptimizer``; ``offload``: its settings for that."""
    loop, scaler = Loop(wrap, **kwargs), GradScaler("cpu", **SCALER)
    scaler = scaler if loop.scaled else GradScaler("cpu", enabled=False)
    inner = optimizer_of(kind, order(loop.params))
    schedule = schedule_of(inner)
    with AsyncOptimizer(
        inner, loop.model, scaler=scaler, step_mode=step_mode, **(offload or {})
    ) as optimizer:
        for window in range(WINDOWS):
            loop.accumulate(scaler, window)
            if loop.scaled:
                norm = optimizer.clip_grad_norm_(CLIP)
                assert type(norm) is Tensor
                loop.norms.append(float(norm))
            optimizer.step()
            if window == look:
                loop.evaluate()
            if not optimizer.step_was_skipped:
                schedule.step()
            optimizer.zero_grad()
            loop.note(optimizer.step_was_skipped, scaler, schedule)
        return loop.result(optimizer, scaler)  # before close(): state_dict is a fence


def differing(mine: Result, theirs: Result) -> list[str]:
    """The names of the results in which two runs differ, bit for bit."""
    found = [k for k in ("losses", "skipped", "scales", "rates") if mine[k] != theirs[k]]
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


def check(mine: Result, expected: Result, name: str) -> None:
    """On each rank: torch's numbers, one skip on both, and rows of its own."""
    assert differing(mine, expected) == [], name
    if mine["norms"]:
        assert mine["skipped"] == SKIPPED, name
        assert mine["scales"] in (SCALES, [1.0] * WINDOWS)
        assert mine["rates"][OVERFLOW] == mine["rates"][OVERFLOW - 1]
        assert bool(mine["weights"].isfinite().all())
        one, other = everywhere((mine["losses"], mine["weights"]))
        assert one[0] != other[0]
        assert torch.equal(one[1], other[1])
        assert max(mine["norms"][:OVERFLOW]) > CLIP  # it clipped


def compare(runs: dict[str, dict[str, Any]], wrap: Wrap, kind: str, **always: Any) -> None:
    """``sync`` and each of these runs with our optimizer equal torch's, and communicate as torch
    and as ``sync`` do.

    torch's own fused step on a CPU is no reference: there it is ``sync``'s.
    """
    watch, references = Watch(), dict[str, Result]()
    for name, settings in {"sync": {"step_mode": "sync"}, **runs}.items():
        own = {k: settings[k] for k in ("order", "hold_back") if k in settings}
        key = str(sorted(own))
        watch.take()
        if kind != "fused" and key not in references:
            references[key] = reference(wrap, kind, look=4, **own, **always)
        theirs = watch.take()[0]
        with lazy():
            mine = ours(wrap, kind, look=4, **settings, **always)
        names, elsewhere = watch.take()
        assert elsewhere == 0, name
        if name == "sync":
            synchronous = names
            if kind == "fused":
                references[key] = mine
            elif "_allgather_base_" not in names:
                assert names == theirs  # not one more either, in the same order
        elif not own:
            assert names == synchronous, name
        check(mine, references[key], name)
    assert "allreduce_" in synchronous or "_reduce_scatter_base_" in synchronous
