"""What became of a run: one table, through the live history and through the file it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from accel_scaler.report.reader import read_run
from accel_scaler.scaling.update_rule import Rule, ScaleState
from accel_scaler.telemetry import Diagnosis, End, History, Record, Start, headroom, verdict
from accel_scaler.telemetry.diagnosis import STUCK, Kind
from accel_scaler.telemetry.findings import overflow, skips, streak
from accel_scaler.telemetry.record import FORMAT, decode, encode_line, encode_window

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Course:
    """A run by torch's rule for the scale. Each function is given the window, and the scale."""

    windows: int = 100
    overflows: Callable[[int, float], bool] = lambda i, scale: False
    loss: Callable[[int], float | None] = lambda i: 4.0 - 3.0 * i / 100
    growth_interval: int = 2000
    init_scale: float = 65536.0
    growth_tracker: int = 0
    min_scale: float | None = None
    scaled: bool = True
    knows_norms: bool = True
    first: dict[str, Any] | None = None
    """Of every overflow."""
    overflowed: tuple[str, ...] = ()

    def records(self) -> list[Record]:
        rule = Rule(2.0, 0.5, self.growth_interval, self.min_scale)
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
                lr=(1e-3, 1e-4),
                loss=loss,
                loss_nonfinite=int(is_bad_loss),
                first=self.first if found_inf else None,
                overflowed=self.overflowed if found_inf else (),
            )
            found.append(record)
        return found

    @property
    def start(self) -> Start:
        precision = "fp16" if self.scaled else "bf16"
        return Start(FORMAT, {"precision": precision}, {"min_scale": self.min_scale})

    def lines(self, records: list[Record]) -> list[str]:
        begun = {**self.start.facts, "settings": self.start.settings}
        return [encode_line("start", format=FORMAT, **begun), *map(encode_window, records)]


def live(course: Course, records: list[Record]) -> History:
    history = History(course.start)
    for record in records:
        history.add(replace(record, lr=record.lr[:1]))  # a second optimizer amends it
        history.add(record)
    return history


def diagnosed(course: Course, error: str | None = None) -> Diagnosis:
    found = Diagnosis()
    found.begin(course.start)
    for record in course.records():
        found.add(record)
    found.end(End(error=error))
    return found


def known(of: Diagnosis) -> str:
    """All of it, but for how the file ends."""
    names = [name for name in vars(Diagnosis()) if not name.startswith("_") and name != "sessions"]
    public = {name: getattr(of, name) for name in names}
    return repr((public, of.kind, verdict(of)))


def unknown(i: int) -> None:
    return None


Counts = tuple[int, int, int, int]
Case = tuple[Course, Kind, Counts]


def case(kind: Kind, counts: Counts = (0, 0, 0, 0), **course: Any) -> Case:
    """``counts``: skips of the forward, of the search, after a growth, others."""
    return Course(**course), kind, counts


def above(limit: float) -> Callable[[int, float], bool]:
    return lambda _, scale: scale > limit


CASES: dict[str, Case] = {
    "normal": case("trained"),
    "every second batch NaN": case("partly", (50, 0, 0, 0), loss=lambda i: 4.0 if i % 2 else NAN),
    "every second batch NaN, no loss on record": case(
        "partly", (0, 16, 0, 34), overflows=lambda i, _: i % 2 == 0, loss=unknown
    ),
    "from window 100, after three overflows": case(
        "partly",
        (0, 3, 0, 50),
        windows=200,
        overflows=lambda i, _: i < 3 or (i >= 100 and i % 2 == 1),
        loss=unknown,
    ),
    "a NaN batch in the middle": case(
        "trained", (1, 0, 0, 0), loss=lambda i: NAN if i == 50 else 2
    ),
    "one overflow, no loss on record": case(
        "trained", (0, 0, 0, 1), overflows=lambda i, _: i == 50, loss=unknown
    ),
    "three overflows, then none": case("trained", (0, 3, 0, 0), overflows=above(8192)),
    "from 2**24": case("trained", (0, 21, 0, 0), overflows=above(8), init_scale=2.0**24),
    "batches differ while it settles": case(
        "trained", (0, 5, 0, 0), overflows=lambda i, _: i in (0, 1, 2, 6, 17)
    ),
    "not yet settled": case("trained", (0, 5, 0, 0), windows=10, overflows=above(2048)),
    "nothing went well yet": case(
        "untrained", (0, 20, 0, 0), windows=20, overflows=above(0), init_scale=2.0**24
    ),
    "every growth overflows": case(
        "trained", (0, 0, 20, 0), windows=420, overflows=above(65536), growth_interval=20
    ),
    "all skipped": case("untrained", (0, 16, 0, 84), overflows=above(0), loss=unknown),
    "all skipped for a loss of NaN": case("untrained", (100, 0, 0, 0), loss=lambda _: NAN),
    "all skipped at the floor": case(
        "untrained", (0, 2, 0, 98), overflows=above(0), min_scale=16384.0, loss=unknown
    ),
    "resumed, one overflow": case(
        "trained", (0, 0, 0, 1), overflows=lambda i, _: i == 3, growth_tracker=700
    ),
    "stuck": case("stuck", (0, 0, 0, 40), overflows=lambda i, _: i >= 60),
    "NaN, skipped": case("stuck", (10, 0, 0, 0), loss=lambda i: 4.0 if i < 90 else NAN),
    "NaN, stepped": case("diverged", loss=lambda i: 4.0 if i < 90 else NAN, scaled=False),
    "the norm becomes NaN": case(
        "diverged", overflows=lambda i, _: i >= 97, loss=unknown, scaled=False
    ),
    "neither loss nor norm on record": case("trained", loss=unknown, knows_norms=False),
}


