"""Does a boundary stay as fast, and the process as small, however much there is of everything?

    python benchmarks/load.py                  # about a quarter of an hour on two cores, 2 GB
    python benchmarks/load.py --case tensors   # only one of tensors, long

`tensors`: 1,000 to 10,000 parameters of 100 elements, and the time that each of them takes. Every
variant runs in turn in one process over gradients filled in from outside; the peer is torch's own
GradScaler. A boundary is check, clip, AdamW step, scale update, and in ``overlap`` the wait for the
update as well; every tenth overflows, in half of the tensors.

`long`: 100,000 windows of a small model, forward and backward and all; in 50 the scale grows once
and one is skipped. The table has ten slices of the run: time per window (median), and the
memory of the process at the slice's end. Every tenth window a stock one runs beside it: where the
machine is shared, "last/first" to stock's shows the effect of the code without the neighbours.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from accel_scaler import GradScaler, ScalerConfig, attach, detach

SCALE = 2.0**16
ELEMENTS = 100
SLICES = 10
SIZES = (1_000, 2_000, 5_000, 10_000)
VARIANTS = ("stock", "plain", "sync", "sync+file", "overlap", "overlap+file")
"""``stock`` and ``plain`` are loops over torch's and our GradScaler; the rest are attached."""


@dataclass(frozen=True)
class Load:
    """The parameters of one optimizer, by their number."""

    tensors: int


def fresh_accelerator(config: ScalerConfig) -> Any:
    """An attached accelerator that shares no state with the one before."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    return attach(Accelerator(cpu=True, mixed_precision="fp16"), config)


def config_of(variant: str, folder: Path, **settings: Any) -> ScalerConfig:
    """Settings of an attached variant, ``mode`` or ``mode+file``."""
    mode, _, file = variant.partition("+")
    path = str(folder / f"{variant}.jsonl") if file else None
    return ScalerConfig(init_scale=SCALE, step_mode=mode, telemetry=path, **settings)


class Bench:
    """One load, and the boundary of each variant over parameters of its own."""

    def __init__(self, load: Load, variants: Sequence[str], folder: Path) -> None:
        self.params: dict[str, list[torch.nn.Parameter]] = {}
        self.boundaries: dict[str, Callable[[], None]] = {}
        self.template = [torch.randn(ELEMENTS) * 1e-3 * SCALE for _ in range(load.tensors)]
        for variant in variants:
            params = [torch.nn.Parameter(torch.randn_like(t) * 0.02) for t in self.template]
            self.params[variant] = params
            make = self._loop if variant in ("stock", "plain") else self._attached
            adamw = torch.optim.AdamW(params, lr=1e-4, fused=True)
            self.boundaries[variant] = make(variant, adamw, folder)

    def _loop(self, variant: str, optimizer: torch.optim.Optimizer, _: Path) -> Callable[[], None]:
        params = self.params[variant]
        cls = torch.amp.GradScaler if variant == "stock" else GradScaler
        scaler = cls("cpu", init_scale=SCALE)

        def boundary() -> None:
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler._scale.fill_(SCALE)  # type: ignore[union-attr]

        return boundary

    def _attached(
        self, variant: str, optimizer: torch.optim.Optimizer, folder: Path
    ) -> Callable[[], None]:
        params = self.params[variant]
        accelerator = fresh_accelerator(config_of(variant, folder))
        _, prepared = accelerator.prepare(torch.nn.ParameterList(params), optimizer)
        scaler = accelerator.scaler

        def boundary() -> None:
            scaler.scale(torch.ones(()))
            accelerator.clip_grad_norm_(params, 1.0)
            prepared.step()
            prepared.synchronize()
            scaler._scale.fill_(SCALE)

        return boundary

    def fill(self, variant: str, overflow: bool) -> None:
        """Scaled gradients as a backward leaves them."""
        params = self.params[variant]
        for p in params:  # new ones: the old ones are dropped, as zero_grad() does
            p.grad = torch.empty_like(p)
        torch._foreach_copy_([p.grad for p in params], self.template)
        if overflow:
            for p in params[: len(params) // 2]:
                p.grad.fill_(float("nan"))

    def run(self, turns: int) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds of each variant's steps, and of its skips; who goes first changes."""
        times: dict[str, tuple[list[float], list[float]]] = {n: ([], []) for n in self.boundaries}
        names = list(self.boundaries)
        for turn in range(-3, turns):
            overflow = turn >= 0 and turn % 10 == 9
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                self.fill(name, overflow)
                start = time.perf_counter()
                self.boundaries[name]()
                if turn >= 0:
                    times[name][overflow].append(time.perf_counter() - start)
        return times


