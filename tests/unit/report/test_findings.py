"""The summary in words: each sentence in its own case, each number as a slow count has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.console import number, percent, written
from accel_scaler.report.findings import Finding, facts, find
from accel_scaler.report.formatting import shorten, times
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.text import in_words
from accel_scaler.report.verdict import verdict_on
from accel_scaler.telemetry.skip_kinds import SETTLED

CULPRIT = "transformer.h.3.mlp.c_fc.weight"


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def found(tmp_path: Path, lines: list[Any]) -> list[Finding]:
    return find(read(tmp_path, lines))


def calm(lines: list[Any]) -> list[Any]:
    """The same run with every norm below the threshold, so that clipping is not the subject."""
    return [line | {"max_norm": 1e9} if line["kind"] == "window" else line for line in lines]


def the(findings: list[Finding], part: str) -> Finding:
    """The one finding that says so."""
    (one,) = [f for f in findings if part in f.what]
    return one


def test_a_run_without_overflow_says_only_that(tmp_path: Path) -> None:
    findings = found(tmp_path, calm(t.story(100, lambda *_: False)))
    assert [(f.level, f.what) for f in findings] == [("good", "No overflow in 100 windows.")]


def test_the_first_search_for_a_scale_is_normal(tmp_path: Path) -> None:
    findings = found(tmp_path, calm(t.story(100, lambda _, scale: scale > 8192)))
    assert findings[-1].level == "good"
    assert (
        findings[-1].what
        == "3 skips while the scale was first searched for (65536 to 8192): normal."
    )
    assert not [f for f in findings if f.level in ("bad", "warn")]


def test_a_fall_names_scale_step_layer_and_count_first_of_all(tmp_path: Path) -> None:
    lines = calm(t.story(500, lambda step, _: 300 <= step <= 410 and step % 11 == 3))
    windows = [line for line in lines if line["kind"] == "window"]
    skips = [w["step"] for w in windows if w["skipped"]]
    low = windows[-1]["next_scale"]
    first = found(tmp_path, lines)[0]
    assert first.level == "bad"
    assert first.what == (
        f"The scale fell to {low:g} after step {skips[-1]} (from step {skips[0]} on, from 65536, "
        f"{len(skips)} skips): {CULPRIT} overflowed {len(skips)} times."
    )
    assert "find_overflow='replay'" in first.do


def test_a_first_report_within_the_fall_is_quoted_and_nothing_more_is_asked(tmp_path: Path) -> None:
    lines = calm(t.story(200, lambda step, _: step in (100, 101, 102)))
    first = {"where": "forward", "module": "transformer.h.3.mlp.c_fc", "text": "It became inf."}
    lines = [line | {"first": first} if line.get("step") == 101 else line for line in lines]
    worst = found(tmp_path, lines)[0]
    assert worst.look == "At step 101: It became inf."
    assert "find_overflow" not in worst.do


def test_growth_that_overflows_each_time_is_normal(tmp_path: Path) -> None:
    run = read(tmp_path, calm(t.story(2000, lambda _, s: s > 65536, growth_interval=100)))
    assert run.kinds.growth == run.skips == 19
    one = the(find(run), "after the scale had grown")
    assert one.level == "good"
    assert one.what.startswith("19 skips")
    assert "every 100 windows" in one.what
    assert not [f for f in find(run) if f.level in ("bad", "warn")]


def test_an_alarm_is_a_fall_below_where_the_run_was_well(tmp_path: Path) -> None:
    """It grew from 65536 to 4194304; what two skips apart bring it to is still far above."""
    lines = calm(t.story(300, lambda s, _: s in (185, 204), growth_interval=30))
    run = read(tmp_path, lines)
    assert (run.falls[0].high, run.falls[0].low) == (4194304.0, 1048576.0)
    assert (run.kinds.growth, run.kinds.other) == (2, 0)
    assert not [f for f in find(run) if f.level in ("bad", "warn")]
    assert (
        verdict_on(run) == "Trained: 300 windows, 2 skipped (0.7 %), all after the scale had grown."
    )
    # Three in a row are no search, and from a height without any growth to it either.
    run = read(tmp_path, calm(t.story(300, lambda s, _: s in (185, 186, 187), growth_interval=30)))
    assert (run.kinds.growth, run.kinds.other) == (2, 1)
    assert the(find(run), "The scale fell to 524288").level == "warn"
    run = read(tmp_path, calm(t.story(60, lambda s, _: s in (35, 45), growth_interval=31)))
    assert (run.kinds.growth, run.kinds.other) == (1, 1)
    assert the(find(run), "The scale fell to 32768").level == "warn"
    run = read(
        tmp_path, calm(t.story(300, lambda s, _: s > 184 and s % 9 == 0, growth_interval=30))
    )
    assert the(find(run), "The scale fell to").level == "bad"  # deep, though each step is short


def test_one_layer_again_and_again_is_named_where_no_fall_is(tmp_path: Path) -> None:
    lines = t.story(3000, lambda s, scale: s > 20 and s % 400 == 0, growth_interval=300)
    run = read(tmp_path, calm(lines))
    one = the(find(run), "overflows began")
    assert one.what.startswith(f"{CULPRIT} is where {run.skips} of {run.skips} overflows began")


def test_a_loss_that_is_nan_is_the_first_thing_said_of_the_overflow(tmp_path: Path) -> None:
    lines = t.story(60, lambda s, _: 30 <= s < 36)
    lines = [line | {"loss_nonfinite": 2} if line.get("skipped") else line for line in lines]
    findings = found(tmp_path, calm(lines))
    assert findings[0].what == "The loss itself was inf or NaN in 6 windows (step 30 to step 35)."
    assert "smaller scale does not cure" in findings[0].do
    assert "the loss was inf or NaN 6 times" in findings[1].what


@pytest.mark.parametrize("low", [1.0, 0.0])
def test_a_scale_of_one_or_less_is_said(low: float, tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(s, 4.0) for s in range(30))]
    lines += [t.window(30, 4.0, True, next_scale=low), t.window(31, low), t.end(32, 1)]
    one = the(found(tmp_path, lines), "no longer scales")
    assert one.level == "bad"
    assert one.what.startswith(f"The scale fell to {low:g} (step 30)")


def test_a_scale_at_its_floor_is_said(tmp_path: Path) -> None:
    lines = [t.start(settings={"min_scale": 128.0}), *(t.window(s, 256.0) for s in range(30))]
    lines += [t.window(30 + s, 128.0, True, next_scale=128.0) for s in range(10)]
    findings = found(tmp_path, lines)
    one = the(findings, "min_scale = 128 (step 30)")
    assert one.level == "bad"
    assert one.what.endswith("The scale stayed at 128 through 10 skips from step 30 on.")
    assert one.do.startswith("Lower min_scale, or keep the layer with the largest gradients")
    assert not [f for f in findings if "streak" in f.what]  # said once


def test_a_norm_mostly_above_the_threshold_is_counted(tmp_path: Path) -> None:
    norms = [0.5, 4.0, 2.0, 8.0, "inf"]
    lines = [t.start(), *(t.window(s, grad_norm=n, max_norm=1.0) for s, n in enumerate(norms))]
    one = the(found(tmp_path, lines), "above the clipping threshold")
    middle = math.exp(sum(math.log(n) for n in norms if isinstance(n, float)) / 4)
    assert f"in 75 % of the windows (geometric mean {middle:.4g}, threshold 1)" in one.what
    half = [t.start(), *(t.window(s, grad_norm=n) for s, n in enumerate([1.0, 2.0]))]
    assert not [f for f in found(tmp_path, half) if "clipping" in f.what]


def test_underflow_names_the_worst_of_the_last_measurement(tmp_path: Path) -> None:
    old, new = [[0, 1.0, 0.0]], [[0, 0.2, 0.0], [1, 0.6, 0.0], [2, 0.0, 0.125]]
    new[1][2], names = 0.01, ["a", "b", "c", "rows that are not in the batch"]
    new.append([3, 0.9, 0.0005])
    lines = [t.start(), t.names(names)]
    lines += [t.window(0, underflow=old), t.window(1, underflow=new)]
    one = the(found(tmp_path, calm(lines)), "Underflow")
    assert "2 of 4 parameters measured at step 1" in one.what
    assert "(b 60 % zero and 1 % subnormal, c 0 % zero and 12.5 % subnormal)" in one.what


def ranged(largest: float, scale: float = 65536.0, low: float = 0.5, **settings: Any) -> list[Any]:
    """A run whose third window was measured."""
    lines = [t.start(settings=settings), t.names(["a"]), t.window(0, scale), t.window(1, scale)]
    measured = {"largest_gradient": largest, "zero_share": 0.25, "underflow": [[0, 0.25, low]]}
    return calm([*lines, t.window(2, scale, **measured), t.window(3, scale), t.end(4)])


def test_the_room_that_the_scale_has_stands_among_the_numbers(tmp_path: Path) -> None:
    lines = ranged(65504 / 8)
    lines[2] |= {"largest_gradient": 65504 / 2}
    rows = dict(facts(read(tmp_path, lines)))
    assert (
        rows["headroom"]
        == "3.0 doublings at last (seen at step 2), least measured 1.0 doublings (step 0)"
    )
    assert rows["zero gradients"] == "25 % of the elements"
    # The last scale counts, not that of the measured window.
    lines[-2] |= {"next_scale": 16384.0}
    assert dict(facts(read(tmp_path, lines)))["headroom"].startswith("5.0 doublings at last")
    assert "headroom" not in dict(facts(read(tmp_path, calm(t.story(9, lambda *_: False)))))
    beyond = dict(facts(read(tmp_path, ranged(65504 * 4))))["headroom"]
    assert beyond.startswith("0.0 doublings at last")
    assert "no gradient is above 0" in dict(facts(read(tmp_path, ranged(0.0))))["headroom"]


def test_a_scale_that_could_be_higher(tmp_path: Path) -> None:
    held = the(found(tmp_path, ranged(65504 / 64, max_scale=65536.0)), "could be higher")
    assert held.what.endswith(
        " The scale could be higher: at step 2 the largest gradient was 0.01562, so that at the "
        "last scale, 65536, it takes 1024 of float16's 65504, 6.0 doublings below the end, and "
        "max_scale holds it there."
    )
    assert "Underflow" in held.what
    assert held.do == f"Raise max_scale, to {65536 * 2**5} say."
    free = the(found(tmp_path, ranged(65504 / 64)), "could be higher")
    assert free.do == (
        f"init_scale={65536 * 2**5}, say. By itself it doubles after 2000 windows without overflow."
    )
    for lines in (ranged(65504 / 64, low=0.0), ranged(65504 / 4)):
        assert not [f for f in found(tmp_path, lines) if "could be higher" in f.what]
    near = the(found(tmp_path, ranged(65504 / 4)), "Underflow")
    assert near.do.startswith("There is little room for a larger scale (2.0 doublings)")


def test_growths_that_are_followed_by_skips_say_that_activations_overflow(tmp_path: Path) -> None:
    lines = ranged(65504 / 64)
    lines[-2] |= {"next_scale": 131072.0}
    lines[-1:] = calm([t.window(4, 131072.0, True), t.window(5), t.end(6, 1)])
    do = the(found(tmp_path, lines), "could be higher").do
    assert do.startswith("Gradients of activations are what overflows at a larger scale")


def test_a_scale_at_its_floor_that_is_about_to_fail(tmp_path: Path) -> None:
    lines = ranged(65504 / 1.5, scale=8.0, low=0.0, min_scale=8.0)
    one = the(found(tmp_path, lines), "About to fail")
    assert one.level == "warn"
    assert "it takes 4.367e+04 of float16's 65504" in one.what
    assert "min_scale = 8 keeps the scale there" in one.what
    assert one.do.startswith("Lower min_scale")
    below = the(found(tmp_path, ranged(65504 / 1.5, scale=1.0, low=0.0)), "About to fail")
    assert below.do.startswith("Keep the layer")
    for lines in (
        ranged(65504 / 1.5, low=0.0),  # the scale may fall
        ranged(65504 / 4, scale=8.0, low=0.0, min_scale=8.0),
        ranged(65504 * 2, scale=8.0, low=0.0, min_scale=8.0),  # float32 has added that up
        ranged(0.0, scale=8.0, low=0.0, min_scale=8.0),
    ):
        assert not [f for f in found(tmp_path, lines) if "About to fail" in f.what]
    plain = [ranged(65504 / 1.5, scale=1.0)[0] | {"precision": "bf16"}, *ranged(1.0)[1:]]
    assert not [f for f in found(tmp_path, plain) if "About to fail" in f.what]


def test_an_error_at_the_end_and_a_missing_end_are_said(tmp_path: Path) -> None:
    lines = t.story(40, lambda *_: False)
    killed = the(found(tmp_path, lines[:-1]), "has no end line")
    assert killed.level == "warn"
    assert "after step 39" in killed.what
    failed = the(
        found(tmp_path, [*lines[:-1], t.end(40, 0, "StepError: x")]), "ended with an error"
    )
    assert failed.what == "The run ended with an error after step 39: StepError: x"
    assert failed.level == "bad"
    resumed = found(tmp_path, [*lines[:-1], '{"kind":', *lines])
    assert the(resumed, "Session 1 has no end line").level == "note"
    broken = the(resumed, "1 line of 86 could not be read and was left out (the first is line 43:")
    assert broken.level == "note"


@pytest.mark.parametrize(("hidden", "level"), [(4_000, "warn"), (28_000, "good")])
def test_waiting_in_overlap_mode_is_measured(hidden: int, level: str, tmp_path: Path) -> None:
    lines = t.story(50, lambda *_: False, with_times=True)
    lines[0] = t.start(settings={"step_mode": "overlap"})
    times_ = {"optimizer_us": 40_000, "waited_us": 40_000 - hidden, "hidden_us": hidden}
    lines = [line | times_ if line["kind"] == "window" else line for line in lines]
    one = the(found(tmp_path, calm(lines)), "optimizer's time was hidden")
    assert one.level == level
    assert f"{hidden / 400:g} % of the optimizer's time" in one.what
    if level == "warn":
        assert f"waited {50 * (40_000 - hidden) / 1e6:.3g} s" in one.what


def late(errors: Sequence[Any], kind: str = "preview", start: int = 1) -> list[Any]:
    """A run whose updates are late from window ``start`` on."""
    lines = [t.start(settings={"step_mode": "delayed"}), *(t.window(s) for s in range(start))]
    for step, error in enumerate(errors, start):
        more = {} if error is None else {"preview_error": error}
        lines.append(t.window(step, delay_compensation=[kind], **more))
    return calm([*lines, t.end(start + len(errors))])


def test_how_far_off_previews_were_is_one_number(tmp_path: Path) -> None:
    told = dict(facts(read(tmp_path, late([0.5] * 3 + [4.0, None, "inf", "nan"]))))
    assert told["late updates"] == "100 % preview"
    assert told["preview off by"] == "1.4 of the update"  # the mean of those that are finite


def test_what_is_late_without_a_preview_is_counted_and_not_judged(tmp_path: Path) -> None:
    lines = [*late([None] * 3, "none"), *late([0.5]), *late([None], "<b>")]
    run = read(tmp_path, lines)
    assert dict(facts(run))["late updates"] == "75 % none, 25 % preview"
    alone = read(tmp_path, late([None] * 3, "none"))
    assert "preview off by" not in dict(facts(alone))


def test_a_step_on_nan_without_scaling_is_said_and_a_scale_is_not(tmp_path: Path) -> None:
    lines = [t.start(precision="no"), *(t.window(s, 1.0) for s in range(5))]
    lines += [t.window(5, 1.0, grad_norm="nan"), t.window(6, 1.0, grad_norm="nan"), t.end(7)]
    findings = found(tmp_path, calm(lines))
    assert [f.level for f in findings] == ["bad"]
    assert "in 2 windows that stepped all the same, first at step 5" in findings[0].what
    assert "scale" not in dict(facts(read(tmp_path, lines)))


def test_many_skips_are_a_share_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(400, lambda s, _: s > 100 and s % 4 == 0, growth_interval=2)
    run = read(tmp_path, calm(lines))
    assert run.skips == 74
    assert the(find(run), "18.5 % of the windows were skipped").level == "warn"


def test_a_file_without_windows_says_so(tmp_path: Path) -> None:
    assert found(tmp_path, [])[0].what == "The file holds no windows."
    assert "holds no windows" in in_words(read(tmp_path, [t.start()]))


def slow_reference(windows: list[dict[str, Any]]) -> dict[str, Any]:
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
    streak = max((len(list(g)) for bad, g in groupby(skips) if bad), default=0)
    return {
        "skips": sum(skips),
        "kinds.search": search,
        "kinds.growth": growth,
        "kinds.other": sum(skips) - search - growth,
        "longest_streak": streak,
        "lowest": min(min(w["scale"], w["next_scale"]) for w in windows),
    }


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
    run = read(tmp_path, lines)
    expected = slow_reference(windows)
    low = expected.pop("lowest")
    assert {key: attrgetter(key)(run) for key in expected} == expected
    assert run.lowest is not None
    assert run.lowest[0] == low
    assert sum(o.began for o in run.offenders.values()) == expected["skips"]
    for finding in find(run):
        assert finding.what
        assert "nan" not in finding.what


@pytest.mark.parametrize(("falls", "said"), [(1, ""), (3, "2 other"), (12, "at least 7 other")])
def test_more_falls_are_counted_as_far_as_they_were_kept(
    falls: int, said: str, tmp_path: Path
) -> None:
    bad = {100 * n + i for n in range(1, falls + 1) for i in range(3)}
    lines = t.story(100 * falls + 150, lambda s, _: s in bad, growth_interval=30)
    one = the(found(tmp_path, calm(lines)), "The scale fell to")
    assert (f" And {said} falls like it." if said else "3 times.") in one.what
    assert ("falls like it" in one.what) == bool(said)


def test_a_streak_that_is_not_the_deepest_fall_is_said_too(tmp_path: Path) -> None:
    bad = {*range(100, 108), *range(200, 206)}
    lines = t.story(400, lambda s, _: s in bad, growth_interval=30)
    held = [w | {"next_scale": w["scale"]} if w.get("step", 0) // 10 == 10 else w for w in lines]
    one = the(found(tmp_path, calm(held)), "longest streak")
    assert one.what.endswith(" The longest streak: 8 skips in a row from step 100 on.")


def test_values_are_told_as_one_writes_them() -> None:
    values = [None, True, 65536.0, 1e-8, "sync", (), ["a", "b.c"], 3]
    assert list(map(written, values)) == [
        *("none", "true", "65536", "1e-08", "sync", "[]", "[a, b.c]", "3")
    ]


def test_numbers_are_short_and_a_share_never_rounds_to_nothing_or_to_all() -> None:
    shares = [(0, 5), (5, 5), (1, 3), (1, 10**6), (999_999, 10**6), (1, 0)]
    assert [percent(*share) for share in shares] == [
        *("0 %", "100 %", "33.3 %", "under 0.1 %", "over 99.9 %", "0 %")
    ]
    assert [number(v) for v in (65536.0, 0.5, 1e9, 3.14159, math.inf)] == [
        "65536",
        "0.5",
        "1000000000",
        "3.142",
        "inf",
    ]
    assert [times(n) for n in (1, 2, 14)] == ["once", "twice", "14 times"]
    assert shorten("a" * 50 + "z", 12) == "aaaa…aaaaaaz"
