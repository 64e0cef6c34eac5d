"""Children of the test process: killed, interrupted, limited, or ranks; each wait for one ends.

They are forks, so nothing is imported again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import reset

LIMIT_S = 120
"""A child that takes longer is ended by SIGALRM: its status is then -14."""
RANKS = 2


def seeded(name: str) -> random.Random:
    """Moments are drawn from this: others with another ``FAULT_SEED``."""
    return random.Random(f"{os.environ.get('FAULT_SEED', '1')} {name}")


def many(default: int) -> int:
    """How many moments of each kind: ``FAULT_MOMENTS`` times as many as CI takes."""
    return default * int(os.environ.get("FAULT_MOMENTS", "1"))


def fork(output: Path, limit_s: int = LIMIT_S) -> int:
    """The child's pid; 0 in the child, whose output goes to the file."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
    return pid


def start(body: Callable[[], object], output: Path, limit_s: int = LIMIT_S) -> int:
    """Run ``body`` in a child that then ends at once, with status 0 or, if it raised, 99."""
    pid = fork(output, limit_s)
    if pid == 0:
        status = 99
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def in_child(body: Callable[[], object], output: Path) -> int:
    """Its status, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start(body, output), 0)[1])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def become_rank(rank: int, port: int) -> None:
    """Set the variables by which a launcher makes this process a rank of gloo on a CPU."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
        **{"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"},
    }


def on_two_ranks(body: Callable[[], object], folder: Path, limit_s: int = LIMIT_S) -> None:
    """Run ``body`` on two gloo ranks; a failed assertion there fails the test here, and so does a
    rank that waits for ever."""
    port, outputs = free_port(), [folder / f"rank{rank}.txt" for rank in range(RANKS)]

    def ranked(rank: int) -> None:
        become_rank(rank, port)
        torch.set_num_threads(1)
        reset()
        dist.init_process_group("gloo")
        body()
        dist.barrier()

    pids = [
        start(lambda rank=rank: ranked(rank), outputs[rank], limit_s)  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0] * RANKS, "\n".join(output.read_text() for output in outputs)


def everywhere(value: Any) -> list[Any]:
    """Each rank's."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


class Moments:
    """Counts the calls, of Python and of C, that all threads make; kills the process at one."""

    def __init__(self, deadly: int | None = None) -> None:
        self.count, self.deadly = 0, deadly

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        self.count += 1
        if self.count == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> Moments:
        threading.setprofile(self._event)  # the optimizer thread, when it starts
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def killed(folder: Path, body: Callable[[], object]) -> None:
    """A child works in this folder, emptied before, and is killed there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    status = in_child(body, folder / "killed.txt")
    assert status == -signal.SIGKILL, (folder / "killed.txt").read_text()
