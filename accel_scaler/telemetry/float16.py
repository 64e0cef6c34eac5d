"""float16's range, in numbers."""

from __future__ import annotations

import math

LARGEST = 65504.0
"""Of float16."""

SMALLEST_NORMAL = 2.0**-14
"""Of float16."""


def headroom(largest: float) -> float:
    """How often ``largest``, of a scaled gradient, can be doubled before float16 overflows: 0 or
    more; below 0 where it was computed or added up in float32. inf of 0.

    >>> headroom(65504 / 8)
    3.0
    """
    if largest == math.inf:
        return -math.inf
    return math.log2(LARGEST / largest) if largest > 0 else math.inf
