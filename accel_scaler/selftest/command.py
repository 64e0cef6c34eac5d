"""``accel-scaler test``: arguments, ranks, the table, the file and the exit status."""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import COUNTS, amount_of
from ..console import say
from ..errors import ConfigError, shown
from ..version import __version__

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
        "fails."
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    device = "such as cpu, cuda:1 or mps (default: the one that Accelerate takes)"
    parser.add_argument("--device", metavar="NAME", help=device)
    ranks = "ranks on this machine, by Accelerate's launcher (default: 1)"
    parser.add_argument("--num_processes", metavar="N", type=int, default=1, help=ranks)
    size = (
        "only say what offload saves and costs for a model of this size, such as 350M or 1.5B: GB "
        "on the device and in host memory, how long a step moves state by the bus as measured, "
        "and from how many tokens on that is hidden"
    )
    parser.add_argument("--parameters", metavar="SIZE", help=size)


def run(args: argparse.Namespace) -> int:
    """Run the rows; returns 0, or 1 if a row failed. Raises ``ConfigError`` for a device, a number
    of processes or of parameters that is none, and for a file that cannot be written."""
    parameters = None if args.parameters is None else _parameters(args.parameters)
    with _environment(args.device):
        from .rows import LINE, ROWS, SIZING, device, in_turn

        first = device(args.num_processes)
        if args.num_processes > 1:
            say(f"starting {args.num_processes} processes ...")
            return _launch(args, first.got.startswith("cpu"))
        found: list[Result] = []
        for row in in_turn(first, ROWS if parameters is None else SIZING):
            for line in [*[LINE("row", "status", "result")] * (not found), *row.lines()]:
                say(line)
            found.append(row)
    if found:  # rank 0 has them
        _end(found, args.json, parameters)
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


def _launch(args: argparse.Namespace, is_cpu: bool) -> int:
    """The same on several ranks; returns the exit status of the first rank that failed."""
    from ..launch.launcher import main as launch

    os.environ.pop(DEVICE, None)  # each rank takes a device of its own
    if is_cpu:
        os.environ[USE_CPU] = "true"
    flags = ["--no_attach", "--quiet", "--multi_gpu", "--num_processes", str(args.num_processes)]
    flags += ["--num_machines", "1", "--main_process_port", "0", "--module", "accel_scaler", "test"]
    flags += ["--json", args.json] * bool(args.json)
    flags += ["--parameters", args.parameters] * bool(args.parameters)
    with tempfile.TemporaryDirectory(prefix="accel_scaler_") as folder:  # torchrun would leave one
        config = Path(folder, "config.yaml")  # in place of the user's default config
        config.write_text("distributed_type: MULTI_GPU\n")
        return launch(["--log_dir", folder, "--config_file", str(config), *flags])


def _end(found: list[Result], path: str | None, parameters: int | None) -> None:
    """Print the totals, and the answer for so many parameters, and write the file."""
    from .sizes import table, told

    statuses = [row.status for row in found]
    counts = {name: statuses.count(name) for name in ("ok", "not run", "failed")}
    say("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    content = {"accel_scaler": __version__, **counts, "rows": [asdict(row) for row in found]}
    if parameters is not None:
        measured = {name: value for row in found for name, value in row.numbers.items()}
        content |= {"parameters": parameters, "offload": table(parameters, measured)}
        for line in ("", *told(parameters, measured)):
            say(line)
    if path is not None:
        try:
            Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path!r}: cannot be written ({error.strerror}).") from error


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
