"""Printing for commands."""

from __future__ import annotations

import os
import sys

__all__ = ["plain", "say"]


def plain(text: str) -> str:
    """Text that steers no terminal: of what is not printable only line ends are left."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def say(text: str) -> None:
    """Print, whatever the terminal's encoding can show; names from files may hold anything."""
    coding = sys.stdout.encoding or "utf-8"
    try:
        print(plain(text).encode(coding, "replace").decode(coding), flush=True)
    except BrokenPipeError:
        # `| head` has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
