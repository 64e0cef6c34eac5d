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
from dataclasses import dataclass, fields, replace
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

        def fails(setup: Any, ops: list[Any]) -> bool:
            try:
                kind.play(setup, ops, Counter())
            except wrong:
                return True
            except Exception:
                return False
            return False

        text = as_test(*shortest(setup, ops, fails))
        first = as_test(setup, ops)
        raise Found(f"seed {seed}: {error}\n{text}\nshortened from\n{first}") from error


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


def shortest(
    setup: Any, ops: Sequence[Any], fails: Callable[[Any, list[Any]], bool], tries: int = 400
) -> tuple[Any, list[Any]]:
    """Leave out, one by one, what the failure does not need; at most ``tries`` runs."""
    best: tuple[Any, list[Any]] = (setup, list(ops))
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(*best):
            tries -= 1
            if tries < 0:
                return best
            if fails(*candidate):
                best, changed = candidate, True
                break
    return best


def _smaller(setup: Any, ops: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    for n in range(len(ops)):
        yield setup, ops[:n] + ops[n + 1 :]
    for less in _simpler(setup):
        yield less, ops
    for n, op in enumerate(ops):
        for less in _simpler(op) if isinstance(op, Short) else ():
            yield setup, [*ops[:n], less, *ops[n + 1 :]]


def _simpler(op: Any) -> Iterator[Any]:
    """The same with one thing less in it."""
    for spec in fields(op):
        value = getattr(op, spec.name)
        if value == spec.default:
            continue
        if spec.default != ():
            yield replace(op, **{spec.name: spec.default})
            continue
        for n, item in enumerate(value):
            rest = value[:n], value[n + 1 :]
            yield replace(op, **{spec.name: (*rest[0], *rest[1])})
            for less in _simpler(item) if isinstance(item, Short) else ():
                yield replace(op, **{spec.name: (*rest[0], less, *rest[1])})
