"""Two ranks under DDP: sparse gradients, and Accelerate's ``LocalSGD``, which averages ``p.data``.

Not a test: ``test_edges_ddp.py`` launches it and reads ``<folder>/rank<n>.pt``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradScalerKwargs
from support import stock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import SCALER, batch, copy, net, optimizer_of, slow_worker, weights

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, UnsupportedError, attach, detach

MODES = ("sync", "overlap", "delayed")
STEPS, EVERY = 7, 3
"""Windows of the local run, and how many there are between two averages."""


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(index)).square().sum()
        return out


def sparse(mode: str | None, buckets_are_gradients: bool) -> dict[str, Any]:
    """``mode`` None: torch. Two backwards a window, the first without communication."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Sparse(), gradient_as_bucket_view=buckets_are_gradients)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = torch.amp.GradScaler("cpu", **SCALER)
    optimizer: Any = inner
    if mode is not None:
        scaler = GradScaler("cpu", **SCALER)
        optimizer = AsyncOptimizer(inner, model, scaler=scaler, mode=mode)
    before, refused = weights(model.parameters()), ""
    with nullcontext() if mode is None else optimizer:
        for window in range(STEPS):
            for index in range(2):
                draw = torch.Generator().manual_seed(10 * window + index)
                rows = torch.randint(0, 10, (6,), generator=draw)[dist.get_rank() :: 2]
                with model.no_sync() if index == 0 else nullcontext():
                    scaler.scale(model(rows)).backward()
            try:
                scaler.step(optimizer) if mode is None else optimizer.step()
            except UnsupportedError as error:
                refused = str(error)
                break
            if mode is None:
                scaler.update()
            optimizer.zero_grad()
    after = weights(model.parameters())
    return {"refused": refused, "unchanged": torch.equal(before, after), "weights": after}


def local(mode: str | None, stale: bool = False) -> dict[str, Any]:
    """``by_feature/local_sgd.py``. ``mode`` None: stock, with the one-step delay by hand."""
    handlers = [GradScalerKwargs(**SCALER)]
    if mode is None:
        accelerator = stock(kwargs_handlers=handlers)
    else:
        plain = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
        accelerator = attach(plain, ScalerConfig(step_mode=mode, optimizer_threads=1))  # type: ignore[arg-type]
    layers = net()
    params = list(layers.parameters())
    held = params
    if mode is None:
        held = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
    model, optimizer = accelerator.prepare(layers, optimizer_of("sgd", held))
    losses, averaged = [], []
    with LocalSGD(accelerator, model=model, local_sgd_steps=EVERY, enabled=True) as local_sgd:
        for window in range(STEPS):
            x, y = batch(window, 0)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                losses.append(float(loss.detach()))
                accelerator.backward(loss)
                if mode is None:
                    for p, master in zip(params, held, strict=True):
                        p.grad, master.grad = None, p.grad
                before = [p.detach().clone() for p in held]
                optimizer.step()
                optimizer.zero_grad()
                is_due = (window + 1) % EVERY == 0
                if mode is None:
                    copy(before if stale and not is_due else held, params)
                local_sgd.step()
                if mode is None and is_due:
                    copy(params, held)
            if is_due:
                averaged.append(weights(params))
        if mode is None:
            copy(held, params)
    if mode is None:
        copy(params, held)
    else:
        detach(accelerator)
    return {"losses": losses, "averaged": torch.cat(averaged), "weights": weights(params)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.num_processes == 2, "launched as lone processes, not as two ranks"
    results: dict[str, Any] = {}
    for views in (False, True):
        results[f"sparse torch, {views}"] = sparse(None, views)
    results["local torch"], results["local stale torch"] = local(None), local(None, stale=True)
    with slow_worker(0.002):
        for mode in MODES:
            for views in (False, True):
                results[f"sparse {mode}, {views}"] = sparse(mode, views)
            results[f"local {mode}"] = local(mode)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
