"""Printing for commands."""

from __future__ import annotations

import os
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Print, whatever the terminal's encoding can show."""
    coding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(coding, "replace").decode(coding), flush=True)
    except BrokenPipeError:
        # `| head` has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
