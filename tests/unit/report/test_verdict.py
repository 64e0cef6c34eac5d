"""The verdict on a file: the first thing on the page and in the text, and at one with the rest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_scaler.report.command import add_arguments, run
from accel_scaler.report.findings import find
from accel_scaler.report.html import html_page
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.text import in_words
from accel_scaler.report.verdict import verdict_on

FIRST = {"where": "forward", "module": "block.2.wo", "class": "Linear", "micro_batch": 0}
FIRST |= {"input": [-1.0, 2.0], "output": None, "text": "forward of block.2.wo (Linear)"}


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def said(tmp_path: Path, lines: list[Any]) -> str:
    return verdict_on(read(tmp_path, lines))


def stuck(count: int, since: int) -> list[Any]:
    lines = t.story(count, lambda step, _: step >= since)
    index = next(i for i, line in enumerate(lines) if line.get("step") == since)
    lines[index]["first"] = FIRST
    return lines


def test_a_run_that_trained(tmp_path: Path) -> None:
    lines = t.story(1200, lambda _, scale: scale > 16)
    assert said(tmp_path, lines) == (
        "Trained: 1,200 windows, 12 skipped (1 %), all while the scale settled."
    )
    killed = said(tmp_path, lines[:-1])
    assert killed.endswith("There is no end after step 1199: it was killed, or is still going.")


def test_a_run_that_stopped_training(tmp_path: Path) -> None:
    assert said(tmp_path, stuck(400, 311)) == (
        "Did not train past step 310: every window since (89) overflowed in the forward of "
        "block.2.wo (Linear); keep it in float32: fp32_modules: ['block.2.wo']."
    )
    lines = stuck(400, 311)
    for line in lines:
        line.pop("first", None)
    culprit = "transformer.h.3.mlp.c_fc"
    text = said(tmp_path, lines)
    assert f"overflowed, first in {culprit}.weight; keep its module in float32" in text
    assert f"fp32_modules: ['{culprit}']" in text
    for line in lines:
        if line.get("skipped"):
            line["loss_nonfinite"] = 1
    assert "had a loss of inf or NaN" in said(tmp_path, lines)


def test_a_run_that_never_trained_and_files_with_nothing(tmp_path: Path) -> None:
    assert said(tmp_path, stuck(40, 0)).startswith("Nothing was trained: all 40 windows overflowed")
    assert said(tmp_path, []) == "Nothing was trained: no window closed."
    assert said(tmp_path, [t.start(), t.end()]) == "Nothing was trained: no window closed."
    assert said(tmp_path, [t.start()]).endswith("it was killed, or it has just begun.")
    failed = said(tmp_path, [t.start(), t.end(error="StepError: x")])
    assert failed.endswith("before it ended with an error: StepError: x.")


def test_the_streak_is_that_of_the_last_session_and_its_place_too(tmp_path: Path) -> None:
    lines = [*t.story(100, lambda *_: False), *stuck(60, 30)]
    assert said(tmp_path, lines).startswith("Did not train past step 29 of session 2: every")
    whole = [*t.story(100, lambda *_: False), *stuck(60, 0)]
    assert said(tmp_path, whole).startswith("Did not train past step 99 of session 1: every")
    again = [*stuck(60, 30), *t.story(100, lambda *_: False)]
    assert said(tmp_path, again).startswith("Trained")


def test_the_floor_and_a_deep_fall_are_no_plain_success(tmp_path: Path) -> None:
    lines = t.story(100, lambda step, _: 40 <= step < 46)
    assert "Trained, but the scale fell to 1024 (step 45): 100 windows" in said(tmp_path, lines)
    lines[0]["settings"]["min_scale"] = 1024.0
    floor = said(tmp_path, lines)
    assert "Trained, but the scale reached its floor, min_scale = 1024 (step 45)" in floor


def test_a_loss_that_became_nan_where_nothing_is_scaled(tmp_path: Path) -> None:
    lines = t.story(40, lambda *_: False)
    lines[0] |= {"precision": "no"}
    for line in lines:
        if line["kind"] == "window":
            line |= {"grad_norm": None, "loss": 1.0 if line["step"] < 30 else "nan"}
    run = read_run(t.write(tmp_path / "run", lines))
    assert verdict_on(run) == (
        "Diverged: inf or NaN in the last 10 windows; the loss itself was inf or NaN in 10 "
        "windows. Load a checkpoint before it, and lower the learning rate. "
        "40 windows without loss scaling."
    )
    (bad,) = (each for each in find(run) if each.level == "bad")
    assert "(step 30 to step 39)" in bad.what
    assert "scale does not cure" not in bad.do
    assert not [each for each in find(run) if each.level == "good"]


def test_without_loss_scaling(tmp_path: Path) -> None:
    lines = [t.start(precision="bf16")]
    lines += [t.window(s, 1.0, grad_norm=n) for s, n in enumerate((1.0, "nan", 2.0))]
    text = said(tmp_path, [*lines, t.end(3)])
    assert "inf or NaN in windows that stepped all the same, first at step 1" in text
    assert "3 windows without loss scaling." in text


def test_what_was_healed_is_the_line_for_the_config(tmp_path: Path) -> None:
    lines = t.story(100, lambda *_: False)
    lines[10]["healed"] = ["a.wo"]
    lines[12]["healed"] = ["b.wo", "a.wo"]
    lines[10] |= {"loss_nonfinite": 1, "found_inf": True, "skipped": True, "next_scale": 65536.0}
    run_of = read(tmp_path, lines)
    assert not [f for f in find(run_of) if f.level in ("bad",)]
    (told,) = [f for f in find(run_of) if f.what.startswith("heal has put 2 modules in float32")]
    assert "a.wo (from step 8 on), b.wo (from step 10 on)." in told.what
    assert told.do.startswith("fp32_modules: ['a.wo', 'b.wo'] in the config")
    assert said(tmp_path, lines) == (
        "Trained with 2 modules healed: put `fp32_modules: ['a.wo', 'b.wo']` into the config. "
        "100 windows, 1 skipped (1 %)."
    )


def test_it_is_the_first_sentence_of_the_page_and_of_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = t.write(tmp_path / "a<b.jsonl", t.story(100, lambda *_: False))
    run_of = read_run(path)
    text = in_words(run_of)
    assert text.splitlines()[2] == verdict_on(run_of)
    page = html_page(run_of)
    after = page.split("<main>")[1].lstrip()
    assert after.startswith('<p class="verdict good">')
    assert after.split("</p>")[0].endswith("Trained: 100 windows, none skipped.")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(path), "--text"])) == 0
    assert "Trained: 100 windows" in capsys.readouterr().out


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bad=st.sets(st.integers(0, 250), max_size=60),
    since=st.integers(0, 300),
    count=st.integers(0, 250),
    interval=st.sampled_from([1, 25, 2000]),
    cut=st.booleans(),
    error=st.sampled_from([None, "OverflowStreakError: x. y", "StepError: z"]),
)
def test_it_does_not_contradict_the_findings(
    bad: set[int],
    since: int,
    count: int,
    interval: int,
    cut: bool,
    error: str | None,
    tmp_path: Path,
) -> None:
    """A plain "Trained" stands over no problem; what is stuck stands over one."""
    lines = t.story(
        count,
        lambda s, _: s in bad or s >= since,
        growth_interval=interval,
        with_norms=False,
    )
    lines[-1]["error"] = error
    one = read(tmp_path, lines[:-1] if cut else lines)
    text, findings = verdict_on(one), find(one)
    bad_ones = [f.what for f in findings if f.level == "bad"]
    if bad_ones:
        assert not text.startswith("Trained:") or "ended with an error" in text, bad_ones
    if text.startswith("Did not train"):
        assert [f for f in findings if f.level in ("bad", "warn")]
    skipped = [line["skipped"] for line in lines if line["kind"] == "window"]
    assert text.startswith("Nothing was trained") == all(skipped)
