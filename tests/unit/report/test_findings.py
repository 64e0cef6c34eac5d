"""The findings: each in its own case, each number as a slow count has it, no two of two minds."""

from __future__ import annotations

import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.console import number, percent, written
from accel_scaler.report.findings import clipping, find, underflow, waiting
from accel_scaler.report.key_numbers import key_numbers
from accel_scaler.report.reader import read_run
from accel_scaler.report.run import Run
from accel_scaler.report.text import in_words
from accel_scaler.telemetry import Finding, ending, verdict
from accel_scaler.telemetry.diagnosis import SETTLED
from accel_scaler.telemetry.findings import healed, loss, overflow, parameters, skips

CULPRIT = "transformer.h.3.mlp.c_fc.weight"


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


RULES = (ending, healed, loss, parameters, overflow, skips, clipping, underflow, waiting)


def found(tmp_path: Path, lines: list[Any]) -> dict[str, Finding]:
    """The findings of a run, under the names of their functions."""
    run = read(tmp_path, lines)
    every = {rule.__name__: rule(run) for rule in RULES}
    return {name: finding for name, finding in every.items() if finding is not None}


def numbers_of(run: Run) -> dict[str, str]:
    return {each.name: f"{each.value} {each.more}".strip() for each in key_numbers(run)}


def with_first(lines: list[Any], step: int, **first: Any) -> list[Any]:
    return [line | {"first": first} if line.get("step") == step else line for line in lines]


@pytest.mark.parametrize(
    ("story", "what"),
    [
        (t.story(100, lambda *_: False), "100 windows, none skipped."),
        (
            t.story(100, lambda _, s: s > 8192),
            "100 windows, 3 skipped (3 %): 3 while the scale settled.",
        ),
        (
            t.story(2000, lambda _, s: s > 65536, growth_interval=100),
            "2,000 windows, 19 skipped (0.9 %): 19 after the scale had grown.",
        ),
        # It grew from 65536 to 4194304; what two skips apart bring it to is still far above.
        (
            t.story(300, lambda s, _: s in (185, 204), growth_interval=30),
            "300 windows, 2 skipped (0.7 %): 2 after the scale had grown.",
        ),
    ],
)
def test_the_skips_of_an_ordinary_run_are_good(story: list[Any], what: str, tmp_path: Path) -> None:
    by_subject = found(tmp_path, story)
    assert (by_subject["skips"].level, by_subject["skips"].title) == ("good", what)
    assert {finding.level for finding in by_subject.values()} <= {"good", "note"}


def test_a_fall_names_scale_step_layer_and_count(tmp_path: Path) -> None:
    lines = t.story(500, lambda step, _: 300 <= step <= 410 and step % 11 == 3)
    windows = [line for line in lines if line["kind"] == "window"]
    skips = [w["step"] for w in windows if w["skipped"]]
    first = find(read(tmp_path, lines))[0]
    assert (first.level, first) == ("bad", found(tmp_path, lines)["overflow"])
    assert first.title == (
        f"The scale fell to {windows[-1]['next_scale']:g} after step {skips[-1]} (from step "
        f"{skips[0]} on, from 65536, {len(skips)} skips): {CULPRIT} overflowed {len(skips)} times."
    )
    assert "find_overflow='replay'" in first.text
    lines = with_first(lines, skips[1], where="forward", module=CULPRIT[:-7], text="It became inf.")
    quoted = found(tmp_path, lines)["overflow"]
    assert f"At step {skips[1]}: It became inf." in quoted.text
    assert "find_overflow" not in quoted.text


@pytest.mark.parametrize(
    ("bad", "interval", "count", "level", "low"),
    [
        ((185, 186, 187), 30, 300, "warn", 524288),  # three in a row are no search
        ((35, 45), 31, 60, "warn", 32768),  # below where it was fine
        (tuple(range(189, 300, 9)), 30, 300, "bad", None),  # deep, though each step is short
    ],
)
def test_an_alarm_is_a_fall_below_where_the_run_was_fine(
    bad: tuple[int, ...], interval: int, count: int, level: str, low: int | None, tmp_path: Path
) -> None:
    story = t.story(count, lambda s, _: s in bad, growth_interval=interval)
    finding = found(tmp_path, story)["overflow"]
    assert finding.level == level
    assert finding.title.startswith(f"The scale fell to {low or ''}")


