"""What two findings of one run could say against each other, over runs of every kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import telemetry_files as t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.report.findings import RULES, Finding, Subject, find
from accel_scaler.report.reader import read_run
from accel_scaler.report.verdict import verdict_on

ADVICE = {
    ("scale", "up"): r"A larger scale|init_scale=\d|larger init_scale|Raise max_scale",
    ("scale", "down"): r"smaller init_scale|ower max_scale|set max_scale",
    ("growth_interval", "up"): r"Raise growth_interval",
    ("growth_interval", "down"): r"smaller growth_interval",
    ("step", "longer"): r"[Rr]aise the threshold",
    ("step", "shorter"): r"ower the learning rate|lower learning rate|or clip",
    ("mode", "sync"): r'step_mode="sync"',
    ("mode", "overlap"): r"step_mode='overlap' shows",
}
"""Each knob, and the two ways that it can be turned."""


def advice(findings: list[Finding]) -> set[tuple[str, str]]:
    text = " ".join(finding.do for finding in findings)
    return {turned for turned, words in ADVICE.items() if re.search(words, text)}


def assert_of_one_mind(findings: list[Finding]) -> None:
    subjects = [finding.subject for finding in findings]
    assert len(subjects) == len(set(subjects))
    given = advice(findings)
    knobs = [knob for knob, _ in given]
    assert len(knobs) == len(set(knobs)), given
    assert all(finding.what for finding in findings)
    by_subject = {finding.subject: finding for finding in findings}
    for subject in ("overflow", "skips", "loss", "parameters"):
        if subject in by_subject:  # the backward has overflowed before anybody clips
            assert "clip" not in by_subject[subject].do  # type: ignore[index]
    levels = {subject: finding.level for subject, finding in by_subject.items()}
    if levels.get("skips") == "good":
        assert levels.get("overflow") not in ("bad", "warn")


def test_every_rule_is_of_another_subject_and_every_subject_has_its_rule() -> None:
    assert set(RULES) | {"windows"} == set(get_args(Subject))


@st.composite
def runs(draw: st.DrawFn) -> list[Any]:
    """Files with sessions of overflows, clips, measures, late updates and losses, any of them."""
    lines: list[Any] = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 260))
        bad = draw(st.sets(st.integers(0, count), max_size=30))
        period = draw(st.sampled_from([0, 2, 3, 7, 40]))
        until = draw(st.sampled_from([0, 5, 30, count]))
        ceiling = draw(st.sampled_from([1e9, 65536.0, 64.0, 0.5]))
        largest = draw(st.sampled_from([None, 0.0, 1e-3, 1.0, 600.0, 40000.0, 1e6]))
        mode = draw(st.sampled_from(["sync", "overlap", "delayed"]))
        norm = draw(st.sampled_from([None, 0.1, 3.0]))
        healed = draw(st.sampled_from([(), ("transformer.h.3.mlp.c_fc",), ("other",)]))
        first = draw(st.sampled_from([None, "forward", "loss", "backward"]))
        loss = draw(st.sampled_from([0, 1]))
        story = t.story(
            count,
            lambda s, scale, bad=bad, period=period, until=until, ceiling=ceiling: (
                s in bad or scale > ceiling or bool(period and s < until and s % period == 0)
            ),
            growth_interval=draw(st.sampled_from([2, 20, 2000])),
            first_scale=draw(st.sampled_from([65536.0, 2.0, 2.0**24])),
            with_norms=False,
        )
        given = {
            "min_scale": draw(st.sampled_from([None, 1.0, 4096.0])),
            "max_scale": draw(st.sampled_from([None, 65536.0])),
            "step_mode": mode,
        }
        story[0]["settings"] |= given
        story[0]["precision"] = draw(st.sampled_from(["fp16", "fp16", "fp16", "bf16"]))
        for line in story:
            if line["kind"] != "window":
                continue
            floor = given["min_scale"]
            if floor is not None:
                line["scale"] = max(line["scale"], floor)
                line["next_scale"] = max(line["next_scale"], floor)
            if norm is not None and not line["skipped"]:
                line["grad_norm"] = norm
            if largest is not None and line["step"] % 10 == 0:
                line |= {"largest_gradient": largest, "zero_share": 0.3}
                line["underflow"] = [[0, 0.6, 0.2]]
            if mode != "sync":
                line |= {"optimizer_us": 1000, "waited_us": draw(st.sampled_from([0, 900]))}
            if mode == "delayed":
                line |= {"delay_compensation": ["preview"], "preview_error": 0.9}
            if line["skipped"]:
                line["loss_nonfinite"] = loss
                if first is not None:
                    line["first"] = {"where": first, "module": "transformer.h.3", "class": "C"} | {
                        "micro_batch": 0,
                        "input": [-1.0, 1.0],
                        "output": None,
                        "text": "it",
                    }
                if healed and line["step"] > count // 2:
                    line["healed"] = list(healed)
        ends = draw(st.sampled_from(["well", "killed", "failed"]))
        if ends == "failed":
            story[-1]["error"] = "StepError: x"
        lines += story[:-1] if ends == "killed" else story
    return lines


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lines=runs())
def test_no_two_findings_are_of_one_subject_or_of_two_minds(
    lines: list[Any], tmp_path: Path
) -> None:
    run = read_run(t.write(tmp_path / "run.jsonl", lines))
    findings = find(run)
    assert_of_one_mind(findings)
    verdict = verdict_on(run)
    assert verdict
    by_subject = {finding.subject: finding for finding in findings}
    if verdict.startswith(("Did not train", "Nothing was trained")) and run.skips:
        assert by_subject["skips"].level != "good" or run.windows < 20


def told_to(lines: list[Any], tmp_path: Path) -> dict[str, Finding]:
    found = find(read_run(t.write(tmp_path / "run.jsonl", lines)))
    assert_of_one_mind(found)
    return {finding.subject: finding for finding in found}


def test_a_run_that_clips_nearly_always_and_overflows_is_told_neither_to_clip_nor_not_to(
    tmp_path: Path,
) -> None:
    lines = t.story(400, lambda s, _: 300 <= s < 307)
    found = told_to(lines, tmp_path)
    assert found["clipping"].do == "Nothing, if it is meant, as it is for many language models."
    assert found["clipping"].level == "note"
    assert "lower the learning rate" in found["overflow"].do
    calm = told_to(t.story(400, lambda *_: False), tmp_path)
    assert "raise the threshold" in calm["clipping"].do


@pytest.mark.parametrize("searched", [0, 10])
def test_who_is_told_to_begin_lower_is_not_told_to_begin_higher(
    searched: int, tmp_path: Path
) -> None:
    lines = t.story(100, lambda s, _: s < searched)
    for line in lines:
        if line.get("step") == 50:
            line |= {"largest_gradient": 1.0, "zero_share": 0.3, "underflow": [[0, 0.6, 0.2]]}
    found = told_to(lines, tmp_path)
    assert ("smaller init_scale" in found["skips"].do) == bool(searched)
    assert ("init_scale=" in found["range"].do) == (not searched)
    assert "2000 windows" in found["range"].do


def test_growths_that_overflow_are_met_from_one_side(tmp_path: Path) -> None:
    lines = t.story(400, lambda _, scale: scale > 65536, growth_interval=2)
    for line in lines:
        if line.get("step") == 50:
            line |= {"largest_gradient": 1.0, "zero_share": 0.3, "underflow": [[0, 0.6, 0.2]]}
    found = told_to(lines, tmp_path)
    assert found["skips"].do.startswith("Raise growth_interval")
    assert "max_scale" not in found["range"].do
    assert found["range"].do.startswith("Gradients of activations are what overflows")


def test_what_heal_has_met_is_not_to_be_done_again(tmp_path: Path) -> None:
    lines = t.story(200, lambda s, _: 100 <= s < 104)
    for line in lines:
        if line.get("step") == 103:
            line["healed"] = ["transformer.h.3.mlp"]
    found = told_to(lines, tmp_path)
    assert found["overflow"].do == "heal has met it."
    assert "transformer.h.3.mlp" in found["healed"].do


def test_a_loss_that_is_nan_is_no_matter_of_layers_and_rates(tmp_path: Path) -> None:
    lines = t.story(200, lambda s, _: 100 <= s < 104)
    lines = [line | {"loss_nonfinite": 1} if line.get("skipped") else line for line in lines]
    found = told_to(lines, tmp_path)
    assert found["overflow"].do == "As for the loss (above)."


def test_every_second_batch_nan_is_no_matter_of_layers_and_rates(tmp_path: Path) -> None:
    lines = t.story(100, lambda s, _: s % 2 == 0)
    first = {"where": "forward", "module": "", "class": "Net", "input": ["nan", "nan"]}
    first |= {"output": None, "text": "input of Net: holds nan", "micro_batch": 0}
    bad = {"loss_nonfinite": 1, "loss": "nan", "first": first}
    found = told_to([line | bad if line.get("skipped") else line for line in lines], tmp_path)
    assert "other fall" not in found["overflow"].what
    assert found["overflow"].do == "As for the loss (above)."


def test_sessions_that_failed_are_one_finding_with_the_last_of_them(tmp_path: Path) -> None:
    failed = [*t.story(5, lambda *_: False)[:-1], t.end(5, 0, "StepError: x")]
    found = told_to([*failed * 6, *t.story(5, lambda *_: False)[:-1]], tmp_path)
    assert "has no end line" in found["end"].what
    assert found["end"].look.endswith("So did 3 before.")
    assert "Session 6 ended with an error after step 4 of session 6: StepError: x." in (
        found["end"].look
    )
    well = told_to([*failed, *t.story(5, lambda *_: False)], tmp_path)
    assert (well["end"].level, well["end"].do) == ("note", "A later session went on from there.")
