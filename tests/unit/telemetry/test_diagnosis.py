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
from accel_scaler.telemetry import Diagnosis, End, History, Record, Start, verdict
from accel_scaler.telemetry.diagnosis import STUCK, Kind
from accel_scaler.telemetry.findings import as_set, is_well, overflow, rise, skips, streak
from accel_scaler.telemetry.record import FORMAT, encode_line, encode_window

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
    "normal": case("stepped"),
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
        "stepped", (1, 0, 0, 0), loss=lambda i: NAN if i == 50 else 2.0
    ),
    "one overflow, no loss on record": case(
        "stepped", (0, 0, 0, 1), overflows=lambda i, _: i == 50, loss=unknown
    ),
    "three overflows, then none": case("stepped", (0, 3, 0, 0), overflows=above(8192)),
    "from 2**24": case("stepped", (0, 21, 0, 0), overflows=above(8), init_scale=2.0**24),
    "batches differ while it settles": case(
        "stepped", (0, 5, 0, 0), overflows=lambda i, _: i in (0, 1, 2, 6, 17)
    ),
    "nothing went well yet": case(
        "untrained", (0, 20, 0, 0), windows=20, overflows=above(0), init_scale=2.0**24
    ),
    "every growth overflows": case(
        "stepped", (0, 0, 20, 0), windows=420, overflows=above(65536), growth_interval=20
    ),
    "two overflows apart, far above where it grew from": case(
        "stepped",
        (0, 0, 2, 0),
        windows=300,
        overflows=lambda i, _: i in (185, 204),
        growth_interval=30,
        loss=unknown,
    ),
    "all skipped": case("untrained", (0, 16, 0, 84), overflows=above(0), loss=unknown),
    "all skipped for a loss of NaN": case("untrained", (100, 0, 0, 0), loss=lambda _: NAN),
    "all skipped at the floor": case(
        "untrained", (0, 2, 0, 98), overflows=above(0), min_scale=16384.0, loss=unknown
    ),
    "resumed, one overflow": case(
        "stepped", (0, 0, 0, 1), overflows=lambda i, _: i == 3, growth_tracker=700
    ),
    "stuck": case("stuck", (0, 0, 0, 40), overflows=lambda i, _: i >= 60),
    "NaN, skipped": case("stuck", (10, 0, 0, 0), loss=lambda i: 4.0 if i < 90 else NAN),
    "NaN, stepped": case("diverged", loss=lambda i: 4.0 if i < 90 else NAN, scaled=False),
    "the norm becomes NaN": case(
        "diverged", overflows=lambda i, _: i >= 97, loss=unknown, scaled=False
    ),
    "the loss rises from 4 to 20,000": case(
        "diverged", windows=12, loss=lambda i: 4.0 * 5000 ** (i / 11)
    ),
    "it rises some times over": case("stepped", loss=lambda i: 4.0 + i / 4),
    "two odd batches at the end": case("stepped", loss=lambda i: 4.0 if i < 98 else 1e5),
    "it rises from below 0, where no ratio tells": case("stepped", loss=lambda i: i - 1.0),
    "it rises while nothing is stepped": case(
        "untrained", (0, 12, 0, 0), windows=12, overflows=above(0), loss=lambda i: 4.0**i
    ),
    "neither loss nor norm on record": case("stepped", loss=unknown, knows_norms=False),
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
    starts = {
        "stepped": f"{course.windows} steps, ",
        "partly": "Stepped in part: ",
        "diverged": "Diverged: ",
    }
    starts |= {"stuck": "Did not train past", "untrained": "Nothing was trained"}
    is_fine = kind == "stepped" and text.startswith("With a problem: ")
    assert is_fine or text.startswith(starts[kind]), text
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
        (fresh, "stepped", (0, 5, 0, 0)),
        (resumed, "stepped", (0, 3, 0, 1)),
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


# The verdict: never more than is known.