def test_one_layer_again_and_again_is_named_where_no_fall_is(tmp_path: Path) -> None:
    lines = t.story(3000, lambda s, scale: s > 20 and s % 400 == 0, growth_interval=300)
    run = read(tmp_path, lines)
    finding = overflow(run)
    assert finding is not None
    assert finding.title.startswith(
        f"{CULPRIT} is where {run.skips} of {run.skips} overflows began"
    )


def test_a_loss_that_is_nan_is_no_matter_of_layers_and_rates(tmp_path: Path) -> None:
    lines = t.story(60, lambda s, _: 30 <= s < 36)
    lines = [line | {"loss_nonfinite": 2} if line.get("skipped") else line for line in lines]
    by_subject = found(tmp_path, lines)
    of_loss = by_subject["loss"]
    assert of_loss.title == "The loss itself was inf or NaN in 6 windows (step 30 to step 35)."
    assert "smaller scale does not help" in of_loss.text
    assert by_subject["overflow"].text.endswith("As for the loss.")
    plain = [t.start(precision="no"), *(t.window(s, 1.0, loss="nan") for s in range(4))]
    assert "scale does not help" not in found(tmp_path, plain)["loss"].text


@pytest.mark.parametrize("low", [1.0, 0.0])
def test_a_scale_of_one_or_less_is_bad(low: float, tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(s, 4.0) for s in range(30))]
    lines += [t.window(30, 4.0, True, next_scale=low), t.window(31, low), t.end(32, 1)]
    finding = found(tmp_path, lines)["overflow"]
    assert finding.level == "bad"
    assert finding.title.startswith(
        f"The scale fell to {low:g} (step 30): at 1 or less it no longer"
    )


def test_a_scale_at_its_floor_is_bad(tmp_path: Path) -> None:
    lines = [t.start(settings={"min_scale": 128.0}), *(t.window(s, 256.0) for s in range(30))]
    lines += [t.window(30 + s, 128.0, True, next_scale=128.0) for s in range(10)]
    finding = found(tmp_path, lines)["overflow"]
    assert finding.level == "bad"
    assert "min_scale = 128 (step 30)" in finding.title
    assert finding.title.endswith("The scale stayed at 128 through 10 skips from step 30 on.")
    assert "Lower min_scale, or keep the layer with the largest gradients" in finding.text


def test_a_norm_mostly_above_the_threshold_is_counted(tmp_path: Path) -> None:
    norms = [0.5, 4.0, 2.0, 8.0, "inf"]
    lines = [t.start(), *(t.window(s, grad_norm=n, max_norm=1.0) for s, n in enumerate(norms))]
    finding = found(tmp_path, lines)["clipping"]
    assert "in 75 % of the windows (mean 3.625, threshold 1)" in finding.title
    half = [t.start(), *(t.window(s, grad_norm=n) for s, n in enumerate([1.0, 2.0]))]
    assert "clipping" not in found(tmp_path, half)


def ranged(largest: float, scale: float = 65536.0, low: float = 0.5, **settings: Any) -> list[Any]:
    """A run whose third window was measured."""
    lines = [t.start(settings=settings), t.names(["a"]), t.window(0, scale), t.window(1, scale)]
    measured = {"largest_gradient": largest, "zero_share": 0.25, "underflow": [[0, 0.25, low]]}
    return [*lines, t.window(2, scale, **measured), t.window(3, scale), t.end(4)]


def test_underflow_names_the_worst_of_the_last_measurement(tmp_path: Path) -> None:
    old, new = [[0, 1.0, 0.0]], [[0, 0.2, 0.0], [1, 0.6, 0.01], [2, 0.0, 0.125], [3, 0.9, 0.0005]]
    lines = [t.start(), t.names(["a", "b", "c", "rows that are not in the batch"])]
    lines += [t.window(0, underflow=old), t.window(1, underflow=new)]
    what = found(tmp_path, lines)["underflow"].title
    assert "2 of 4 parameters measured at step 1" in what
    assert "(b 60 % zero and 1 % subnormal, c 0 % zero and 12.5 % subnormal)" in what