def measure(load: Load, turns: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each variant's steps, and of its skips."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        times = Bench(load, VARIANTS, Path(folder)).run(turns)
        gc.collect()  # closes files and ends threads before the folder goes
    return {
        name: (statistics.median(steps), statistics.median(skips))
        for name, (steps, skips) in times.items()
    }


def print_sizes(turns: int) -> None:
    """Microseconds a tensor, step and skip, as the number of tensors grows."""
    found = {size: measure(Load(size), turns) for size in SIZES}
    for place, what in enumerate(("step", "skip")):
        print(f"\ntensors: microseconds a tensor, {what}")
        heads = "".join(f"{size:>9,}" for size in SIZES)
        print(f"{'':<14}{heads}{'most/least':>12}{'to stock':>10}")
        for variant in VARIANTS:
            each = [found[size][variant][place] / size * 1e6 for size in SIZES]
            peer = found[SIZES[-1]]["stock"][place] / SIZES[-1] * 1e6
            row = "".join(f"{value:>9.2f}" for value in each)
            print(
                f"{variant:<14}{row}{max(each) / min(each):>12.2f}{each[-1] / peer:>10.2f}",
                flush=True,
            )


def long_run(variant: str, folder: Path) -> tuple[Callable[[int], None], Callable[[], object]]:
    """One window of a small model, forward to ``zero_grad``, whose argument is its number.

    And a function that ends the run: the optimizer thread, the file.
    """
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model: Any = inner
    optimizer: Any = torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=True)
    x, bad = torch.randn(4, 8), torch.full((4, 8), float("inf"))
    if variant in ("stock", "plain"):
        cls = torch.amp.GradScaler if variant == "stock" else GradScaler
        scaler = cls("cpu", init_scale=SCALE, growth_interval=30)

        def window(number: int) -> None:
            scaler.scale(model(bad if number % 50 == 49 else x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return window, lambda: None
    accelerator = fresh_accelerator(config_of(variant, folder, growth_interval=30))
    model, optimizer = accelerator.prepare(inner, optimizer)

    def attached_window(number: int) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(bad if number % 50 == 49 else x).square().mean())
            accelerator.clip_grad_norm_(inner.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return attached_window, lambda: detach(accelerator)


def print_long(variants: Sequence[str], windows: int) -> None:
    """Time per window and memory in ten slices of a long run."""
    process, size = psutil.Process(), windows // SLICES
    print(
        f"\nlong: {windows:,} windows, microseconds a window (median) and MB by tenths of the run"
    )
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            (window, close), (peer, _) = (long_run(v, Path(folder)) for v in (variant, "stock"))
            medians, peers, memory = [], [], []
            for each in range(SLICES):
                own: list[float] = []
                stock: list[float] = []
                for number in range(each * size, (each + 1) * size):
                    for run, times in ((window, own), (peer, stock)):
                        if run is window or number % 10 == 0:
                            start = time.perf_counter()
                            run(number)
                            times.append(time.perf_counter() - start)
                medians.append(statistics.median(own))
                peers.append(statistics.median(stock))
                memory.append(process.memory_info().rss / 1e6)
            close()
            del window, peer, run, close
            gc.collect()
        us = "".join(f"{value * 1e6:>7.0f}" for value in medians)
        mb = "".join(f"{value:>7.1f}" for value in memory)
        flat, drift = medians[-1] / medians[0], peers[-1] / peers[0]
        print(f"{variant:<14}us{us}   last/first {flat:.2f}, to stock's {flat / drift:.2f}")
        print(f"{'':<14}MB{mb}   last-second {memory[-1] - memory[1]:+.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cases = ("tensors", "long")
    parser.add_argument("--case", choices=cases, help="only this one")
    parser.add_argument("--turns", type=int, default=50, help="boundaries a variant (default 50)")
    parser.add_argument("--windows", type=int, default=100_000, help="of `long` (default 100,000)")
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in `long`")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    wanted = [args.case] if args.case else cases
    if "tensors" in wanted:
        print_sizes(max(20, args.turns))
    if "long" in wanted:
        print_long([args.variant] if args.variant else VARIANTS, args.windows)


if __name__ == "__main__":
    main()
