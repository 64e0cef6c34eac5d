"""Random histories on a device whose numbers are the CPU's, beside plain torch on the CPU.

    python tests/gpu/random_settings.py [--runs N] [--minutes M] [--seed S] [--only N]

The device is a simulated one (``accelerators``); ``history_operations.py`` draws the histories.
Where its module has ``set_delay``, each run has other delays; where it has ``races``, a run fails
on accesses that nothing orders, whatever its numbers. Exit status 1 after a failure, with the seed
and the history.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import torch
from accelerators import DEVICE, MISSING, is_simulated, module
from histories import Call, as_test, quiet
from history_operations import draw, play
from history_reference import Setup

from accel_scaler.integrations import cpu_float16
from accel_scaler.optimizer_step import offloaded

BLOCKS = (16, 64, 4096)
"""Elements of a stretch of offloaded state: a piece of a parameter, some parameters, or all."""

DELAYS = [(0.0, 0, 0.0, 0), (0.1, 300, 0.1, 300), (0.0, 0, 0.5, 3000), (0.3, 1000, 0.0, 0)]
"""How probable and how long, in us: on the stream that trains, on side streams."""


def failure(
    setup: Setup, calls: Sequence[Call], delay: tuple[float, int, float, int], seen: Counter[str]
) -> str:
    """The fault that was found; "" where there is none."""
    backend: Any = module()
    if hasattr(backend, "set_delay"):
        backend.set_delay(*delay)
    if hasattr(backend, "clear_races"):
        backend.clear_races()
    found = []
    try:
        play(setup, calls, seen, DEVICE)
    except Exception as error:
        found.append("".join(traceback.format_exception(error)))
    gc.collect()
    torch.accelerator.synchronize(DEVICE)
    for what, count, where in getattr(backend, "races", list)():
        found.append(f"nothing orders: {count} x {what} ({where})")
    return "\n".join(found)


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--runs", type=int, default=500, help="at most; default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--only", type=int, default=None, help="this run alone")
    parser.add_argument("--without", default="", help="names of calls to be left out, by commas")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, too")
    arguments = parser.parse_args(argv)
    if MISSING or not is_simulated():
        parser.error(MISSING or f"{DEVICE}: its numbers are not the CPU's")
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    cpu_float16.has_float16_kernels = lambda: True  # the products of plain torch
    end, failed = time.monotonic() + 60 * arguments.minutes, 0
    seen: Counter[str] = Counter()
    numbers = iter([arguments.only]) if arguments.only is not None else iter(range(arguments.runs))
    for number in numbers:
        if time.monotonic() > end:
            break
        r = random.Random(f"{seed}/{number}")
        setup, calls = draw(r, on_device=True)
        offloaded.SMALLEST_BLOCK, offloaded.BLOCKS = r.choice(BLOCKS), 1 << 30
        calls = [call for call in calls if call[0] not in arguments.without.split(",")]
        with quiet():
            wrong = failure(setup, calls, r.choice(DELAYS), seen)
        seen["runs"] += 1
        if wrong:
            failed += 1
            say(f"FAILED, --seed {seed} --only {number}\n{as_test(setup, calls)}\n{wrong}")
            if not arguments.keep_going:
                break
    say(f"{seen['runs']} runs, {seen['step']} steps, seed {seed}: {failed} failed")
    return 1 if failed or not seen["runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