def test_how_much_higher_the_scale_could_be(tmp_path: Path) -> None:
    lines = ranged(65504 / 8)
    lines[2] |= {"largest_gradient": 65504 / 2}
    rows = numbers_of(read(tmp_path, lines))
    assert rows["headroom"].startswith("3.0 doublings measured at step 2; least 1.0 doub")
    assert rows["zero gradients"] == "25 %"
    lines[-2] |= {"next_scale": 16384.0}  # the last scale counts
    assert numbers_of(read(tmp_path, lines))["headroom"].startswith("5.0 doublings")
    assert "headroom" not in numbers_of(read(tmp_path, t.story(9, lambda *_: False)))
    assert numbers_of(read(tmp_path, ranged(65504 * 4)))["headroom"].startswith("0.0 doublings")

    def advice(lines: list[Any]) -> str:
        return found(tmp_path, lines)["underflow"].text

    free = found(tmp_path, ranged(65504 / 64))["underflow"]
    assert "takes 1024 of float16's 65504: 6.0 doublings" in free.title
    assert f"init_scale={65536 * 2**5}, say." in free.text
    assert advice(ranged(65504 / 64, max_scale=65536.0)).endswith("Raise max_scale.")
    assert "Keep what overflows first" in advice(ranged(65504 / 4))
    grown = ranged(65504 / 64)
    grown[-2] |= {"next_scale": 131072.0}
    grown[-1:] = [t.window(4, 131072.0, True), t.window(5), t.end(6, 1)]
    assert "Keep what overflows first" in advice(grown)
    searched = t.story(100, lambda s, _: s < 10)
    searched[60] |= {"largest_gradient": 1.0, "zero_share": 0.3, "underflow": [[0, 0.6, 0.2]]}
    by_subject = found(tmp_path, searched)
    assert "smaller init_scale" in by_subject["skips"].text
    assert "init_scale" not in by_subject["underflow"].text


def test_how_it_ended(tmp_path: Path) -> None:
    lines = t.story(40, lambda *_: False)
    killed = found(tmp_path, lines[:-1])["ending"]
    assert killed.level == "warn"
    assert "no end line: it stopped after step 39 or was killed, or still trains" in killed.title
    failed = found(tmp_path, [*lines[:-1], t.end(40, 0, "StepError: x")])["ending"]
    assert failed.level == "bad"
    assert failed.title == "The run ended with an error after step 39: StepError: x."
    short = [*t.story(5, lambda *_: False)[:-1], t.end(5, 0, "StepError: x")]
    well = found(tmp_path, [*short * 6, *lines])["ending"]
    assert (well.level, well.text) == ("note", "A later session went on from there.")
    assert well.title.startswith("Session 6 ended with an error after step 4 of session 6: StepErr")
    assert well.title.endswith("5 sessions before it ended early, too.")
    assert find(read(tmp_path, []))[0].title == "No window closed."
    assert "no window closed" in in_words(read(tmp_path, [t.start()]))


@pytest.mark.parametrize(("waited", "level"), [(36_000, "warn"), (12_000, "good")])
def test_waiting_in_overlap_mode_is_measured(waited: int, level: str, tmp_path: Path) -> None:
    lines = t.story(50, lambda *_: False)
    lines[0] = t.start(settings={"step_mode": "overlap"})
    times = {"optimizer_us": 40_000, "waited_us": waited}
    lines = [line | times if line["kind"] == "window" else line for line in lines]
    finding = found(tmp_path, lines)["waiting"]
    assert finding.level == level
    assert f"{100 - waited / 400:g} % of the optimizer's time" in finding.title
    assert (f"waited {50 * waited / 1e6:.3g} s" in finding.title) == (level == "warn")


def test_how_far_off_previews_were_is_one_number(tmp_path: Path) -> None:
    errors = [0.5, 0.5, 0.5, 4.0, "inf", "nan"]  # the mean of those that are finite
    lines = [t.start(), *(t.window(s, preview_error=e) for s, e in enumerate(errors))]
    assert numbers_of(read(tmp_path, lines))["preview off by"] == "1.4 of the update"


def test_a_step_on_nan_without_scaling_is_bad_and_no_scale_is_reported(tmp_path: Path) -> None:
    lines = [t.start(precision="no"), *(t.window(s, 1.0) for s in range(5))]
    lines += [t.window(5, 1.0, grad_norm="nan"), t.window(6, 1.0, grad_norm="nan"), t.end(7)]
    finding = found(tmp_path, lines)["parameters"]
    assert finding.level == "bad"
    assert "in 2 windows that stepped all the same, first at step 5" in finding.title
    assert "no loss scaling" in numbers_of(read(tmp_path, lines))["scale"]


