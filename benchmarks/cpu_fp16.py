"""float16 training on a CPU without float16 instructions: torch's products and ours beside fp32.

    python benchmarks/cpu_fp16.py           # about two minutes

Forward and backward, variants in turn in one process, which is a child of this one with
ONEDNN_MAX_CPU_ISA=AVX2, so that torch uses its kernels for a processor without float16
instructions, whatever this one has. Ratios are of medians, to fp32 in the same run; goal: ours at
most 3. torch's own is timed in few turns, as it is slow. OMP_WAIT_POLICY stays as you set it;
where other processes want the cores, `passive` matters more than anything here.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from accel_scaler.integrations.cpu_float16 import emulate_float16, has_float16_kernels

VARIANTS = ("fp32", "torch", "ours")
AS_IF = {"ONEDNN_MAX_CPU_ISA": "AVX2"}

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 384 to 1536, 256 tokens": (lambda: nn.Linear(384, 1536), (256, 384)),
    "linear 768 to 3072, 512 tokens": (lambda: nn.Linear(768, 3072), (512, 768)),
    "block of 384, 8 x 32 tokens": (lambda: block(384, 12), (8, 32, 384)),
    "block of 64, 4 x 16 tokens": (lambda: block(64, 4), (4, 16, 64)),
}


def block(width: int, heads: int) -> nn.Module:
    """A transformer's block."""
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)


def step(model: nn.Module, x: Tensor, variant: str) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad()
    products: Any = emulate_float16() if variant == "ours" else nullcontext()
    start = time.perf_counter()
    with products:
        with torch.autocast("cpu", dtype=torch.float16, enabled=variant != "fp32"):
            out = model(x)
        (out.float().sum() * 128).backward()
    return time.perf_counter() - start


def measure(case: str, repeats: int) -> dict[str, float]:
    """Median seconds of each variant; torch's own in every tenth turn."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(repeats + 1):
        for name in VARIANTS:
            if name == "torch" and turn % 10:
                continue
            seconds = step(model, x, name)
            if turn or name == "torch":
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def child(args: argparse.Namespace) -> None:
    """The table; in a process whose oneDNN has no float16 kernels."""
    if has_float16_kernels():
        raise SystemExit("cpu_fp16: ONEDNN_MAX_CPU_ISA=AVX2 did not reach oneDNN")
    policy = os.environ.get("OMP_WAIT_POLICY", "default")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"ONEDNN_MAX_CPU_ISA=AVX2, OMP_WAIT_POLICY {policy}")
    print(f"{'forward and backward':<34}{'fp32 ms':>9}{'torch':>8}{'ours':>8}")
    for case in CASES:
        median = measure(case, args.repeats)
        ratio = {name: median[name] / median["fp32"] for name in VARIANTS}
        print(
            f"{case:<34}{median['fp32'] * 1e3:>9.1f}{ratio['torch']:>8.1f}{ratio['ours']:>8.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed turns (default: 30)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
    else:
        again = [sys.executable, __file__, "--child", "--repeats", str(args.repeats)]
        raise SystemExit(subprocess.run(again, env=os.environ | AS_IF, check=False).returncode)


if __name__ == "__main__":
    main()
