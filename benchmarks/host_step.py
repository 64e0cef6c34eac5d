"""The optimizer's job where its state is in host memory, or has float32 masters, on a CPU.

    python benchmarks/host_step.py            # about five minutes on two cores, 8 GB of memory
    python benchmarks/host_step.py --threads 2

Each row is ``AsyncOptimizer.step()`` over one list of parameters, a use of each parameter as a
forward makes it, and the wait for the job: torch's fused AdamW, gradients of the parameters' dtype;
``delayed`` with its preview. The unit is torch's fused AdamW alone, over float32 tensors of the
same sizes, in turn with it; the ratio is of medians. "handed over" is what ``step()`` blocks the
training thread for, in milliseconds. Against DeepSpeed's: ``benchmarks/host_adam.py``.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time

import torch
from boundary import CASES

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


STEPS = 3
"""In a turn, one after the other."""


class Job:
    """One optimizer over parameters of its own."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, **settings: str) -> None:
        self.params = [torch.nn.Parameter((torch.randn(s) * 0.02).to(dtype)) for s in shapes]
        self.template = [torch.randn_like(p) * 1e-3 for p in self.params]
        plain = torch.optim.AdamW(self.params, lr=1e-4, fused=True)
        self.optimizer: torch.optim.Optimizer = plain
        if settings:
            threads = torch.get_num_threads()
            self.optimizer = AsyncOptimizer(plain, optimizer_threads=threads, **settings)

    def run(self) -> tuple[float, float]:
        """Seconds a step that ``step()`` blocks for, and that the job takes."""
        grads = [[grad.clone() for grad in self.template] for _ in range(STEPS)]
        handed, begin = 0.0, time.perf_counter()
        for mine in grads:
            for p, grad in zip(self.params, mine, strict=True):
                p.grad = grad
            start = time.perf_counter()
            self.optimizer.step()
            handed += time.perf_counter() - start
            for p in self.params:
                p.detach()  # a forward uses it, which waits for what it is to see
            stepper_of(self.optimizer).wait()
        took = time.perf_counter() - begin
        return handed / STEPS, took / STEPS

    def close(self) -> None:
        if isinstance(self.optimizer, AsyncOptimizer):
            self.optimizer.close()


def measure(shapes: list[tuple[int, ...]], dtype: torch.dtype, job: str, repeats: int) -> str:
    """One row: a job and, in turn with it, the unit."""
    torch.manual_seed(0)
    unit, ours = Job(shapes, torch.float32), Job(shapes, dtype, **JOBS[job])
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
    parser.add_argument("--repeats", type=int, default=7, help="timed turns (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="of torch's kernels (default: 1)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}")
    names = ("parameters", "dtype", "job", "ms", "alone", "ratio", "handed over")
    print("{:<14}{:<10}{:<20}{:>8}{:>8}{:>8}{:>13}".format(*names))
    for case in [args.case] if args.case else CASES:
        for name in [args.dtype] if args.dtype else DTYPES:
            for job in JOBS:
                row = measure(CASES[case], DTYPES[name], job, args.repeats)
                print(f"{case:<14}{name:<10}{job:<20}{row}", flush=True)


if __name__ == "__main__":
    main()
