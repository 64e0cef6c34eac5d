"""Start a script of this folder on two gloo ranks and read what each rank saved."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from places import HELPERS

RANKS = 2


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(command: list[str], script: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``python -m <command> <script> <folder>``; returns each rank's results."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-m", *command, str(HELPERS / script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def accelerate_launch(script: str, folder: Path) -> list[dict[str, Any]]:
    """Without ``ACCELERATE_USE_CPU`` this would start two lone processes, silently."""
    command = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)]
    return run([*command, "--main_process_port", str(free_port())], script, folder)


def torchrun(script: str, folder: Path) -> list[dict[str, Any]]:
    command = ["torch.distributed.run", "--nproc_per_node", str(RANKS)]
    return run([*command, "--master_port", str(free_port())], script, folder)
