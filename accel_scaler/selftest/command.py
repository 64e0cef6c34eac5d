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

from ..console import say
from ..errors import ConfigError
from ..version import __version__

if TYPE_CHECKING:
    from .rows import Result

OTHERS = ("ACCELERATE_", "ACCEL_SCALER_")
"""Beginnings of variables that would change a row."""
USE_CPU, DEVICE = "ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"
ROW = "{:<25}  {:<7}  {:<45} {:<45}  {}"


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
    parser.add_argument("--parameters", help=argparse.SUPPRESS)  # of an earlier release


def run(args: argparse.Namespace) -> int:
    """Run the rows; returns 0, or 1 if a row failed. Raises ``ConfigError`` for a file that cannot
    be written, and for ``--parameters``."""
    if args.parameters is not None:
        raise ConfigError("--parameters is retired: drop it, no time of a mode is estimated.")
    with _environment(args.device):
        from .rows import device, in_turn

        first = device(args.num_processes)
        if first.status == "ok" and args.num_processes > 1:
            return _launch(args, first.got.startswith("cpu"))
        found: list[Result] = []
        for row in in_turn(first) if first.status == "ok" else [first]:
            if not found:
                say(ROW.format("row", "status", "got", "expected", ""))
            found.append(row)
            say(ROW.format(row.row, row.status, row.got, row.expected, row.reason).rstrip())
    if found:  # rank 0 has them
        _end(found, args.json)
    return int(any(row.status == "failed" for row in found))


def _launch(args: argparse.Namespace, is_cpu: bool) -> int:
    """The same on several ranks; returns the exit status of the first rank that failed."""
    from ..launch.launcher import main as launch

    os.environ.pop(DEVICE, None)  # each rank takes a device of its own
    if is_cpu:
        os.environ[USE_CPU] = "true"
    flags = ["--no_attach", "--quiet", "--multi_gpu", "--num_processes", str(args.num_processes)]
    flags += ["--num_machines", "1", "--main_process_port", "0", "--module", "accel_scaler", "test"]
    flags += ["--json", args.json] * bool(args.json)
    with tempfile.TemporaryDirectory(prefix="accel_scaler_") as folder:  # torchrun would leave one
        config = Path(folder, "config.yaml")  # in place of the user's default config
        config.write_text("distributed_type: MULTI_GPU\n")
        return launch(["--log_dir", folder, "--config_file", str(config), *flags])


def _end(found: list[Result], path: str | None) -> None:
    """Print the totals and write the file."""
    statuses = [row.status for row in found]
    counts = {name: statuses.count(name) for name in ("ok", "not run", "failed")}
    say("\n" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if path is not None:
        content = {"accel_scaler": __version__, **counts, "rows": [asdict(row) for row in found]}
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
