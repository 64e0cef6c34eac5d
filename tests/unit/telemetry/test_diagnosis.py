"""What became of a run: one table, through the live history and through the file it writes."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import telemetry_runs as runs
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.report.findings import find
from accel_scaler.report.reader import read_run
from accel_scaler.report.verdict import outcome_of, verdict_on
from accel_scaler.scaling.update_rule import Rule, ScaleState
from accel_scaler.telemetry.diagnosis import Diagnosis
from accel_scaler.telemetry.history import History
from accel_scaler.telemetry.outcome import Kind, Outcome
from accel_scaler.telemetry.record import End, Record, encode_end, encode_start, encode_window

NAN = math.nan


@dataclass(frozen=True)
class Course:
    """A run by torch's rule for the scale. Each function is given the window, and the scale."""

    windows: int = 100
    overflows: Callable[[int, float], bool] = lambda i, scale: False
    loss: Callable[[int], float | None] = lambda i: 4.0 - 3.0 * i / 100
    lr: Callable[[int], tuple[float | None, ...]] = lambda i: (1e-3,)
    growth_interval: int = 2000
    init_scale: float = 65536.0
    growth_tracker: int = 0
    hysteresis: int = 1
    min_scale: float | None = None
    scaled: bool = True
    knows_norms: bool = True

    def records(self) -> list[Record]:
        rule = Rule(2.0, 0.5, self.growth_interval, self.min_scale, hysteresis=self.hysteresis)
        state = ScaleState(self.init_scale if self.scaled else 1.0, self.growth_tracker)
        found = []
        for i in range(self.windows):
            loss, scale = self.loss(i), state.scale
            is_bad_loss = loss is not None and not math.isfinite(loss)
            found_inf = is_bad_loss or self.overflows(i, scale)
            state = rule.advance(state, found_inf) if self.scaled else state
            norm = NAN if found_inf else 1.0
            record = Record(
                i,
                scale,
                state.scale,
                skipped=found_inf and self.scaled,
                grad_norm=norm if self.knows_norms else None,
                found_inf=found_inf,
                growth_tracker=state.growth_tracker,
                lr=self.lr(i),
                loss=loss,
                loss_nonfinite=int(is_bad_loss),
            )
            found.append(record)
        return found


def live(course: Course, records: list[Record]) -> History:
    history = History(course.scaled, course.min_scale)
    for record in records:
        history.add(replace(record, lr=record.lr[:1]))  # a second optimizer amends it
        history.add(record)
    return history


def start(course: Course) -> str:
    settings = {"min_scale": course.min_scale}
    precision = "fp16" if course.scaled else "bf16"
    return encode_start(0.0, {"precision": precision, "settings": settings})


def same(history: Outcome, file: Outcome) -> bool:
    """Names of windows and how the file ends apart."""
    spoken = repr(replace(file, is_over=True, error=None)).replace("step ", "window ")
    return repr(history) == spoken


def noisy(count: int, first: float, last: float, seed: int = 0) -> Callable[[int], float]:
    rng = random.Random(seed)
    values = [first + (last - first) * i / count + rng.gauss(0, 0.8) for i in range(count)]
    return lambda i: values[i]


def unknown(i: int) -> None:
    return None


