"""What ``offload="cpu"`` saves and moves for a model of a given size, by arithmetic.

Counted are weights, gradients, AdamW's two tensors of state and the float32 copies of 16-bit
weights; not activations, nor the 16-bit copies that autocast makes of float32 weights.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..optimizer_step import ring_bytes

WIDTH = 100
"""Columns of what the command prints."""
WEIGHTS = {"float32": 4, "16-bit": 2}
"""Bytes of a weight, and of its gradient."""


class Machine(NamedTuple):
    """What a machine is assumed to do: GB/s of copies each way, TFLOP/s of a training."""

    gbps: float
    tflops: float


MACHINES = {"T4": Machine(12, 25), "RTX 4090": Machine(25, 80), "H200": Machine(50, 400)}
COUNTED = (
    "GB are those of one process: weights, gradients and optimizer state. Activations come on top. "
    "Stock updates bfloat16 weights in place; offload updates float32 copies of 16-bit weights, "
    "which rest in host memory, too. All of that host memory moves up and down at each step."
)
ASSUMED = (
    "No bus was measured. Of these machines are assumed, with both ways at once: "
    + "; ".join(
        f"{name}, {gbps} GB/s each way and {tflops} TFLOP/s"
        for name, (gbps, tflops) in MACHINES.items()
    )
)
SECONDS = (
    "A step takes longer by the seconds of both ways at once where nothing is hidden "
    "(offload_budget=0), and by less where something is."
)
TOKENS = (
    "From so many tokens a micro-batch on, the last backward and the next forward take as long as "
    "the copies; at twice the TFLOP/s twice as many are needed. They hide all of them if "
    "activations take as much memory as the state: see docs/offload.md."
)


class Memory(NamedTuple):
    """Bytes."""

    stock: int
    """On the device without offload; bfloat16 weights are updated in place."""
    copied: int
    offload: int
    slots: int
    """Of the ring through which state passes in the step, when activations are gone."""
    host: int
    """So much moves up and down at each step."""


TITLES = (
    "GB on the device, stock",
    "GB on the device, stock with float32 copies",
    "GB on the device, offload",
    "GB more within the step, offload",
    "GB of pinned host memory, offload",
)
"""Of its fields."""


def moved(weights: str) -> int:
    """Bytes a parameter that offload moves each way: AdamW's state, and the float32 copy."""
    return 8 if weights == "float32" else 12


def memory(parameters: int, weights: str) -> Memory:
    """The memory of so many parameters with these ``WEIGHTS``."""
    size, rest = WEIGHTS[weights], moved(weights)
    held = parameters * 2 * size  # weights and gradients
    host = parameters * rest
    stock = held + parameters * 2 * size  # state has the dtype of what is updated
    return Memory(stock, held + host, held, ring_bytes(parameters, rest // 4), host)


def tokens(weights: str, tflops: float, up: float, down: float) -> int:
    """From how many tokens a micro-batch on copies are hidden, where memory allows it; hundreds,
    rounded up. ``up`` and ``down`` are GB/s.

    For each parameter and token a forward takes 2 operations and a backward 4. The last backward
    of a step hides the copies up, the next forward the copies down.
    """
    exact = moved(weights) * tflops * 1e3 * max(1 / (4 * up), 1 / (2 * down))
    return 100 * max(math.ceil(round(exact) / 100), 1)


def table(parameters: int, measured: Mapping[str, float]) -> dict[str, list[float]]:
    """The answer: each line's numbers, in the order of ``WEIGHTS``.

    ``measured``: GB/s ``up``, ``down`` and in ``both`` ways together; empty where no bus was
    measured: then the lines are those of ``MACHINES``.
    """
    each = [memory(parameters, weights) for weights in WEIGHTS]
    lines = {title: [sizes[at] / 1e9 for sizes in each] for at, title in enumerate(TITLES)}
    ways = {f"each way, {name}": machine.gbps for name, machine in MACHINES.items()}
    computing = {f", {name}": (m.tflops, m.gbps, m.gbps) for name, m in MACHINES.items()}
    if measured:
        up, down = measured["up"], measured["down"]
        ways = {"up": up, "down": down, "both ways at once": measured["both"] / 2}
        computing = {" at 100 TFLOP/s": (100.0, up, down)}
    for way, gbps in ways.items():
        lines[f"seconds {way}"] = [sizes.host / 1e9 / gbps for sizes in each]
    for where, speeds in computing.items():
        lines[f"tokens that hide it{where}"] = [tokens(weights, *speeds) for weights in WEIGHTS]
    return lines


def rounded(value: float) -> str:
    """At most three significant digits of a number below 1,000."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def told(parameters: int, measured: Mapping[str, float]) -> Iterator[str]:
    """:func:`table` as lines of text, with what it counts."""
    row = "{:<46}{:>18}{:>18}".format
    yield f"{parameters:,} parameters, trained with AdamW"
    yield row("", *(f"{weights} weights" for weights in WEIGHTS))
    for title, numbers in table(parameters, measured).items():
        yield row(title, *map(rounded, numbers))
    yield ""
    for note in (COUNTED, ASSUMED * (not measured), SECONDS, TOKENS):
        yield from textwrap.wrap(note, WIDTH)
