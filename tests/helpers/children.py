"""Children of the test process that are killed, interrupted or limited; each wait for one ends."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120
"""A child that takes longer is ended by SIGALRM: its status is then -14."""


def seeded(name: str) -> random.Random:
    """Moments are drawn from this: others with another ``FAULT_SEED``."""
    return random.Random(f"{os.environ.get('FAULT_SEED', '1')} {name}")


def many(default: int) -> int:
    """How many moments of each kind: ``FAULT_MOMENTS`` times as many as CI takes."""
    return default * int(os.environ.get("FAULT_MOMENTS", "1"))


def in_child(body: Callable[[], object], output: Path) -> int:
    """Run ``body`` in a fork of this process; its status, negative if a signal ended it.

    What it prints goes to the file ``output``.
    """
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(to, 1)
            os.dup2(to, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def die_in_files_above(size: int) -> None:
    """The process is killed (SIGXFSZ, -25) in the write that would make a file larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