def counts(of: Diagnosis) -> Counts:
    forward, search, growth, other = (
        of.kinds[kind] for kind in ("forward", "search", "growth", "other")
    )
    return forward, search, growth, other


@pytest.mark.parametrize("name", CASES)
def test_the_history_and_the_file_find_the_same_and_the_right(name: str, tmp_path: Path) -> None:
    course, kind, expected = CASES[name]
    records = course.records()
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*course.lines(records), encode_line("end")]) + "\n")
    history, run = live(course, records), read_run(path)
    found = history.diagnosis()
    assert (found.kind, *counts(found)) == (kind, *expected)
    assert known(found) == known(run)
    assert found.windows == course.windows
    text = verdict(run, is_file=True)
    assert text == verdict(history.diagnosis())
    starts = {"trained": "Trained", "partly": "Trained in part", "diverged": "Diverged"}
    starts |= {"stuck": "Did not train past", "untrained": "Nothing was trained"}
    assert text.startswith(starts[kind]), text
    # Half a line at the end is a file of the windows before.
    count = len(records) // 2
    path.write_text("\n".join(course.lines(records[: count + 1]))[:-20])
    cut = read_run(path)
    assert (cut.windows, cut.sessions[-1].ended, cut.broken) == (count, False, 1)
    assert known(cut) == known(live(course, records[:count]).diagnosis())


def test_a_run_that_goes_on_has_a_search_a_loss_and_a_streak_of_its_own(tmp_path: Path) -> None:
    first = Course(overflows=above(8192), loss=lambda i: 11.0)
    fresh = Course(overflows=lambda i, _: i < 2, loss=lambda i: 3.0)
    resumed = replace(fresh, overflows=lambda i, _: i == 3, init_scale=8192.0, growth_tracker=97)
    path = tmp_path / "run.jsonl"
    cases: list[tuple[Course, Kind, Counts]] = [
        (fresh, "trained", (0, 5, 0, 0)),
        (resumed, "trained", (0, 3, 0, 1)),
        (replace(fresh, overflows=lambda i, _: i >= 30), "stuck", (0, 3, 0, 70)),
    ]
    for second, kind, expected in cases:
        lines = [line for c in (first, second) for line in c.lines(c.records())]
        path.write_text("\n".join([*lines, encode_line("end")]) + "\n")
        found = read_run(path)
        assert (found.kind, *counts(found)) == (kind, *expected)
        assert found.place(112) == "step 12 of session 2"
        if kind == "stuck":
            assert verdict(found).startswith("Did not train past step 29 of session 2:")


def test_after_a_heal_the_scale_is_searched_for_again() -> None:
    records = Course(overflows=lambda i, s: i in (0, 1, 3, 6)).records()
    records[1] = replace(records[1], next_scale=65536.0, healed=("a",), growth_tracker=9)
    found = live(Course(), records).diagnosis()
    assert counts(found) == (0, 4, 0, 0)


def seen(where: str, module: str = "", cls: str = "", given: Any = (0.0, 1.0)) -> dict[str, Any]:
    first = {"where": where, "module": module, "class": cls, "text": "it began"}
    return {**first, "micro_batch": 0, "input": given, "output": None}


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
def test_what_the_finder_saw_decides_the_kind_too(where: str, output: Any, forward: int) -> None:
    first = {**seen(where, "a", "B"), "output": output}
    course = Course(overflows=lambda i, _: i == 60, loss=unknown, first=first)
    assert counts(diagnosed(course)) == (forward, 0, 0, 1 - forward)


