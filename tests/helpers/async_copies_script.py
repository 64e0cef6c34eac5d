"""Two ranks whose optimizer communicates in its step, and FSDP1.

Not a test: ``test_async_copies.py`` launches it and reads ``<folder>/rank<n>.pt``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from two_ranks import slow_worker

from accel_scaler import AsyncOptimizer, ScalerConfig, attach, detach

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "overlap": {"mode": "overlap"},
    "overlap offload": {"mode": "overlap", "offload": "cpu"},
    "sync offload": {"mode": "sync", "offload": "cpu"},
    "delayed": {"mode": "delayed"},
}


class Dealt(torch.optim.Optimizer):
    """As Muon is written for several ranks: each updates some parameters, then all have all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                update = torch.zeros_like(p)
                if number % dist.get_world_size() == dist.get_rank():
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    update += momentum.mul_(0.5).add_(p.grad).tanh()
                dist.all_reduce(update)
                p.sub_(update, alpha=group["lr"])


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss: Tensor = model(torch.randn(4, 6, generator=generator)).square().mean()
    return loss


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain(delayed: bool) -> list[Tensor]:
    """In torch; ``delayed``: the model has the masters of the step before."""
    model = DistributedDataParallel(net())
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    params = list(model.parameters())
    optimizer = Dealt(masters if delayed else params)
    for step in range(STEPS):
        loss_of(model, step).backward()
        for p, master in zip(params, masters, strict=True):
            if delayed:
                p.data.copy_(master)
                master.grad, p.grad = p.grad, None
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in (masters if delayed else params)]


def ours(**kwargs: Any) -> list[Tensor]:
    model = DistributedDataParallel(net())
    inner = Dealt(model.parameters())
    with slow_worker(), AsyncOptimizer(inner, model, **kwargs) as optimizer:
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def flattened(original: bool) -> dict[str, Any]:
    """What FSDP1's parameters are refused with, and how they train after that."""

    def wrapped() -> Any:
        return FullyShardedDataParallel(
            net(), use_orig_params=original, device_id=torch.device("cpu")
        )

    def train(model: Any, optimizer: Any) -> list[Tensor]:
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    model = wrapped()
    expected = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = wrapped()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(vars(inner))
    said = {
        name: refusal(lambda kwargs=kwargs: AsyncOptimizer(inner, model, **kwargs))  # type: ignore[misc]
        for name, kwargs in CASES.items()
    }
    accelerator: Any = attach(
        Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode="overlap")
    )
    said["attached"] = refusal(lambda: accelerator.prepare_optimizer(inner))
    left = [] if not accelerator._optimizers else ["the accelerator"]
    detach(accelerator)
    late: Any = Accelerator(cpu=True, mixed_precision="fp16")
    prepared = late.prepare_optimizer(inner)
    kept = type(late), type(prepared), late.scaler
    said["attached late"] = refusal(lambda: attach(late, ScalerConfig(step_mode="overlap")))
    left += [] if (type(late), type(prepared), late.scaler) == kept else ["the late accelerator"]
    inner.__dict__.pop("step", None)  # Accelerate leaves it there
    part = torch.nn.Sequential(torch.nn.Linear(3, 3), wrapped())
    parts = torch.optim.SGD(part.parameters(), lr=0.1)
    said["submodule"] = refusal(lambda: AsyncOptimizer(parts, part))
    plain = net()
    later = AsyncOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain)

    def wrap_later() -> None:
        model = FullyShardedDataParallel(plain, use_orig_params=True, device_id=torch.device("cpu"))
        loss_of(model, 0).backward()
        later.step()

    said["wrapped later"] = refusal(wrap_later)
    left += [] if vars(inner) == before else ["the optimizer"]
    same = all(map(torch.equal, train(model, inner), expected))
    return {"said": said, "left": left, "same": same}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    words = Words()
    logging.getLogger("accel_scaler").addHandler(words)
    results: dict[str, Any] = {}
    references = {delayed: plain(delayed) for delayed in (False, True)}
    for name, kwargs in CASES.items():
        words.said.clear()
        got = ours(**kwargs)
        expected = references[kwargs["mode"] == "delayed"]
        results[name] = {"same": all(map(torch.equal, got, expected)), "said": list(words.said)}
    results["moved"] = not torch.equal(references[False][0], references[True][0])
    for original in (False, True):
        results[f"fsdp1 {original}"] = flattened(original)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