STREAK = Course(40 + STUCK, lambda i, _: i >= 40, loss=unknown)
CAUSES = [
    (seen("forward", "a.wo", "Linear"), "fp32_modules=['a.wo']"),
    (seen("forward"), "in float32,"),
    (seen("backward", "a", "Linear"), "Next: heal=True (--heal), "),
    (seen("loss"), "in float32,"),
    (seen("forward", "a", "Net", ("nan", "nan")), "data"),
    (None, "Next: heal=True (--heal), which names where it begins, "),
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


def test_a_setting_is_written_for_code_and_for_a_launch() -> None:
    assert as_set("heal", True) == "heal=True (--heal)"
    names = "fp32_modules=['*.wo', 'a'] (--fp32_modules '*.wo,a')"
    assert as_set("fp32_modules", ["*.wo", "a"]) == names


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"fp32_modules": ["*.wo"]},
            "; or, by name, fp32_modules=['*.wo', 'a.act'] (--fp32_modules '*.wo,a.act').",
        ),
        ({"fp32_modules": ["*a"]}, "keeps in float32 what overflows at any scale."),
        ({"heal": True}, "heal has found no cure, as the log says. Train in bfloat16 or float32."),
    ],
)
def test_a_remedy_keeps_what_is_in_force(settings: dict[str, Any], remedy: str) -> None:
    first = {**seen("forward", "a.act", "Act"), "output": ["inf", "inf"]}
    of = Diagnosis()
    of.begin(Start(facts={"precision": "fp16"}, settings=settings))
    for record in Course(40, lambda i, _: True, loss=unknown, first=first).records():
        of.add(record)
    text = verdict(of)
    assert text.startswith("Nothing was trained: 40 steps, 40 skipped")
    assert text.endswith(remedy), "no step was taken at any learning rate"


def test_without_a_report_of_the_finder_the_names_of_tensors_are_used() -> None:
    named = verdict(diagnosed(replace(STREAK, overflowed=("a.wo.weight", "b"))))
    assert "in: a.wo.weight, b. " in named
    assert "heal=True" in named


def test_a_streak_at_the_end_counts_once_it_is_long_or_has_ended_the_run() -> None:
    short = replace(STREAK, windows=40 + STUCK - 1)
    assert verdict(diagnosed(short)).startswith("Stepped in part: ")
    few = replace(STREAK, windows=42)
    ended = verdict(diagnosed(few, "OverflowStreakError: 2 in a row."), is_file=True)
    assert ended.startswith("Did not train past step 39: 42 steps, 2 skipped")
    assert ended.endswith("step 41: OverflowStreakError: 2 in a row.")
    cut = verdict(diagnosed(few, "StepError: " + 300 * "x"), is_file=True)
    assert cut.endswith("StepError: " + 189 * "x" + "...")
    broken = verdict(diagnosed(few, "StepError: it broke"), is_file=True)
    assert broken.startswith("42 steps, 2 skipped")


def test_a_search_that_is_not_over_is_no_fault_of_a_module() -> None:
    course = Course(5, above(0), loss=unknown, first=seen("backward", "a", "B"))
    text = verdict(diagnosed(course))
    assert text.startswith("Nothing was trained: 5 steps")
    assert text.endswith("begin there: init_scale=2048.0 (--init_scale 2048).")


def test_what_else_the_verdict_says() -> None:
    assert verdict(History().diagnosis()).startswith("Nothing was trained")
    silent = diagnosed(Course(loss=unknown))
    assert verdict(silent) == "100 steps, none skipped."
    assert is_well(silent)
    skips = verdict(diagnosed(Course(420, above(8192), unknown, growth_interval=60)))
    searched = "3 while the scale was still being searched for"
    assert skips.endswith(f"(2.14 %): {searched}, 6 after the scale had grown."), skips
    plain = Course(7, scaled=False)
    assert verdict(diagnosed(plain)).startswith("7 steps, none skipped. Loss: first 4, ")
    bad = verdict(diagnosed(replace(plain, overflows=lambda i, _: i == 3, loss=unknown)))
    assert bad.startswith("With a problem: 7 steps, none skipped.")
    assert "1 step (step 3)" in bad
    fell = Course(overflows=lambda i, _: 40 <= i < 46, loss=unknown)
    assert "6 steps (step 40 to step 45)" in verdict(diagnosed(fell))
    floor = verdict(diagnosed(replace(fell, min_scale=1024.0)))
    assert "min_scale = 1024 (step 45)" in floor
    partly = Course(overflows=lambda i, _: i >= 40 and i % 5 == 0, loss=unknown)
    assert verdict(diagnosed(partly)).startswith("Stepped in part: 100 steps, 12 skipped")