def test_headroom_is_counted_in_doublings() -> None:
    assert [headroom(x) for x in (65504.0, 65504.0 / 4, 65504.0 * 2)] == [0, 2, -1]
    assert [headroom(x) for x in (0.0, INF, 5e-324)] == [INF, -INF, INF]


# The verdict: never more than is known.

STREAK = Course(40 + STUCK, lambda i, _: i >= 40, loss=unknown)
CAUSES = [
    (seen("forward", "a.wo", "Linear"), "fp32_modules=['a.wo']"),
    (seen("forward"), "in float32,"),
    (seen("backward", "a", "Linear"), "Next: attach(..., heal=True), "),
    (seen("loss"), "in float32,"),
    (seen("forward", "a", "Net", ("nan", "nan")), "data"),
    (None, "Next: attach(..., heal=True), which names where it begins, "),
]


@pytest.mark.parametrize(("first", "remedy"), CAUSES)
def test_a_run_that_is_stuck_names_where_it_began_and_the_remedy(
    first: dict[str, Any] | None, remedy: str
) -> None:
    of = diagnosed(replace(STREAK, first=first))
    finding = streak(of)
    assert finding is not None
    assert str(STUCK) in finding.title
    assert remedy in finding.text
    assert ("it began" in finding.text) == (first is not None)
    assert verdict(of).startswith("Did not train past step 39: ")
    assert f"{finding.title} {finding.text}" in verdict(of)