def test_many_skips_are_a_share_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(400, lambda s, _: s > 100 and s % 4 == 0, growth_interval=2)
    finding = found(tmp_path, lines)["skips"]
    assert finding.level == "warn"
    assert "18.5 % of the windows trained nothing" in finding.text
    assert "Raise growth_interval" in finding.text


def test_healed_modules_are_the_line_for_the_config(tmp_path: Path) -> None:
    lines = t.story(200, lambda s, _: 100 <= s < 104)
    for line in lines:
        if line.get("step") == 103:
            line["healed"] = ["transformer.h.3.mlp", "b"]
    by_subject = found(tmp_path, lines)
    assert by_subject["overflow"].text.endswith("heal keeps it in float32.")
    by_healed = by_subject["healed"]
    assert (
        "2 modules in float32: transformer.h.3.mlp (from step 103 on), b (from" in by_healed.title
    )
    assert "fp32_modules: ['transformer.h.3.mlp', 'b']" in by_healed.text


# Any run.


def slow_reference(windows: list[dict[str, Any]]) -> dict[str, int]:
    """Search, growth and other skips of one session, from the whole list at once."""
    skips = [w["skipped"] for w in windows]
    grows = [w["next_scale"] > w["scale"] for w in windows]
    backs_off = [w["next_scale"] < w["scale"] for w in windows]
    good = next((i for i, skipped in enumerate(skips) if not skipped), len(skips))

    def is_settled(i: int) -> bool:
        """The search is over before window i, or with its skip."""
        steady = any(not any(backs_off[e - SETTLED : e]) for e in range(SETTLED, i + 1))
        third = sum(skips[good : i + 1]) > 2
        return any(grows[:i]) or steady or third or (skips[i] and windows[i]["scale"] <= 1)

    settled = next((i for i in range(len(windows)) if is_settled(i)), len(windows))
    search, growth = sum(skips[:settled]), 0
    for i in range(settled, len(windows)):
        is_third = i >= 2 and all(skips[i - 2 : i])
        well = [windows[j]["scale"] for j in range(i) if grows[j]]
        if skips[i] and well and not is_third:
            growth += windows[i]["scale"] > min(well)
    return {"search": search, "growth": growth, "other": sum(skips) - search - growth}


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bad=st.sets(st.integers(0, 320), max_size=40),
    extra=st.sampled_from([0, 3, 30, 200]),
    count=st.integers(1, 320),
    interval=st.sampled_from([1, 3, 25, 2000]),
)
def test_every_count_equals_a_slow_count(
    bad: set[int], extra: int, count: int, interval: int, tmp_path: Path
) -> None:
    """Random overflows, a bad beginning of ``extra`` windows, growth often or never."""
    lines = t.story(
        count,
        lambda s, scale: s in bad or (s < extra and s % 3 == 0),
        growth_interval=interval,
        with_norms=False,
    )
    windows = [line for line in lines if line["kind"] == "window"]
    run, expected = read(tmp_path, lines), slow_reference(windows)
    assert {key: run.kinds[key] for key in ("search", "growth", "other")} == expected
    assert run.skips == run.origins.total() == sum(expected.values())
    streaks = [len(list(group)) for skipped, group in groupby(w["skipped"] for w in windows)]
    assert run.streak == (streaks[-1] if windows[-1]["skipped"] else 0)
    assert run.lowest is not None
    assert run.lowest[0] == min(min(w["scale"], w["next_scale"]) for w in windows)


ADVICE = {
    ("scale", "up"): r"init_scale=\d|Raise max_scale",
    ("scale", "down"): r"smaller init_scale|ower max_scale|set max_scale",
    ("growth_interval", "up"): r"Raise growth_interval",
    ("growth_interval", "down"): r"smaller growth_interval",
}
"""Each knob, and the two ways that it can be turned."""