Counts = tuple[int, int, int, int]
CASES: dict[str, tuple[Course, Kind, Counts]] = {
    # Counts: skips with inf or NaN in the forward, of the search, after a growth, others.
    "normal": (Course(), "trained", (0, 0, 0, 0)),
    "every second batch NaN": (
        Course(loss=lambda i: 4.0 if i % 2 else NAN),
        "partly",
        (50, 0, 0, 0),
    ),
    "every second batch NaN, no loss on record": (
        Course(overflows=lambda i, _: i % 2 == 0, loss=unknown),
        "partly",
        (0, 3, 0, 47),
    ),
    "every second batch NaN from window 100": (
        Course(200, loss=lambda i: NAN if i >= 100 and i % 2 else 4.0),
        "partly",
        (50, 0, 0, 0),
    ),
    "the same, after three overflows, no loss on record": (
        Course(200, lambda i, _: i < 3 or (i >= 100 and i % 2 == 1), loss=unknown),
        "partly",
        (0, 3, 0, 50),
    ),
    "one NaN batch in the middle": (
        Course(loss=lambda i: NAN if i == 50 else 2.0),
        "trained",
        (1, 0, 0, 0),
    ),
    "one NaN batch while the scale settles": (
        Course(overflows=lambda _, s: s > 8192, loss=lambda i: NAN if i == 1 else 2.0),
        "trained",
        (1, 2, 0, 0),
    ),
    "one overflow in the middle, no loss on record": (
        Course(overflows=lambda i, _: i == 50, loss=unknown),
        "trained",
        (0, 0, 0, 1),
    ),
    "three overflows, then none": (
        Course(overflows=lambda _, s: s > 8192),
        "trained",
        (0, 3, 0, 0),
    ),
    "from 2**24": (
        Course(overflows=lambda _, s: s > 8, init_scale=2.0**24),
        "trained",
        (0, 21, 0, 0),
    ),
    "batches differ while the scale settles": (
        Course(overflows=lambda i, _: i in (0, 1, 2, 6, 17)),
        "trained",
        (0, 5, 0, 0),
    ),
    "hysteresis": (
        Course(overflows=lambda _, s: s > 8192, hysteresis=3),
        "trained",
        (0, 5, 0, 0),
    ),
    "not yet settled": (Course(10, lambda _, s: s > 2048), "trained", (0, 5, 0, 0)),
    "searching, nothing went well yet": (
        Course(20, lambda *_: True, init_scale=2.0**24),
        "untrained",
        (0, 20, 0, 0),
    ),
    "every growth overflows": (
        Course(420, lambda _, s: s > 65536, growth_interval=20),
        "trained",
        (0, 0, 20, 0),
    ),
    "all skipped": (
        Course(overflows=lambda *_: True, loss=unknown),
        "untrained",
        (0, 16, 0, 84),
    ),
    "all skipped for a loss of NaN": (
        Course(loss=lambda _: NAN),
        "untrained",
        (100, 0, 0, 0),
    ),
    "all skipped at the floor": (
        Course(overflows=lambda *_: True, min_scale=16384.0, loss=unknown),
        "untrained",
        (0, 22, 0, 78),
    ),
    "resumed, one overflow": (
        Course(overflows=lambda i, _: i == 3, init_scale=1024.0, growth_tracker=700),
        "trained",
        (0, 0, 0, 1),
    ),
    "stuck": (Course(overflows=lambda i, _: i >= 60), "stuck", (0, 0, 0, 40)),
    "learning rate 0": (Course(lr=lambda _: (0.0, 0.0)), "untrained", (0, 0, 0, 0)),
    "learning rate 0, some skipped": (
        Course(overflows=lambda _, s: s > 8192, lr=lambda i: (0.0 if i > 2 else 1.0,)),
        "untrained",
        (0, 3, 0, 0),
    ),
    "learning rate 0 without a scale": (
        Course(lr=lambda _: (0.0,), scaled=False),
        "untrained",
        (0, 0, 0, 0),
    ),
    "warm-up from 0": (Course(lr=lambda i: (1e-5 * i,)), "trained", (0, 0, 0, 0)),
    "two optimizers, one at 0": (Course(lr=lambda _: (0.0, 1e-3)), "trained", (0, 0, 0, 0)),
    "a rate on a device": (Course(lr=lambda _: (None,)), "trained", (0, 0, 0, 0)),
    "an optimizer without a rate": (Course(lr=lambda _: ()), "trained", (0, 0, 0, 0)),
    "4 to 20,000": (Course(loss=lambda i: 4 * 5000 ** (i / 99)), "diverged", (0, 0, 0, 0)),
    "4 to 20,000 in the last windows": (
        Course(loss=lambda i: 4.0 * 20 ** max(0, i - 96)),
        "diverged",
        (0, 0, 0, 0),
    ),
    "4 to 20,000 in 6 windows": (
        Course(6, loss=lambda i: 4 * 5000 ** (i / 5)),
        "diverged",
        (0, 0, 0, 0),
    ),
    "loss falls": (Course(loss=lambda i: 11 * 0.97**i), "trained", (0, 0, 0, 0)),
    "one outlier at the end": (
        Course(loss=lambda i: 1e6 if i == 99 else 4.0),
        "trained",
        (0, 0, 0, 0),
    ),
    "noisy, slightly above": (Course(8, loss=noisy(8, 2.0, 2.6)), "trained", (0, 0, 0, 0)),
    "two windows": (Course(2, loss=lambda i: (0.2, 3.0)[i]), "trained", (0, 0, 0, 0)),
    "a policy's loss, about 0": (
        Course(loss=lambda i: 1e-8 * (-1) ** i + 3e-3 * i),
        "trained",
        (0, 0, 0, 0),
    ),
    "a loss of any sign": (
        Course(loss=lambda i: 100.0 * math.sin(i * i)),
        "trained",
        (0, 0, 0, 0),
    ),
    "loss becomes NaN, skipped": (
        Course(loss=lambda i: 4.0 if i < 90 else NAN),
        "stuck",
        (10, 0, 0, 0),
    ),
    "loss becomes NaN, stepped": (
        Course(loss=lambda i: 4.0 if i < 90 else NAN, scaled=False),
        "diverged",
        (0, 0, 0, 0),
    ),
    "the norm becomes NaN, stepped, no loss on record": (
        Course(overflows=lambda i, _: i >= 97, loss=unknown, scaled=False),
        "diverged",
        (0, 0, 0, 0),
    ),
    "neither loss nor norm on record": (
        Course(loss=unknown, knows_norms=False),
        "trained",
        (0, 0, 0, 0),
    ),
}


