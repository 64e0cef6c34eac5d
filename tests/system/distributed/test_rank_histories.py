"""Random histories of two gloo ranks equal plain torch on the same ranks, and no rank waits for one
that does not come.

``python tests/helpers/rank_histories.py --seed 100 --runs 1000`` plays others, and more.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from rank_histories import History, draw, play_all, possible
from rank_sides import LIMIT, Setup, Window
from versions import before_torch

pytestmark = [pytest.mark.process, before_torch(2, 7, "fully_shard wants the streams of a device")]

SEEDS = range(60)
LEAST = 2
"""Each event happens so often: the histories went everywhere."""
BAD = ("inf", "nan", "loud", "alone", "alone loss", "shard")
EVENTS = (
    *("skipped", "retried", "spike", "raised", "ddp", "fsdp2", "tensor", "join", "local"),
    *("apart", "within", "ignored", "fp16", "bf16", "no", *(f"bad: {bad}" for bad in BAD)),
)


def chosen(history: History) -> Counter[str]:
    setup, windows = history
    bad = (f"bad: {window.bad}" for window in windows if window.bad)
    return Counter((setup.wrap, setup.group, setup.alone, setup.precision, *bad))


def test_random_histories_equal_plain_torch() -> None:
    histories = {f"seed {seed}": draw(random.Random(seed)) for seed in SEEDS}
    seen = sum(map(chosen, histories.values()), Counter[str]())
    found = play_all(histories, seen)
    assert not found, found
    assert {event: seen[event] for event in EVENTS if seen[event] < LEAST} == {}


# Histories that have shown a fault.

GOOD = Window()
BOTH = Window("inf")
ONE = Window("inf", on=(1,))
OWN = Window("alone", on=(1,))
JOIN = Setup(group="join", missing=(3, 0))
HEAD = Setup(alone="apart")
LOCAL = Setup(group="local", retry=True)
TENSOR = Setup(wrap="tensor", micro=2)
SHARDS = Setup(wrap="fsdp2")
SHOWN: dict[str, tuple[Setup, list[Window]]] = {
    "an overflow where the other one is out of inputs": (JOIN, [GOOD, GOOD, ONE, GOOD]),
    "growth where the other one is out of inputs": (
        replace(JOIN, retry=True),
        [GOOD, GOOD, GOOD, GOOD],
    ),
    "an overflow of a rank's head": (HEAD, [GOOD, OWN, GOOD]),
    "the same, clipped with the model's": (replace(HEAD, clip="all"), [GOOD, OWN, GOOD]),
    "the same, beside shards": (
        replace(HEAD, wrap="fsdp2", clip="each", find="replay"),
        [GOOD, OWN, GOOD],
    ),
    "an overflow of a parameter that DDP ignores": (Setup(alone="ignored"), [GOOD, OWN, GOOD]),
    "growth of one rank, which trains alone": (LOCAL, [GOOD, ONE, GOOD, GOOD, GOOD]),
    "a spike of DTensors and plain parameters": (
        replace(TENSOR, limit=LIMIT),
        [GOOD, Window("loud"), BOTH],
    ),
    "their norm so far": (replace(TENSOR, clip="all", early=True), [GOOD, BOTH]),
    "each of their elements clipped": (replace(TENSOR, clip="value"), [GOOD, BOTH]),
    "shards that run again on one rank alone": (
        replace(SHARDS, find="replay", unlike=True),
        [GOOD, BOTH, GOOD],
    ),
    "two optimizers that agree, and one rank that runs again": (
        replace(HEAD, sharded=True, retry=True, unlike=True),
        [GOOD, BOTH, GOOD],
    ),
    "shards that raise there": (
        replace(SHARDS, find="replay"),
        [GOOD, Window("inf", on=(1,), raises="again")],
    ),
}


def test_histories_that_have_shown_a_fault() -> None:
    histories = {
        f"{precision}: {name}": possible(replace(setup, precision=precision), windows)
        for name, (setup, windows) in SHOWN.items()
        for precision in ("fp16", "bf16")
    }
    found = play_all(histories, Counter())
    assert not found, found
