"""Printing for commands, warnings with their sender, and numbers in words."""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any


class Sender(logging.Handler):
    """Where a script configures no logging, Python prints a bare warning: print who sends it."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [h for h in logging.getLogger(record.name).handlers if h is not self]
        if not (others or logging.root.handlers):
            print(f"{record.name}: {self.format(record)}", file=sys.stderr)


def plain(text: str) -> str:
    """Text that steers no terminal: of unprintable characters only line ends are left."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def say(text: str) -> None:
    """Print, whatever the terminal's encoding can show; names from files may hold anything."""
    coding = sys.stdout.encoding or "utf-8"
    line = plain(text).encode(coding, "replace").decode(coding)
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # `| head` has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def percent(part: float, whole: float) -> str:
    """``3.25 %``: three significant digits."""
    return f"{100 * part / whole if whole else 0:.3g} %"


def number(value: float) -> str:
    """Four significant digits; integers in full, as far as loss scales usually go."""
    if math.isfinite(value) and value == int(value) and abs(value) < 2.0**33:
        return str(int(value))
    return f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """``1 window``, ``3 windows``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def written(value: Any) -> str:
    """A setting as one writes it in a config file: ``none``, ``true``, ``[a, b.c]``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return str(value)
