"""Numbers in words, the same in the summary, the page and the pictures."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Four significant digits; integers in full, as far as loss scales usually go."""
    if math.isfinite(value) and value == int(value) and abs(value) < 2.0**33:
        return str(int(value))
    return f"{value:.4g}"


def times(count: int) -> str:
    """``once``, ``twice``, ``14 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def shorten(name: str, limit: int) -> str:
    """At most ``limit`` characters; the end of a layer's name tells more than its beginning."""
    if len(name) <= limit:
        return name
    head = max(1, limit // 3)
    return f"{name[:head]}…{name[head + 1 - limit :]}"