def test_a_run_whose_loss_rose_has_diverged_and_says_from_where_to_where() -> None:
    risen = Course(12, loss=lambda i: 4.0 * 5000 ** (i / 11), scaled=False)
    of = diagnosed(risen)
    finding = rise(of)
    assert finding is not None
    assert "learning rate" in finding.text
    counts, losses, *rest = verdict(of).split(". ")
    assert counts == "Diverged: 12 steps, none skipped"
    assert losses == "Loss: first 4, lowest 4, last 20000"
    assert ". ".join(rest) == f"{finding.title} {finding.text}"
    assert not is_well(of)


def test_losses_of_two_sessions_are_not_compared() -> None:
    of = Diagnosis()
    for course in (Course(loss=lambda i: 0.5), Course(loss=lambda i: 90.0 - i / 2)):
        of.begin(course.start)
        for record in course.records():
            of.add(record)
    assert (of.kind, rise(of)) == ("stepped", None)
    assert verdict(of).endswith("Loss of the last session: first 90, lowest 40.5, last 40.5.")


def test_a_nan_that_was_seen_to_begin_in_a_backward_is_no_search_for_a_scale() -> None:
    """Of finite numbers an overflow makes inf, in a lower scale none."""
    nan = {**seen("backward", "a", "B", ["nan", "nan"]), "output": [-3.0, 3.0]}
    inf = {**nan, "input": ["-inf", "inf"]}
    for first, is_found in ((nan, True), (inf, False), (None, False)):
        for windows in (7, 16):
            text = verdict(diagnosed(Course(windows, above(0), unknown, first=first)))
            assert ("begin there: init_scale=" in text) == (not is_found)
            assert ("fp32_modules=['a']" in text) == is_found


def test_what_another_rank_saw_in_its_forward_is_the_run_s() -> None:
    """Here the loss is fine, and the first rank has been told."""
    first = {**seen("forward", "a", "B"), "text": "it began (rank 1)"}
    course = Course(overflows=lambda i, _: i == 50, loss=lambda i: 2.0, first=first)
    text = verdict(diagnosed(course))
    assert text.startswith("With a problem: 100 steps, 1 skipped")
    assert "1 step (step 50)" in text
    assert "Step 50: it began (rank 1)." in text


def test_a_run_of_spikes_is_no_fault_of_a_module_and_searches_for_no_scale() -> None:
    found = Diagnosis()
    found.begin(Course(scaled=False).start)
    for index in range(40):
        is_spike = index >= 15
        found.add(Record(index, 1.0, 1.0, skipped=is_spike, grad_norm=9.0, spike=is_spike))
    text = verdict(found)
    assert text.startswith("Did not train past step 14: 40 steps, 25 skipped")
    assert (
        "above skip_norm_above=None. Look at the data of these steps, or raise it; 4x is four"
        in text
    )
    assert skips(found).text == "62.5 % of the steps trained nothing."


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
    assert "2 steps (step 10 to step 20)" in finding.title
    assert "spike" not in finding.text
    assert "find_overflow='replay'" in finding.text


def test_healed_modules_are_the_line_for_the_config() -> None:
    records = Course(30, above(8192), loss=unknown).records()
    records[1] = replace(records[1], healed=("a.wo", "b.wo"))
    text = verdict(live(Course(), records).diagnosis())
    assert text.startswith("30 steps, 3 skipped (10 %)")
    assert "a.wo (from step 1 on)" in text
    assert text.endswith("fp32_modules=['a.wo', 'b.wo'] (--fp32_modules a.wo,b.wo).")
