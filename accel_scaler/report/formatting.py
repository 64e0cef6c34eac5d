"""Numbers in words, the same in the summary, the page and the pictures."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Four significant digits; integers in full, as far as loss scales usually go."""
    if math.isfinite(value) and value == int(value) and abs(value) < 2.0**33:
        return str(int(value))
    return f"{value:.4g}"


def percent(part: float, whole: float) -> str:
    """``3.2 %``; never ``0 %`` for something, nor ``100 %`` for not all."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "under 0.1 %"
    if 99.9 < share < 100:
        return "over 99.9 %"
    return f"{share:.1f} %".replace(".0 %", " %")


def times(count: int) -> str:
    """``once``, ``twice``, ``14 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def counted(count: int, noun: str) -> str:
    """``1 window``, ``3 windows``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def shorten(name: str, limit: int) -> str:
    """At most ``limit`` characters; the end of a layer's name tells more than its beginning."""
    if len(name) <= limit:
        return name
    head = max(1, limit // 3)
    return f"{name[:head]}…{name[head + 1 - limit :]}"
