"""``accel-scaler test``: arguments, the table and the exit status."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..config import COUNTS, amount_of
from ..console import say
from ..errors import ConfigError, shown

if TYPE_CHECKING:
    from .rows import Result

OTHERS = ("ACCELERATE_", "ACCEL_SCALER_")
"""Beginnings of variables that would change a row."""
MOST_PARAMETERS = 10**13
USE_CPU, DEVICE = "ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``accel-scaler test`` to a parser."""
    parser.description = (
        "Train a few steps on this device, attached and in plain torch, and compare them bit for "
        "bit. It takes less than a minute, and needs no network. The exit status is 1 if a row "
        "fails. Several ranks: accel-scaler launch --multi_gpu --num_processes 2 -m accel_scaler "
        "test."
    )
    device = "such as cpu, cuda:1 or mps (default: the one that Accelerate takes)"
    parser.add_argument("--device", metavar="NAME", help=device)
    size = (
        "only say what offload saves and costs for a model of this size, such as 350M or 1.5B: GB "
        "on the device and in host memory, how long a step moves state by the bus as measured, "
        "and from how many tokens on that is hidden"
    )
    parser.add_argument("--parameters", metavar="SIZE", help=size)


def run(args: argparse.Namespace) -> int:
    """Run the rows; returns 0, or 1 if a row failed. Raises ``ConfigError`` for a device, and a
    number of parameters, that is none."""
    parameters = None if args.parameters is None else _parameters(args.parameters)
    with _environment(args.device):
        from .rows import LINE, ROWS, SIZING, device, in_turn

        first = device()
        found: list[Result] = []
        for row in in_turn(first, ROWS if parameters is None else SIZING):
            for line in [*[LINE("row", "status", "result")] * (not found), *row.lines()]:
                say(line)
            found.append(row)
    if found:  # rank 0 has them
        _end(found, parameters)
    return int(any(row.status == "failed" for row in found))


def _parameters(text: str) -> int:
    """``"1.5B"`` as a number."""
    found = amount_of(text.upper(), COUNTS)
    if found is None or not 1 <= found <= MOST_PARAMETERS:
        raise ConfigError(
            f"--parameters: got {shown(text)}, expected how many parameters are trained, from 1 to "
            "10T, such as 350M, 1.5B or 1500000000."
        )
    return found


def _end(found: list[Result], parameters: int | None) -> None:
    """Print the totals, and the answer for so many parameters."""
    from .sizes import told

    statuses = [row.status for row in found]
    counts = {name: statuses.count(name) for name in ("ok", "not run", "failed")}
    say("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if parameters is not None:
        measured = {name: value for row in found for name, value in row.numbers.items()}
        for line in ("", *told(parameters, measured)):
            say(line)


@contextmanager
def _environment(device: str | None) -> Iterator[None]:
    """In the block Accelerate is told the device alone, and nobody warns."""
    from accelerate.utils import clear_environment

    own = () if device else (USE_CPU, DEVICE)
    kept = {k: v for k, v in os.environ.items() if k in own or not k.startswith(OTHERS)}
    if device:
        kept |= {USE_CPU: "true"} if device == "cpu" else {DEVICE: device}
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with clear_environment(), warnings.catch_warnings():
            os.environ.update(kept)
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