def counts(of: Outcome) -> Counts:
    return of.forward_skips, of.search_skips, of.growth_skips, of.other_skips


@pytest.mark.parametrize("name", CASES)
def test_the_history_and_the_file_find_the_same_and_the_right(name: str, tmp_path: Path) -> None:
    course, kind, expected = CASES[name]
    records = course.records()
    lines = [start(course), *map(encode_window, records), encode_end(End())]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines) + "\n")
    history, run = live(course, records), read_run(path)
    found = history.outcome()
    assert (found.kind, *counts(found)) == (kind, *expected)
    assert same(found, outcome_of(run))
    assert found.windows == course.windows
    for text in (history.verdict(), verdict_on(run)):
        assert text.startswith("Trained:") <= (kind == "trained"), text
        assert text.startswith("Trained") == (kind in ("trained", "partly")), text
        assert text.startswith("Diverged") == (kind == "diverged"), text


@pytest.mark.parametrize("name", CASES)
def test_half_a_line_at_the_end_is_a_file_of_the_windows_before(name: str, tmp_path: Path) -> None:
    course, _, _ = CASES[name]
    records = course.records()
    path = tmp_path / "run.jsonl"
    for count in sorted({1, len(records) // 3, len(records) // 2, len(records) - 1} - {0}):
        text = "\n".join([start(course), *map(encode_window, records[: count + 1])])
        path.write_text(text[:-20])
        found = outcome_of(read_run(path))
        assert (found.windows, found.is_over) == (count, False)
        assert same(live(course, records[:count]).outcome(), found)


def test_a_file_with_a_run_that_goes_on(tmp_path: Path) -> None:
    """Each session has its own search, loss and streak; totals are of all."""
    first = Course(overflows=lambda _, s: s > 8192, loss=lambda i: 11.0)
    fresh = Course(overflows=lambda i, _: i < 2, loss=lambda i: 3.0)
    resumed = replace(fresh, overflows=lambda i, _: i == 3, init_scale=8192.0, growth_tracker=97)
    diverged = replace(resumed, loss=lambda i: 3.0 if i < 50 else 90.0)
    path = tmp_path / "run.jsonl"
    for second, kind, expected in (
        (fresh, "trained", (0, 5, 0, 0)),
        (resumed, "trained", (0, 3, 0, 1)),
        (diverged, "diverged", (0, 3, 0, 1)),
        (replace(fresh, lr=lambda _: (0.0,)), "trained", (0, 5, 0, 0)),  # the first one has moved
    ):
        lines = [
            line for c in (first, second) for line in (start(c), *map(encode_window, c.records()))
        ]
        path.write_text("\n".join([*lines, encode_end(End())]) + "\n")
        found = outcome_of(read_run(path))
        assert (found.kind, *counts(found)) == (kind, *expected)


def test_after_a_heal_the_scale_is_searched_for_again() -> None:
    records = Course(overflows=lambda i, s: i in (0, 1, 3, 6)).records()
    records[1] = replace(records[1], next_scale=65536.0, healed=("a",), growth_tracker=9)
    found = Diagnosis()
    for record in records:
        found.add(record.index, record)
    assert counts(found.outcome(str)) == (0, 4, 0, 0)
    assert [fall.skips for fall in found.falls] == [2, 2]


@pytest.mark.parametrize(
    ("where", "output", "forward"),
    [
        ("forward", None, 1),
        ("loss", ["nan", "nan"], 1),
        ("loss", [NAN, NAN], 1),
        ("loss", [2.0, 2.0], 0),  # times the scale it was too large for its dtype
        ("backward", ["inf", "inf"], 0),
        ("parameter", None, 0),
    ],
)
def test_what_the_finder_saw_tells_the_kind_too(where: str, output: Any, forward: int) -> None:
    first = {"where": where, "module": "a", "class": "B", "output": output}
    found = Diagnosis()
    for record in Course(overflows=lambda i, _: i == 60, loss=unknown).records():
        found.add(record.index, replace(record, first=first) if record.skipped else record)
    assert counts(found.outcome(str)) == (forward, 0, 0, 1 - forward)


NUMBERS = st.sampled_from([None, 0.0, 1.0, 2.5, -3.0, 1e6, NAN, math.inf])
FIRSTS = st.sampled_from(["forward", "loss", "backward", "parameter"])


@st.composite
def any_records(draw: st.DrawFn) -> list[Record]:
    """Windows of any kind, which no scaler need have made."""
    count, found = draw(st.integers(1, 90)), []
    likely = draw(st.sampled_from([0, 1, 5, 9]))
    scale = draw(st.sampled_from([1.0, 8.0, 65536.0]))
    for i in range(count):
        skipped = draw(st.integers(0, 9)) < likely
        factor = draw(st.sampled_from([1.0, 0.5, 0.5] if skipped else [1.0, 1.0, 1.0, 2.0]))
        record = Record(i, scale, scale * factor, skipped, draw(NUMBERS), found_inf=skipped)
        record = replace(record, loss=draw(NUMBERS), growth_tracker=draw(st.integers(0, 2)))
        record = replace(record, lr=draw(st.sampled_from([(), (0.0,), (0.0, 0.1), (None,)])))
        if skipped and draw(st.booleans()):
            first = {"where": draw(FIRSTS), "module": "a", "class": "B", "text": "it"}
            record = replace(
                record, first={**first, "micro_batch": 0, "input": None, "output": None}
            )
        if skipped and draw(st.integers(0, 19)) == 0:
            record = replace(record, healed=("a",), next_scale=65536.0)
        found.append(record)
        scale = record.next_scale
    return found


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records=any_records(), scaled=st.booleans(), floor=st.sampled_from([None, 1.0, 64.0]))
def test_whatever_the_records_the_history_and_the_file_find_the_same(
    records: list[Record], scaled: bool, floor: float | None, tmp_path: Path
) -> None:
    course = Course(scaled=scaled, min_scale=floor)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([start(course), *map(encode_window, records)]) + "\n")
    history, run = live(course, records), read_run(path)
    found = history.outcome()
    assert same(found, outcome_of(run))
    assert same(pickle.loads(pickle.dumps(history)).outcome(), outcome_of(run))
    assert sum(counts(found)) == found.skips == sum(record.skipped for record in records)
    assert min(counts(found)) >= 0
    has_bad = any(finding.level == "bad" for finding in find(run))
    assert has_bad or found.kind != "diverged"
    assert verdict_on(run)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("name", ["every second NaN", "learning rate 0", "the loss runs away"])
def test_of_a_run(name: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with runs.attached(path, step_mode=mode) as accelerator:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        rate = 0.0 if name == "learning rate 0" else 0.01
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        for step in range(40):
            factor = NAN if name == "every second NaN" and step % 2 == 0 else 1.0
            factor *= 1.3**step if name == "the loss runs away" else 1.0
            accelerator.backward(runs.loss_of(model, step) * factor)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        history = accelerator.scaler_history
        found = history.outcome()
    kind, skips = {
        "every second NaN": ("partly", 20),
        "learning rate 0": ("untrained", 0),
        "the loss runs away": ("diverged", 0),
    }[name]
    assert (found.kind, found.forward_skips) == (kind, skips)
    file = outcome_of(read_run(path))
    assert (file.kind, *counts(file)) == (found.kind, *counts(found))
    assert file.rise == found.rise
