"""The findings: each in its own case, each number as a slow count has it, no two of two minds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.console import number, percent, written
from accel_scaler.report.reader import Run, read_run
from accel_scaler.report.summary import find, in_words, key_numbers
from accel_scaler.telemetry import Finding, ending
from accel_scaler.telemetry.findings import healed, loss, overflow, skips

CULPRIT = "transformer.h.3.mlp.c_fc.weight"


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


RULES = (ending, healed, loss, overflow, skips)


def found(tmp_path: Path, lines: list[Any]) -> dict[str, Finding]:
    """The findings of a run, under the names of their functions."""
    run = read(tmp_path, lines)
    every = {rule.__name__: rule(run) for rule in RULES}
    return {name: finding for name, finding in every.items() if finding is not None}


def numbers_of(run: Run) -> dict[str, str]:
    return {each.name: f"{each.value} {each.more}".strip() for each in key_numbers(run)}


def with_first(lines: list[Any], step: int, **of: Any) -> list[Any]:
    first = {"where": "", "module": "", "text": "", "input": None, "output": None} | of
    return [line | {"first": first} if line.get("step") == step else line for line in lines]


def test_bad_findings_come_first_and_the_culprit_is_named(tmp_path: Path) -> None:
    lines = t.story(500, lambda step, _: 300 <= step <= 410 and step % 11 == 3)
    findings = find(read(tmp_path, lines))
    assert [each.level for each in findings] == ["bad", "note"]
    assert f"in: {CULPRIT}, " in findings[0].text


@pytest.mark.parametrize(
    ("bad", "interval", "count", "level"),
    [
        ((185, 186, 187), 30, 300, None),  # the scale had grown far above where it was fine
        ((35, 36, 45, 46), 31, 60, "warn"),  # below where it was fine
        (tuple(range(189, 330, 9)), 30, 330, "bad"),  # far below, though each step is short
    ],
)
def test_an_alarm_is_overflows_where_the_run_was_fine(
    bad: tuple[int, ...], interval: int, count: int, level: str | None, tmp_path: Path
) -> None:
    story = t.story(count, lambda s, _: s in bad, growth_interval=interval)
    finding = found(tmp_path, story).get("overflow")
    assert (None if finding is None else finding.level) == level


@pytest.mark.parametrize(("low", "floor"), [(1.0, None), (0.0, None), (128.0, 128.0)])
def test_a_scale_of_one_or_less_or_at_its_floor_is_bad(
    low: float, floor: float | None, tmp_path: Path
) -> None:
    lines = [t.start(settings={"min_scale": floor}), *(t.window(s, 2 * low) for s in range(30))]
    lines += [t.window(30, 2 * low, True, next_scale=low), t.window(31, low), t.end(32)]
    finding = found(tmp_path, lines)["overflow"]
    assert finding.level == "bad"
    assert f"{low:g} (step {30 if low else 0})" in finding.title


def test_how_it_ended(tmp_path: Path) -> None:
    lines = t.story(40, lambda *_: False)
    killed = found(tmp_path, lines[:-1])["ending"]
    assert (killed.level, "step 39" in killed.title) == ("warn", True)
    failed = found(tmp_path, [*lines[:-1], t.end(40, "StepError: x")])["ending"]
    assert failed.level == "bad"
    assert failed.title.endswith("step 39: StepError: x.")
    short = [*t.story(5, lambda *_: False)[:-1], t.end(5, "StepError: x")]
    assert "ending" not in found(tmp_path, [*short, *lines])
    assert find(read(tmp_path, []))[0].title == "There were no steps."
    assert "there were no steps" in in_words(read(tmp_path, [t.start()]))


def test_a_file_of_an_older_release_is_read_without_its_retired_fields(tmp_path: Path) -> None:
    new = t.story(9, lambda *_: False, with_times=True)
    retired = {"step_mode": "auto", "fold_unscale": True, "optimizer_threads": 2}
    old = [new[0] | {"settings": new[0]["settings"] | retired}]
    for line in new[1:]:
        of_window = {"step_mode": "overlap", "mode_seconds": [0.3, 0.2]}
        old.append(line | of_window if line["kind"] == "window" else line)
    ours, theirs = read(tmp_path, old), read(tmp_path, new)
    assert ours.broken == 0
    assert find(ours) == find(theirs)
    assert key_numbers(ours) == key_numbers(theirs)


@pytest.mark.parametrize(
    ("precision", "is_scaled"), [("fp16", True), ("bf16", False), ("no", False)]
)
def test_float32_is_a_cure_in_fp16_alone(tmp_path: Path, precision: str, is_scaled: bool) -> None:
    """bfloat16 reaches as far as float32, and only in fp16 is a scale searched for."""
    first = {"where": "forward", "module": "m.log", "input": (0.0, 2.5), "text": "forward of m.log"}
    lines = [t.start(precision=precision), *(t.window(s, 1.0) for s in range(40))]
    bad = [t.window(s, 1.0, True, next_scale=1.0, loss="nan") for s in range(40, 60)]
    texts = found(tmp_path, [*lines, *with_first(bad, 40, **first)])
    assert "m.log" in texts["loss"].text
    assert ("fp32_modules=['m.log']" in texts["loss"].text) == is_scaled
    assert ("search" in texts["skips"].text) == is_scaled
    assert "33.3 %" in texts["skips"].text


def test_many_skips_are_a_share_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(400, lambda s, _: s > 100 and s % 4 == 0, growth_interval=2)
    finding = found(tmp_path, lines)["skips"]
    assert (finding.level, "18.5 %" in finding.text) == ("warn", True)


def test_what_is_healed_needs_no_other_remedy(tmp_path: Path) -> None:
    lines = t.story(200, lambda s, _: 100 <= s < 104)
    for line in lines:
        if line.get("step") == 103:
            line["healed"] = ["transformer.h.3.mlp"]
    lines = with_first(lines, 103, where="backward", module=CULPRIT[:-7])
    by_subject = found(tmp_path, lines)
    assert by_subject["overflow"].text.endswith("heal keeps it in float32.")
    assert "transformer.h.3.mlp (from step 103 on)" in by_subject["healed"].title


def test_numbers_are_short() -> None:
    shares = [(0, 5), (5, 5), (1, 3), (1, 10**6), (999_999, 10**6), (1, 0)]
    assert [percent(*share) for share in shares] == [
        *("0 %", "100 %", "33.3 %", "0.0001 %", "100 %", "0 %")
    ]
    values = [65536.0, 0.5, 1e9, 3.14159, math.inf]
    assert list(map(number, values)) == ["65536", "0.5", "1000000000", "3.142", "inf"]
    settings_ = [None, True, 65536.0, 1e-8, "sync", (), ["a", "b.c"], 3]
    assert list(map(written, settings_)) == [
        *("none", "true", "65536", "1e-08", "sync", "[]", "[a, b.c]", "3")
    ]
