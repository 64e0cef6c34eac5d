"""The optimizer's job where its state is in host memory, or has float32 masters, on a CPU.

    python benchmarks/host_step.py            # a quarter of an hour on two cores, 8 GB of memory
    python benchmarks/host_step.py --case "2000 x 1000" --dtype float16 --threads 1
    pip install deepspeed ninja               # its kernel is compiled at the first use, by g++

The unit is torch's fused AdamW alone, over float32 tensors of the same sizes, in turn with each
row; ratios are of medians. Rows with a mode are ``AsyncOptimizer.step()`` over one list of
parameters with gradients of their dtype, a use of each parameter as a forward makes it, and the
wait for the job; ``delayed`` with its preview. "handed over" is what ``step()`` blocks the training
thread for, in milliseconds. The other rows do that job by hand, tensor by tensor: gradients are
cast to float32 masters' and unscaled, AdamW steps, new values are cast back. Without DeepSpeed its
row is left out.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
from importlib.metadata import version
from importlib.util import find_spec

import torch
from boundary import CASES
from torch.optim import AdamW

from accel_scaler import AsyncOptimizer
from accel_scaler.optimizer_step import stepper_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
JOBS: dict[str, dict[str, str]] = {
    "sync, masters": {"mode": "sync", "master_weights": "fp32"},
    "sync, offload": {"mode": "sync", "offload": "cpu"},
    "overlap, masters": {"mode": "overlap", "master_weights": "fp32"},
    "overlap, offload": {"mode": "overlap", "offload": "cpu"},
    "delayed, masters": {"mode": "delayed", "delay_compensation": "preview"},
    "delayed, offload": {"mode": "delayed", "offload": "cpu", "delay_compensation": "preview"},
}
PEERS = ["torch, fused", "torch, foreach", "torch, one by one"]
PEERS += [f"DeepSpeedCPUAdam {version('deepspeed')}"] if find_spec("deepspeed") else []
STEPS = 3
"""In a turn, one after the other."""


class Job:
    """One optimizer over parameters of its own."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, name: str) -> None:
        self.params = [torch.nn.Parameter((torch.randn(s) * 0.02).to(dtype)) for s in shapes]
        self.template = [torch.randn_like(p) * 1e-3 for p in self.params]
        self.stepped = self.params
        if name in JOBS:
            plain, threads = AdamW(self.params, lr=1e-4, fused=True), torch.get_num_threads()
            self.optimizer: torch.optim.Optimizer = AsyncOptimizer(
                plain, optimizer_threads=threads, **JOBS[name]
            )
            return
        if dtype is not torch.float32:
            self.stepped = [torch.nn.Parameter(p.detach().float()) for p in self.params]
        if name.startswith("DeepSpeed"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            self.optimizer = DeepSpeedCPUAdam(self.stepped, lr=1e-4, weight_decay=1e-2)
            return
        how = {"torch, foreach": {"foreach": True}, "torch, one by one": {"foreach": False}}
        self.optimizer = AdamW(self.stepped, lr=1e-4, **how.get(name, {"fused": True}))

    def run(self) -> tuple[float, float]:
        """Seconds a step that ``step()`` blocks for, and that the job takes."""
        grads = [[grad.clone() for grad in self.template] for _ in range(STEPS)]
        handed, begin = 0.0, time.perf_counter()
        for mine in grads:
            for p, grad in zip(self.params, mine, strict=True):
                p.grad = grad
            start = time.perf_counter()
            if isinstance(self.optimizer, AsyncOptimizer):
                self.optimizer.step()
            else:
                self.step_by_hand()
            handed += time.perf_counter() - start
            for p in self.params:
                p.detach()  # a forward uses it, which waits for what it is to see
            if isinstance(self.optimizer, AsyncOptimizer):
                stepper_of(self.optimizer).wait()
        took = time.perf_counter() - begin
        return handed / STEPS, took / STEPS

    @torch.no_grad()
    def step_by_hand(self) -> None:
        has_masters = self.stepped is not self.params
        for p, master in zip(self.params, self.stepped, strict=True) if has_masters else ():
            assert p.grad is not None
            master.grad = p.grad.float().mul_(2.0**-10)
        self.optimizer.step()
        for p, master in zip(self.params, self.stepped, strict=True) if has_masters else ():
            p.copy_(master)

    def close(self) -> None:
        if isinstance(self.optimizer, AsyncOptimizer):
            self.optimizer.close()


def measure(shapes: list[tuple[int, ...]], dtype: torch.dtype, name: str, repeats: int) -> str:
    """One row: a job and, in turn with it, the unit."""
    torch.manual_seed(0)
    unit, ours = Job(shapes, torch.float32, "torch, fused"), Job(shapes, dtype, name)
    units: list[float] = []
    times: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        _, alone = unit.run()
        found = ours.run()
        if turn >= 1:
            units.append(alone)
            times.append(found)
    ours.close()
    handed, took = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    alone = statistics.median(units) * 1e3
    return f"{took:>8.1f}{alone:>8.1f}{took / alone:>8.2f}{handed:>13.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed turns (default: 5)")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="of kernels (default: 1, 2)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype")
    args = parser.parse_args()
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {platform.machine()}")
    names = ("parameters", "dtype", "job", "threads", "ms", "alone", "ratio", "handed over")
    print("{:<14}{:<10}{:<24}{:>8}{:>8}{:>8}{:>8}{:>13}".format(*names))
    for threads in [args.threads] if args.threads else (1, 2):
        torch.set_num_threads(threads)
        for case in [args.case] if args.case else CASES:
            for dtype in [args.dtype] if args.dtype else DTYPES:
                for name in [*JOBS, *PEERS]:
                    row = measure(CASES[case], DTYPES[dtype], name, args.repeats)
                    print(f"{case:<14}{dtype:<10}{name:<24}{threads:>8}{row}", flush=True)


if __name__ == "__main__":
    main()
