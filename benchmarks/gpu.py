"""Tokens per second and peak GPU memory of a 1B GPT-2-like model, by how its optimizer steps.

    python benchmarks/gpu.py                  # a variant that does not fit is out of memory
    python benchmarks/gpu.py --largest        # how many parameters fit, for each variant
    python benchmarks/gpu.py --gpt2           # what the boundary costs, beside Accelerate's own
    python benchmarks/gpu.py --device cpu --layers 2 --width 32 --heads 2 --vocab 64 --length 16

Each variant runs in a process of its own, all of them once a round, in turn; ratios are of
medians over all rounds, to the first variant of the same precision. Peers are absent where they are
not installed: ``peers.py`` shows how each peer is set up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
from peers import VARIANTS, Job, Loop, Shape, Variant
from torch import Tensor

MARK = "RESULT "
GPT2: dict[str, Any] = {
    **{"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "batch": 8, "tied": 1},
    **{"accumulation": [1, 4], "windows": 20},
    "variants": ["accelerate", "sync", "accelerate bf16", "sync bf16"],
}
"""Defaults with ``--gpt2``."""
WARM_UP = 3
"""Windows before the first timed one: state is made, the order of use is learnt."""


@dataclass
class Result:
    """What one process measured of one variant at one accumulation."""

    variant: str
    accumulation: int
    seconds: list[float] = field(default_factory=list)
    """A window, averaged over each block."""
    peak: int = 0
    """Bytes of GPU memory."""
    parameters: int = 0
    threads: str = ""
    error: str = ""


@dataclass
class Row:
    """One line of the table; None where there is nothing to say."""

    name: str
    tokens: float | None = None
    to_peer: float | None = None
    peak: float | None = None
    remark: str = ""


# In the process of one variant.


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def timed(run: Callable[[], None], device: str, windows: int, blocks: int) -> list[float]:
    """Seconds a window, block by block."""
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(windows):
            run()
        wait_for(device)
        times.append((time.perf_counter() - start) / windows)
    return times


def measure(variant: Variant, job: Job, windows: int, blocks: int) -> Result:
    """One variant at one accumulation."""
    result = Result(variant.name, job.accumulation, parameters=job.shape.parameters)
    on_gpu = job.device != "cpu"
    module: Any = torch.get_device_module(job.device) if on_gpu else None
    loop: Loop | None = None
    window: Callable[[list[Tensor]], None] | None = None
    try:
        loop = variant.set_up(job)
        size = (job.shape.batch, job.shape.length)
        batches: list[Tensor] = [
            torch.randint(job.shape.vocab, size, device=job.device) for _ in range(job.accumulation)
        ]
        wait_for(job.device)
        if on_gpu:
            module.reset_peak_memory_stats()
        window = loop.window
        for _ in range(WARM_UP):
            window(batches)
        result.seconds = timed(lambda: window(batches), job.device, windows, blocks)
        if on_gpu:
            result.peak = module.max_memory_allocated()
        result.threads = loop.threads
    except Exception as error:
        result.error = "out of memory" if is_full(error) else short(error)
        traceback.print_exc()
    finally:
        if loop is not None:
            loop.finish()
        loop = window = None  # an Accelerator is in cycles; the next needs the memory
        gc.collect()
        if on_gpu:
            module.empty_cache()
    return result


def is_full(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower()
    )


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:100]


def work(args: argparse.Namespace) -> None:
    """The process of one variant: a line of JSON for each accumulation."""
    for accumulation in args.accumulation:
        job = Job(shape_of(args), args.device, accumulation)
        result = measure(VARIANTS[args.worker], job, args.windows, args.blocks)
        print(MARK + json.dumps(asdict(result)), flush=True)


# In the process that prints.


def start(args: argparse.Namespace, name: str, **changed: Any) -> list[Result]:
    """Run one variant in a process of its own."""
    options = {**vars(args), **changed, "worker": name}
    command = [sys.executable, os.path.abspath(__file__)]
    for key in ("worker", "device", "windows", "blocks", *Shape.__dataclass_fields__):
        command += [f"--{key}", str(options[key])]
    command += ["--accumulation", *map(str, options["accumulation"])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=args.timeout
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return filled(name, options["accumulation"], text, f"over {args.timeout:g} s")
    if args.verbose:
        sys.stderr.write(done.stderr)
    killed = f"ended with {done.returncode}: {last_line(done.stderr)}"
    # The kernel kills a process that takes too much of the host's memory.
    killed = "out of host memory" if done.returncode == -9 else killed
    return filled(name, options["accumulation"], done.stdout, killed)


def filled(name: str, accumulations: Iterable[int], output: str, error: str) -> list[Result]:
    """The results in ``output``; ``error`` for each that is missing."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    found = {r.accumulation: r for r in (Result(**json.loads(x[len(MARK) :])) for x in lines)}
    return [found.get(n) or Result(name, n, error=error) for n in accumulations]


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:80] if lines else "no message"


