"""``accel-scaler report --live`` in a terminal of 60 columns: what it shows, and how it ends."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="it has no such terminals"),
]

COLUMNS = 60
LIMIT_S = 120
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""The cursor."""


class Terminal:
    """A process in a terminal of its own, and all that it has written."""

    def __init__(self, argv: list[str]) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 30, COLUMNS, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        self.process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.text = ""

    def read(self) -> bool:
        """What there is by now; False: nobody writes any more."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux: the other end is closed
            return False
        self.text += data.decode("utf-8", "replace")
        return bool(data)

    def until(self, words: str) -> None:
        end = time.monotonic() + LIMIT_S
        while words not in self.seen():
            assert self.read(), self.seen()
            assert time.monotonic() < end, self.seen()

    def end(self) -> int:
        """Its status, once all was read."""
        end = time.monotonic() + LIMIT_S
        while self.read() and time.monotonic() < end:
            pass
        return self.process.wait(LIMIT_S)

    def seen(self) -> str:
        """Without what moves the cursor and gives colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextmanager
def live(path: Path) -> Iterator[Terminal]:
    argv = [sys.executable, "-m", "accel_scaler", "report", "--live", str(path)]
    terminal = Terminal(argv)
    try:
        yield terminal
    finally:
        terminal.close()


def append(path: Path, lines: list[Any]) -> None:
    piece = t.write(path.with_suffix(".piece"), lines)
    with open(path, "ab") as file:
        file.write(piece.read_bytes())


def test_it_waits_follows_and_ends_with_the_run(tmp_path: Path) -> None:
    path, lines = tmp_path / "run.jsonl", t.story(80, lambda s, _: 40 <= s < 44)
    lines = [line | {"loss": 2.5} if line["kind"] == "window" else line for line in lines]
    with live(path) as terminal:
        terminal.until("waiting for the file")
        append(path, lines[:32])
        terminal.until("windows 30")
        append(path, lines[32:])
        assert terminal.end() == 0
        seen = terminal.seen()
        assert "windows 80" in seen
        assert "skipped 4 (5 %)" in seen
        assert "loss 2.5" in seen
        assert all(len(line) <= COLUMNS for line in re.split(r"[\r\n]+", seen))
        assert terminal.text.rindex(SHOWN) > terminal.text.rindex(HIDDEN)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_has_his_terminal_back(tmp_path: Path, by: signal.Signals) -> None:
    path = t.write(tmp_path / "run.jsonl", t.story(30, lambda *_: False)[:-1])
    with live(path) as terminal:
        terminal.until("windows 30")
        terminal.process.send_signal(by)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.seen()
        assert terminal.text.rindex(SHOWN) > terminal.text.rindex(HIDDEN)