@pytest.mark.parametrize(
    ("set_in", "settings", "contains"),
    [
        (
            "flags",
            {},
            ["Next: accel-scaler launch --heal, ", "; or, by name, --fp32_modules a.act."],
        ),
        (
            "flags",
            {"fp32_modules": ["*.wo"]},
            ["launch --heal, ", "; or, by name, --fp32_modules '*.wo,a.act'."],
        ),
        (
            "run.yaml",
            {"fp32_modules": ["*.wo"]},
            [
                "Next: heal: true in the section accel_scaler of run.yaml, ",
                "; or, by name, fp32_modules: ['*.wo', 'a.act'].",
            ],
        ),
        (
            "run.json",
            {"fp32_modules": ["*.wo"]},
            [
                'Next: "heal": true in the section ',
                '; or, by name, "fp32_modules": ["*.wo", "a.act"]',
            ],
        ),
        (
            "code",
            {"fp32_modules": ["*.wo"]},
            ["Next: attach(..., heal=True), ", "; or, by name, fp32_modules=['*.wo', 'a.act']."],
        ),
        ("code", {"fp32_modules": 5}, ["fp32_modules=['a.act']"]),
        ("code", {"fp32_modules": ["*a"]}, ["Next: attach(..., heal=True), "]),
        (
            "code",
            {"heal": True, "fp32_modules": ["b"]},
            ["heal has found no cure, as the log says. Train in bfloat16 or float32."],
        ),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_a_verdict_is_written_as_the_run_was_set_and_keeps_what_is_in_force(
    set_in: str, settings: dict[str, Any], contains: list[str], is_file: bool
) -> None:
    first = {**seen("forward", "a.act", "Act"), "output": ["inf", "inf"]}
    records = Course(40, lambda i, _: True, loss=unknown, first=first).records()
    begun = encode_line("start", format=FORMAT, precision="fp16", set_in=set_in, settings=settings)
    start = Start(facts={"precision": "fp16", "set_in": set_in}, settings=settings)
    of = Diagnosis()
    read = decode(begun.encode()) if is_file else start
    assert isinstance(read, Start)
    of.begin(read)
    for record in records:
        of.add(record)
    text = verdict(of)
    assert text.startswith("Nothing was trained: 40 windows, 40 skipped")
    for part in contains:
        assert part in text
    is_known = settings.get("fp32_modules") == ["*a"] or "heal" in settings
    assert ("by name" in text) == (not is_known), "it holds a.act, or heal has tried it"
    assert "learning rate" not in text, "no step was taken at any"


def test_without_a_report_of_the_finder_the_names_of_tensors_are_used() -> None:
    named = verdict(diagnosed(replace(STREAK, overflowed=("a.wo.weight", "b"))))
    assert "in: a.wo.weight, b. " in named
    assert "heal=True" in named


def test_a_streak_at_the_end_counts_once_it_is_long_or_has_ended_the_run() -> None:
    short = replace(STREAK, windows=40 + STUCK - 1)
    assert verdict(diagnosed(short)).startswith("Trained in part")
    few = replace(STREAK, windows=42)
    ended = verdict(diagnosed(few, "OverflowStreakError: 2 in a row."), is_file=True)
    assert ended.startswith("Did not train past step 39: 42 windows, 2 skipped")
    assert ended.endswith("step 41: OverflowStreakError: 2 in a row.")
    cut = verdict(diagnosed(few, "StepError: " + 300 * "x"), is_file=True)
    assert cut.endswith("StepError: " + 189 * "x" + "...")
    assert verdict(diagnosed(few, "StepError: it broke"), is_file=True).startswith("Trained:")


def test_a_search_that_is_not_over_is_no_fault_of_a_module() -> None:
    course = Course(5, above(0), loss=unknown, first=seen("backward", "a", "B"))
    text = verdict(diagnosed(course))
    assert text.startswith("Nothing was trained: 5 windows")
    assert text.endswith("begin there: init_scale=2048.0.")
    for way, written in (("flags", "--init_scale 2048"), ("run.yaml", "init_scale: 2048")):
        of = Diagnosis()
        of.begin(Start(facts={"set_in": way}))
        for record in course.records():
            of.add(record)
        assert verdict(of).endswith(f"begin there: {written}.")


def test_what_else_the_verdict_says() -> None:
    assert verdict(History().diagnosis()).startswith("Nothing was trained")
    assert verdict(diagnosed(Course())) == "Trained: 100 windows, none skipped."
    skips = verdict(diagnosed(Course(420, above(8192), growth_interval=60)))
    assert skips.endswith("(2.1 %): 3 while the scale settled, 6 after the scale had grown."), skips
    plain = Course(7, scaled=False)
    assert verdict(diagnosed(plain)) == "Trained: 7 windows, none skipped."
    bad = verdict(diagnosed(replace(plain, overflows=lambda i, _: i == 3, loss=unknown)))
    assert bad.startswith("Trained with a problem: 7 windows, none skipped.")
    assert "1 window (step 3)" in bad
    fell = Course(overflows=lambda i, _: 40 <= i < 46, loss=unknown)
    assert "6 windows (step 40 to step 45)" in verdict(diagnosed(fell))
    floor = verdict(diagnosed(replace(fell, min_scale=1024.0)))
    assert "min_scale = 1024 (step 45)" in floor
    partly = Course(overflows=lambda i, _: i >= 40 and i % 5 == 0, loss=unknown)
    assert verdict(diagnosed(partly)).startswith("Trained in part: 100 windows, 12 skipped")


def test_a_run_of_spikes_is_no_fault_of_a_module_and_searches_for_no_scale() -> None:
    found = Diagnosis()
    found.begin(Course(scaled=False).start)
    for index in range(40):
        is_spike = index >= 15
        found.add(Record(index, 1.0, 1.0, skipped=is_spike, grad_norm=9.0, spike=is_spike))
    text = verdict(found)
    assert text.startswith("Did not train past step 14: 40 windows, 25 skipped")
    assert text.endswith("Look at the data of these windows, or raise skip_norm_above.")
    assert skips(found).text == "62.5 % of the windows trained nothing."


def test_a_spike_says_nothing_of_overflows_before_it() -> None:
    found = Diagnosis()
    found.begin(Course(scaled=False).start)
    for index in range(40):
        is_spike, is_inf = index == 39, index in (10, 20)
        record = Record(
            index, 1.0, 1.0, skipped=is_spike or is_inf, grad_norm=INF if is_inf else 1.0
        )
        found.add(replace(record, spike=is_spike, found_inf=is_inf))
    finding = overflow(found)
    assert finding is not None
    assert "2 windows (step 10 to step 20)" in finding.title
    assert "spike" not in finding.text
    assert "find_overflow='replay'" in finding.text


def test_healed_modules_are_the_line_for_the_config() -> None:
    records = Course(30, above(8192), loss=unknown).records()
    records[1] = replace(records[1], healed=("a.wo", "b.wo"))
    text = verdict(live(Course(), records).diagnosis())
    assert text.startswith("Trained: 30 windows, 3 skipped (10 %)")
    assert "a.wo (from step 1 on)" in text
    assert text.endswith("fp32_modules=['a.wo', 'b.wo'].")
