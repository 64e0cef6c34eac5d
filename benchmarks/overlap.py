"""How much of the optimizer's time is hidden behind the training thread's own work.

    python benchmarks/overlap.py          # about three minutes on two cores, 5 GB of memory

One boundary of fused AdamW with clipping in ``step_mode="overlap"``, for two lists of parameters.
After ``step()`` the training thread works half as long again as the job takes: it sleeps, which
holds no lock, as a wait for data; or runs small eager operations; or runs Python.
Then it waits for the job. Interleaved in one run:

    O   the job (unscale, clip, update) while the training thread only waits for it
    F   the training thread's work alone
    T   both, from the end of ``step()`` until work and job are done

Hidden is (F + O - T) / O, turn by turn, since machines are noisy: the median and the quartiles.
The gain is (F + O) / T, its ceiling (F + O) / max(F, O), of medians. The check (one read of the
gradients) stays on the training thread. It is timed beside the job, and so is the time for which
``step()`` itself blocks the training thread ("handing over").
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from boundary import CASES, SCALE

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.optimizer_step import stepper_of

Work = Callable[[], None]


def operations() -> None:
    """Eager operations of a few microseconds each, as in a small model's forward."""
    x = torch.full((8, 8), 0.1)
    for _ in range(50):
        x = torch.tanh(x @ x + 0.1)


def python() -> None:
    """Bytecode that does not give the interpreter's lock away by itself."""
    total = 0
    for i in range(2000):
        total += i * i


def rounds_in(unit: Work, seconds: float) -> int:
    """How often to call ``unit`` for about ``seconds``, when nothing else runs."""
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() < start + max(seconds, 0.1):
        unit()
        rounds += 1
    return max(1, round(rounds * seconds / (time.perf_counter() - start)))


def repeated(unit: Work, repeats: int) -> Work:
    def run() -> None:
        for _ in range(repeats):
            unit()

    return run


class Bench:
    """One list of parameters and its boundary."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.template = [torch.randn_like(p) * 1e-3 * SCALE for p in self.params]
        self.accelerator: Any = attach(
            Accelerator(cpu=True, mixed_precision="fp16"),
            ScalerConfig(init_scale=SCALE, step_mode="overlap"),
        )
        inner = torch.optim.AdamW(self.params, lr=1e-4, fused=True)
        model = torch.nn.ParameterList(self.params)
        _, self.optimizer = self.accelerator.prepare(model, inner)

    def boundary(self, work: Work | None) -> dict[str, float]:
        """Seconds of each phase of one step, with ``work`` beside the job."""
        for p, value in zip(self.params, self.template, strict=True):
            p.grad = value.clone()
        self.accelerator.scaler.scale(torch.ones(()))
        times = [time.perf_counter()]
        self.accelerator.clip_grad_norm_(self.params, 1.0)
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        if work is not None:
            work()
        stepper: Any = stepper_of(self.optimizer)
        stepper.synchronize()  # as the next boundary does
        times.append(time.perf_counter())
        self.accelerator.scaler._scale.fill_(SCALE)
        check, handing, both = (b - a for a, b in pairwise(times))
        return {"check": check, "handing over": handing, "T": both}


@dataclass
class Row:
    """Turns of one kind of work: alone, beside the job, and the job alone in the same turn."""

    work: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    job: list[float] = field(default_factory=list)

    def hidden(self) -> list[float]:
        """The share of the job that is hidden, quartiles over the turns."""
        turns = zip(self.work, self.both, self.job, strict=True)
        return statistics.quantiles([(f + o - t) / o for f, t, o in turns], n=4)

    def gain(self) -> tuple[float, float]:
        """What running both at once saves, and the most it could."""
        f, t, o = map(statistics.median, (self.work, self.both, self.job))
        return (f + o) / t, (f + o) / max(f, o)


def measure(bench: Bench, repeats: int) -> tuple[dict[str, float], dict[str, Row]]:
    """Medians of the phases of a step that is only waited for, and a row for each kind of work."""
    for _ in range(4):  # the first steps make state
        bench.boundary(None)
    busy = 1.5 * statistics.median(bench.boundary(None)["T"] for _ in range(5))
    work: dict[str, Work] = {
        "sleeps": lambda: time.sleep(busy),
        "small eager operations": repeated(operations, rounds_in(operations, busy)),
        "runs Python": repeated(python, rounds_in(python, busy)),
    }
    phases, rows = [], {name: Row() for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            phases.append(bench.boundary(None))
            rows[name].job.append(phases[-1]["T"])
            start = time.perf_counter()
            run()
            rows[name].work.append(time.perf_counter() - start)
            rows[name].both.append(bench.boundary(run)["T"])
    return {key: statistics.median(p[key] for p in phases) for key in phases[0]}, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=21, help="timed turns, at least 2 (default: 21)"
    )
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for case in [args.case] if args.case else CASES:
        torch.manual_seed(0)
        bench = Bench(CASES[case])
        phases, rows = measure(bench, args.repeats)
        job = phases["T"]
        print(
            f"\n{case}: job {job * 1e3:.1f} ms, check {phases['check'] * 1e3:.1f} ms, "
            f"handing over {phases['handing over'] * 1e3:.2f} ms "
            f"({phases['handing over'] / job:.1%} of the job)"
        )
        print(
            f"{'the training thread':<24}{'F ms':>8}{'T ms':>8}{'hidden':>8}{'quartiles':>14}",
            end="",
        )
        print(f"{'gain':>7}{'of':>6}")
        for name, row in rows.items():
            low, hidden, high = row.hidden()
            gain, most = row.gain()
            print(
                f"{name:<24}{statistics.median(row.work) * 1e3:>8.1f}"
                f"{statistics.median(row.both) * 1e3:>8.1f}{hidden:>8.0%}"
                f"{f'{low:.0%} to {high:.0%}':>14}{gain:>7.2f}{most:>6.2f}",
                flush=True,
            )
        detach(bench.accelerator)


if __name__ == "__main__":
    main()