@st.composite
def any_lines(draw: st.DrawFn) -> list[Any]:
    """Files with sessions of overflows, clips, measurements and losses, any of them."""
    lines: list[Any] = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 260))
        bad = draw(st.sets(st.integers(0, count), max_size=30))
        period = draw(st.sampled_from([0, 2, 3, 7, 40]))
        until = draw(st.sampled_from([0, 5, 30, count]))
        ceiling = draw(st.sampled_from([1e9, 65536.0, 64.0, 0.5]))
        largest = draw(st.sampled_from([None, 0.0, 1e-3, 1.0, 600.0, 40000.0, 1e6]))
        norm = draw(st.sampled_from([None, 0.1, 3.0]))
        healed = draw(st.sampled_from([(), ("transformer.h.3.mlp.c_fc",), ("other",)]))
        where = draw(st.sampled_from([None, "forward", "loss", "backward"]))
        more: dict[str, Any] = {"loss_nonfinite": draw(st.sampled_from([0, 1]))}
        if where is not None:
            more["first"] = {"where": where, "module": "transformer.h.3", "class": "C"}
        story = t.story(
            count,
            lambda s, scale, bad=bad, period=period, until=until, ceiling=ceiling: (
                s in bad or scale > ceiling or bool(period and s < until and s % period == 0)
            ),
            growth_interval=draw(st.sampled_from([2, 20, 2000])),
            first_scale=draw(st.sampled_from([65536.0, 2.0, 2.0**24])),
            with_norms=False,
        )
        floor = draw(st.sampled_from([None, 1.0, 4096.0]))
        ceiling = draw(st.sampled_from([None, 65536.0]))
        mode = draw(st.sampled_from(["sync", "overlap", "delayed"]))
        story[0]["settings"] |= {"min_scale": floor, "max_scale": ceiling, "step_mode": mode}
        story[0]["precision"] = draw(st.sampled_from(["fp16", "fp16", "fp16", "bf16"]))
        for line in story[2:-1]:
            line["scale"] = max(line["scale"], floor or 0.0)
            line["next_scale"] = max(line["next_scale"], floor or 0.0)
            line["grad_norm"] = norm or line["grad_norm"]
            if largest is not None and line["step"] % 10 == 0:
                line |= {"largest_gradient": largest, "zero_share": 0.3}
                line["underflow"] = [[0, 0.6, 0.2]]
            if mode != "sync":
                line |= {"optimizer_us": 1000, "waited_us": draw(st.sampled_from([0, 900]))}
            if line["skipped"]:
                line |= more
                line["healed"] = list(healed) * (line["step"] > count // 2)
        ends = draw(st.sampled_from(["well", "killed", "StepError: x", "OverflowStreakError: y"]))
        story[-1]["error"] = ends if "Error" in ends else None
        lines += story[:-1] if ends == "killed" else story
    return lines


@settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lines=any_lines())
def test_no_two_findings_contradict_each_other(lines: list[Any], tmp_path: Path) -> None:
    run = read(tmp_path, lines)
    findings, by_subject = find(run), found(tmp_path, lines)
    assert all(finding.title and "nan" not in finding.title for finding in findings)
    text = " ".join(finding.text for finding in findings)
    turned = [knob for (knob, _), words in ADVICE.items() if re.search(words, text)]
    assert len(turned) == len(set(turned)), text
    levels = {subject: finding.level for subject, finding in by_subject.items()}
    if levels.get("skips") == "good":
        assert levels.get("overflow") not in ("bad", "warn")
    # The verdict is at one with them.
    sentence = verdict(run, is_file=True)
    problems = [f.title for f in findings if f.level == "bad" and f != ending(run)]
    assert not (problems and sentence.startswith("Trained:")), problems
    if sentence.startswith("Did not train"):
        assert problems or "warn" in levels.values()


def test_numbers_are_short_and_a_share_never_rounds_to_nothing_or_to_all() -> None:
    shares = [(0, 5), (5, 5), (1, 3), (1, 10**6), (999_999, 10**6), (1, 0)]
    assert [percent(*share) for share in shares] == [
        *("0 %", "100 %", "33.3 %", "under 0.1 %", "over 99.9 %", "0 %")
    ]
    values = [65536.0, 0.5, 1e9, 3.14159, math.inf]
    assert list(map(number, values)) == ["65536", "0.5", "1000000000", "3.142", "inf"]
    settings_ = [None, True, 65536.0, 1e-8, "sync", (), ["a", "b.c"], 3]
    assert list(map(written, settings_)) == [
        *("none", "true", "65536", "1e-08", "sync", "[]", "[a, b.c]", "3")
    ]
