"""The cost of one window boundary: unscale, check, clip, AdamW step, scale update.

    python benchmarks/boundary.py            # about two minutes on two cores, 5 GB of memory

The peer is torch's own ``GradScaler`` with ``clip_grad_norm_`` and the fused AdamW. Both run
in turn in one process on the same parameters and gradients; the ratios are of medians. Ours is
called as a training loop calls it, through the attached accelerator. ``kernels`` are the calls of
torch that no boundary can do without: norms, one product, AdamW.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_scaler import ScalerConfig, attach

SCALE = 2.0**16


def gpt2_shapes(width: int = 768, layers: int = 12) -> list[tuple[int, ...]]:
    """The parameters of GPT-2 (124M with the defaults), in its order."""
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width)]
        shapes += [(width,)]
    return [*shapes, (width,), (width,)]


CASES = {"gpt2": gpt2_shapes(), "2000 x 1000": [(1000,)] * 2000}


class LargestAllocation(TorchDispatchMode):
    """The largest tensor that an operation returns in storage of its own, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.most = max(self.most, storage.nbytes())
        return result


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class Bench:
    """One list of parameters, and each variant's boundary over it."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.template = [torch.randn_like(p) * 1e-3 * SCALE for p in self.params]
        self.grads = [torch.empty_like(p) for p in self.params]
        self.open: dict[str, Callable[[], object]] = {}
        """What scales the loss: before there are gradients."""
        self.boundaries: dict[str, Callable[[], None]] = {"stock": self.stock()}
        self.boundaries["ours"] = self.ours()
        self.boundaries["kernels"] = self.kernels()

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.params, lr=1e-4, fused=True)

    def stock(self) -> Callable[[], None]:
        optimizer, scaler = self.adamw(), torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.open["stock"] = lambda: scaler.scale(torch.ones(()))

        def boundary() -> None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler._scale.fill_(SCALE)

        return boundary

    def ours(self) -> Callable[[], None]:
        config = ScalerConfig(init_scale=SCALE)
        accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        optimizer = accelerator.prepare(self.adamw())
        scaler = accelerator.scaler
        self.open["ours"] = lambda: scaler.scale(torch.ones(()))

        def boundary() -> None:
            accelerator.clip_grad_norm_(self.params, 1.0)
            optimizer.step()
            scaler._scale.fill_(SCALE)

        return boundary

    def kernels(self) -> Callable[[], None]:
        averages, squares = ([torch.zeros_like(p) for p in self.params] for _ in range(2))
        counts = torch.zeros(len(self.params))
        views = list(counts.unbind())
        settings = {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}
        self.open["kernels"] = lambda: None

        @torch.no_grad()
        def boundary() -> None:
            grads = [p.grad for p in self.params]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / SCALE
            if not math.isfinite(float(norm)):
                return
            torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0) / SCALE)
            counts.add_(1)
            lists = self.params, grads, averages, squares, [], views
            torch._fused_adamw_(*lists, **settings, amsgrad=False, maximize=False)

        return boundary

    def fill(self, overflow: str) -> None:
        """Scaled gradients as a backward leaves them, with an overflow in one place or more."""
        for p, grad, value in zip(self.params, self.grads, self.template, strict=True):
            p.grad = grad.copy_(value)
        if overflow == "one layer":
            # The backward goes on from the middle with inf: every earlier gradient has it.
            for p in self.params[: len(self.params) // 2]:
                p.grad.fill_(float("nan"))
        elif overflow == "one element":
            # The worst place for an early end: the last large gradient, and nothing else.
            large = max(range(len(self.params)), key=lambda i: (self.params[i].dim(), i))
            self.params[large].grad.view(-1)[-1] = float("inf")

    def run(self, overflow: str, repeats: int) -> dict[str, float]:
        """Median seconds of each variant, taken in turn."""
        times: dict[str, list[float]] = {name: [] for name in self.boundaries}
        for turn in range(repeats + 2):
            for name, boundary in self.boundaries.items():
                self.open[name]()
                self.fill(overflow)
                start = time.perf_counter()
                boundary()
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
                self.drop()
        return {name: statistics.median(values) for name, values in times.items()}

    def largest_allocation(self, name: str) -> int:
        self.open[name]()
        self.fill("")
        with LargestAllocation() as watch:
            self.boundaries[name]()
        self.drop()
        return watch.most

    def drop(self) -> None:
        """Between windows there are no gradients, as in a training."""
        for p in self.params:
            p.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed turns (default: 15)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    args = parser.parse_args()
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)  # of skips in a row, which are meant
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'parameters':<14}{'boundary':<22}{'stock ms':>10}{'ours':>8}{'kernels':>9}")
    for case in [args.case] if args.case else CASES:
        torch.manual_seed(0)
        bench = Bench(CASES[case])
        for overflow in ("", "one layer", "one element"):
            times = bench.run(overflow, args.repeats)
            label = f"skip, {overflow}" if overflow else "step"
            stock = times["stock"]
            ratios = f"{times['ours'] / stock:>8.2f}{times['kernels'] / stock:>9.2f}"
            print(f"{case:<14}{label:<22}{stock * 1e3:>10.1f}{ratios}", flush=True)
        sizes = {name: bench.largest_allocation(name) for name in ("stock", "ours")}
        print(f"{case:<14}largest allocation in bytes: {sizes}", flush=True)


if __name__ == "__main__":
    main()
