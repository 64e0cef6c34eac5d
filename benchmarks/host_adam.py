"""AdamW on the CPU, as an optimizer in host memory steps: torch's three ways and DeepSpeed's.

    pip install deepspeed ninja              # its kernel is compiled at the first use, by g++
    OMP_NUM_THREADS=1 python benchmarks/host_adam.py      # five minutes, 6 GB of memory

GPT-2's 124M float32 parameters, the same parameters and gradients for all, in turn in one process,
in another order each turn; the ratios are of medians. Without DeepSpeed its row is left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from importlib.metadata import version

import torch
from boundary import CASES
from torch.optim import AdamW, Optimizer


def optimizers(params: list[torch.nn.Parameter]) -> dict[str, Optimizer]:
    found: dict[str, Optimizer] = {
        "torch, fused": AdamW(params, lr=1e-4, fused=True),
        "torch, foreach": AdamW(params, lr=1e-4, foreach=True),
        "torch, one by one": AdamW(params, lr=1e-4, foreach=False),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return found
    name = f"deepspeed {version('deepspeed')}, DeepSpeedCPUAdam"
    return found | {name: DeepSpeedCPUAdam(params, lr=1e-4, weight_decay=1e-2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed turns (default: 25)")
    parser.add_argument("--case", choices=CASES, default=next(iter(CASES)))
    parser.add_argument("--cpu_time", action="store_true", help="where others use the cores, too")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in CASES[args.case]]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    each = optimizers(params)
    times: dict[str, list[float]] = {name: [] for name in each}
    order = random.Random(0)
    for turn in range(args.repeats + 2):
        for name in order.sample(list(each), len(each)):
            start = clock()
            each[name].step()
            if turn >= 2:
                times[name].append(clock() - start)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.case}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        ratio = median / medians["torch, fused"]
        print(f"{name:<40}{median * 1e3:>8.1f} ms{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