def rows_of(results: list[Result], names: Iterable[str], tokens: int) -> list[Row]:
    """The table of one accumulation; ``tokens`` of one window."""
    seconds, errors, peaks = {}, {}, {}
    for name in names:
        mine = [r for r in results if r.variant == name]
        seconds[name] = [t for r in mine for t in r.seconds]
        peaks[name] = max((r.peak for r in mine), default=0)
        errors[name] = next((r.error for r in mine if r.error), "")
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    rows = []
    for name in seconds:
        variant = VARIANTS[name]
        if not variant.is_installed:
            rows.append(Row(name, remark=variant.version))
            continue
        row = Row(name, remark=errors[name] or variant.note)
        rows.append(row)
        if name not in medians or errors[name]:
            continue
        row.tokens = tokens / medians[name]
        row.peak = peaks[name] / 2**30 if peaks[name] else None
        peer = medians.get(variant.peer) or medians.get("accelerate")
        if peer is not None:
            row.to_peer = peer / medians[name]
    return rows


def show(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'variant':<17}{'tokens/s':>10}{'to peer':>10}{'peak GiB':>10}"]
    for row in rows:
        cells = [cell(row.tokens, 10, 0), cell(row.to_peer, 10, 2), cell(row.peak, 10, 2)]
        lines.append(f"{row.name:<17}{''.join(cells)}  {row.remark}".rstrip())
    return "\n".join(lines)


def cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width},.{digits}f}"


def compare(args: argparse.Namespace, installed: list[str]) -> list[Result]:
    """All variants, round by round."""
    results: list[Result] = []
    for number in range(args.rounds):
        for name in installed:
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            results += start(args, name)
    shape = shape_of(args)
    for accumulation in args.accumulation:
        mine = [r for r in results if r.accumulation == accumulation]
        tokens = accumulation * shape.batch * shape.length
        print(f"\n{accumulation} micro-batches of {shape.batch} x {shape.length} tokens a step")
        print(show(rows_of(mine, args.variants, tokens)), flush=True)
    return results


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, found by doubling and halving; 0: none."""
    good, bad = 0, limit + 1
    trial = 1
    while good + 1 < bad:
        trial = min(trial, bad - 1)
        if fits(trial):
            good = trial
            trial = good * 2 if bad > limit else (good + bad) // 2
        else:
            bad = trial
            trial = (good + bad) // 2
    return good


def find_largest(args: argparse.Namespace, installed: list[str]) -> None:
    """For each variant: the most layers of the given width that train."""
    print(f"\n{'variant':<17}{'parameters':>12}{'layers':>8}{'peak GiB':>10}")
    for name in args.variants:
        if name not in installed:
            print(f"{name:<17}{'-':>12}{'-':>8}{'-':>10}  {VARIANTS[name].version}")
            continue
        seen: dict[int, Result] = {}

        def fits(layers: int, name: str = name, seen: dict[int, Result] = seen) -> bool:
            seen[layers] = start(args, name, layers=layers, accumulation=[1], windows=1, blocks=1)[
                0
            ]
            return not seen[layers].error

        layers = largest(fits, args.most_layers)
        best = seen.get(layers, Result(name, 1))
        why = next((seen[n].error for n in sorted(seen) if n > layers), "the limit of the search")
        print(
            f"{name:<17}{best.parameters / 1e9:>11.2f}B{layers:>8}"
            f"{cell(best.peak / 2**30 if best.peak else None, 10, 2)}  then: {why}",
            flush=True,
        )


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    parser.add_argument("--device", default="cuda", help="cuda (default), cpu for a dry run")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=3, help="timed blocks a round (3)")
    parser.add_argument("--windows", type=int, default=3, help="steps a block (3)")
    parser.add_argument("--layers", type=int, default=32, help="32 and 1536 wide: 1.06B parameters")
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tied", type=int, default=0, choices=(0, 1), help="first and last layer")
    parser.add_argument(
        "--gpt2",
        action="store_true",
        help="the 124M of GPT-2 with 1 and 4 micro-batches of 8, in fp16 and bf16",
    )
    parser.add_argument("--threads", type=int, default=cores, help=f"of each process ({cores})")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a process (1800)")
    parser.add_argument("--largest", action="store_true", help="search the largest model that fits")
    parser.add_argument("--most-layers", type=int, default=1024, help="end of that search")
    parser.add_argument("--json", help="write every single measurement to this file")
    parser.add_argument(
        "--verbose", action="store_true", help="show the error output of the processes"
    )
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    if parser.parse_known_args(argv)[0].gpt2:
        parser.set_defaults(**GPT2)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    if args.device != "cpu" and not torch.get_device_module(args.device).is_available():
        sys.exit(f"no {args.device} device here; --device cpu for a dry run with a small model")
    name = (
        "no GPU" if args.device == "cpu" else torch.get_device_module(args.device).get_device_name()
    )
    print(
        f"{name}, {platform.machine()}, {args.threads} threads, python {platform.python_version()}"
    )
    print(f"{shape_of(args).parameters / 1e6:,.1f}M parameters")
    for version in dict.fromkeys(VARIANTS[name].version for name in args.variants):
        print(f"  {version}")
    installed = [name for name in args.variants if VARIANTS[name].is_installed]
    if args.largest:
        find_largest(args, installed)
        return
    results = compare(args, installed)
    threads = {r.variant: r.threads for r in results if r.threads}
    print("\nthreads: " + "; ".join(f"{name} {n}" for name, n in threads.items()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(r) for r in results], file)


if __name__ == "__main__":
    main()
