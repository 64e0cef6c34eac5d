"""Checks of the fields in a telemetry line: what is not as the format says is refused."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any, NoReturn

__all__ = [
    "MAX_LINE",
    "BrokenLineError",
    "clean",
    "finite",
    "items",
    "number",
    "pair",
    "parse",
    "setting",
    "share",
    "show",
    "size",
    "span",
    "text_of",
    "truth",
    "whole",
]

MAX_LINE = 8 << 20
MAX_MICROSECONDS = 10**15
WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
KINDS = ("forward", "backward", "clip", "step", "optimizer", "wait")


class BrokenLineError(Exception):
    """This line cannot be used; the message says why."""


def clean(text: str, limit: int = 160) -> str:
    """Text from a file made harmless: one line, nothing unprintable, at most ``limit`` characters.

    What is too long loses its middle; a checksum keeps two such texts apart.
    """
    if len(text) > limit:
        mark = f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
        text = f"{text[: limit // 2]}…{text[limit // 2 + 12 - limit :]} #{mark}"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _no_constant(text: str) -> NoReturn:
    raise BrokenLineError(f"{text} is not JSON")


_decoder: Any = json.JSONDecoder(parse_constant=_no_constant)  # scan_once is not in the stubs
_decode, _scan = _decoder.decode, _decoder.scan_once


def parse(line: bytes | None) -> Any:
    if line is None:
        raise BrokenLineError(f"a line longer than {MAX_LINE >> 20} MiB")
    try:
        text = line.decode()
        try:
            # A line that is one value and nothing else: a fifth faster than decode().
            value, end = _scan(text, 0)
            if end == len(text):
                return value
        except StopIteration:
            pass
        return _decode(text)
    except UnicodeDecodeError:
        raise BrokenLineError("bytes that are not UTF-8 text") from None
    except RecursionError:
        raise BrokenLineError("JSON nested too deeply") from None
    except ValueError as error:
        raise BrokenLineError(f"text that is not JSON ({clean(str(error), 80)})") from None


def whole(value: object, least: int = 0, most: int = 2**53) -> int:
    if type(value) is not int or not least <= value <= most:
        raise BrokenLineError(f"expected an integer from {least}, got {show(value)}")
    return value


def number(value: Any) -> float:
    """A float, maybe not finite, as the format writes one."""
    if type(value) is float:
        return value
    if type(value) is int and -(2**1000) < value < 2**1000:
        return float(value)
    if type(value) is str and value in WORDS:
        return WORDS[value]
    raise BrokenLineError(f"expected a number, got {show(value)}")


def size(value: Any, finite: bool = True) -> float:
    """A number >= 0; without ``finite``, inf and NaN as well."""
    got = value if type(value) is float else number(value)
    if 0.0 <= got < math.inf or (not finite and not got < 0.0):
        return got
    raise BrokenLineError(f"expected a number >= 0, got {show(value)}")


def truth(value: object) -> bool:
    if type(value) is not bool:
        raise BrokenLineError(f"expected true or false, got {show(value)}")
    return value


def text_of(value: object, limit: int = 160) -> str:
    if type(value) is not str:
        raise BrokenLineError(f"expected a text, got {show(value)}")
    return clean(value, limit)


def items(value: object) -> list[Any]:
    if type(value) is not list:
        raise BrokenLineError(f"expected a list, got {show(value)}")
    return value


def show(value: object) -> str:
    """A short repr; of a container, or of a number too long to print, its type."""
    if isinstance(value, (dict, list)) or (isinstance(value, int) and abs(value) >= 10**30):
        return f"a {'huge ' if isinstance(value, int) else ''}{type(value).__name__}"
    return clean(repr(value[:60] if isinstance(value, str) else value), 60)


def span(span: Any) -> tuple[str, int, int, str]:
    if type(span) is not list or not 3 <= len(span) <= 4 or span[0] not in KINDS:
        raise BrokenLineError(f"expected a span, got {show(span)}")
    start, length = span[1], span[2]
    if not (type(start) is type(length) is int and 0 <= start <= MAX_MICROSECONDS):
        raise BrokenLineError(f"a span that starts at {show(start)}")
    if not 0 <= length <= MAX_MICROSECONDS:
        raise BrokenLineError(f"a span that lasts {show(length)}")
    return span[0], start, length, text_of(span[3], 80) if len(span) == 4 else ""


def pair(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = both if len(both := items(value)) == 2 else (None, None)
    return number(low), number(high)


def finite(value: Any) -> float:
    """A number that is neither infinite nor NaN."""
    got = number(value)
    if not math.isfinite(got):
        raise BrokenLineError(f"expected a finite number, got {show(value)}")
    return got


def share(value: Any) -> float:
    """A number from 0 to 1."""
    if not 0.0 <= (got := number(value)) <= 1.0:
        raise BrokenLineError(f"expected a share from 0 to 1, got {show(value)}")
    return got


def setting(value: object) -> object:
    """A setting as it stands, or a text of it where it is not a plain value."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return clean(value, 100)
    return value if isinstance(value, int) and abs(value) < 10**30 else show(value)
