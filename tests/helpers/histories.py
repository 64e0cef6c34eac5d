"""Random histories: what a user chooses, and what he does then; drawn, played, shortened, printed.

A kind of history has a setup, a :class:`Short`, and operations: more of those, or calls, each a
name with its arguments. Every operation is legal at every point (where it means nothing it does
nothing), so a history that fails may lose any of them on the way to the shortest one that does.
"""

from __future__ import annotations

import logging
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

INF, NAN = math.inf, math.nan
Call = tuple[str, dict[str, Any]]
Choices = Mapping[str, Mapping[str, Sequence[Any]]]
"""For each call what its arguments may be."""


class Short:
    """A dataclass whose ``repr`` holds what differs from its defaults."""

    def __repr__(self) -> str:
        own = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        text = ", ".join(f"{name}={value!r}" for name, value, usual in own if value != usual)
        return f"{type(self).__name__}({text})"


@dataclass(frozen=True)
class Kind:
    """How to draw a history, and what plays it: an error where the two sides differ."""

    draw: Callable[[random.Random], tuple[Any, list[Any]]]
    play: Callable[[Any, Sequence[Any], Counter[str]], None]


class Found(Exception):  # noqa: N818
    """A failing history, to be pasted into ``tests/property/test_histories.py``."""


def run(kind: Kind, seed: str, seen: Counter[str]) -> None:
    """Play the history of this seed; :class:`Found` is the shortest that fails like it."""
    setup, ops = kind.draw(random.Random(seed))
    with quiet():
        _run(kind, setup, ops, seed, seen)
    seen["histories"] += 1
    seen["operations"] += len(ops)


def _run(kind: Kind, setup: Any, ops: list[Any], seed: str, seen: Counter[str]) -> None:
    try:
        kind.play(setup, ops, seen)
    except Exception as error:
        wrong = type(error)

        def fails(ops: list[Any]) -> bool:
            try:
                kind.play(setup, ops, Counter())
            except wrong:
                return True
            except Exception:
                return False
            return False

        text = as_test(setup, shortest(ops, fails))
        raise Found(f"seed {seed}: {error}\n{text}\nshortened from {len(ops)}") from error


def drawn(r: random.Random, name: str, choices: Choices, **fixed: Any) -> Call:
    """A call with arguments by chance, but for those that are ``fixed``."""
    return name, {key: r.choice(list(some)) for key, some in choices[name].items()} | fixed


@contextmanager
def quiet() -> Iterator[None]:
    """What is said once to a user is said to thousands here."""
    logger = logging.getLogger("accel_scaler")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def as_test(setup: Any, ops: Sequence[Any]) -> str:
    lines = "".join(f"    {op!r},\n" for op in ops)
    text = re.sub(r"\b(inf|nan)\b", lambda found: found[0].upper(), f"{setup!r}, [\n{lines}]")
    return f"play({text})"


def shortest(ops: Sequence[Any], fails: Callable[[list[Any]], bool], tries: int = 400) -> list[Any]:
    """Without operations that the failure does not need, after at most ``tries`` runs."""
    best, at = list(ops), 0
    while at < len(best) and tries:
        tries -= 1
        less = best[:at] + best[at + 1 :]
        if fails(less):
            best, at = less, 0
        else:
            at += 1
    return best
