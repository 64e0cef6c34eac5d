"""The reader of telemetry files: bounded, exact, and not to be upset by anything in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.errors import ConfigError
from accel_scaler.report.reader import Run, read_run
from accel_scaler.report.summary import find
from accel_scaler.telemetry import verdict


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def test_totals_equal_those_of_the_windows(tmp_path: Path) -> None:
    lines = t.story(300, lambda step, scale: step < 3 or step % 90 == 89, with_times=True)
    windows = [line for line in lines if line["kind"] == "window"]
    run = read(tmp_path, lines)
    norms = [w["grad_norm"] for w in windows if w["grad_norm"] != "inf"]
    assert run.windows == len(windows) == 300
    assert run.skips == sum(w["skipped"] for w in windows) == 6
    assert (run.first_scale, run.last_scale) == (65536.0, windows[-1]["next_scale"])
    step = next(w["step"] for w in windows if w["grad_norm"] == max(norms))
    assert run.highest == (max(norms), step)
    assert len(run.finite("clip")) == len(norms)
    assert run.bad.count == 0
    totals = [sum(run.finite(name)) for name in ("update", "waited")]
    assert totals == [pytest.approx(9000), pytest.approx(600)]
    assert run.sessions[0].ended
    assert run.broken == 0


def test_sessions_in_one_file_go_on_along_the_axis(tmp_path: Path) -> None:
    one = t.story(10, lambda *_: False, with_times=True)[:-1]
    two = t.story(5, lambda *_: False, with_times=True)
    run = read(tmp_path, [*one, '{"kind":"window","step":10,"ti', *two])
    assert [s.first_x for s in run.sessions] == [0, 10]
    assert [s.last_step for s in run.sessions] == [9, 4]
    assert [s.ended for s in run.sessions] == [False, True]
    assert run.broken == 1
    assert run.x[-1] == 14
    assert run.place(12) == "step 2 of session 2"


def test_a_session_that_ended_without_a_window_is_none(tmp_path: Path) -> None:
    """The launcher attaches, then the script with settings of its own: one run, not two."""
    story = t.story(5, lambda *_: False)
    run = read(tmp_path, [t.start(settings={"min_scale": 4.0}), t.end(), *story])
    assert len(run.sessions) == 1
    assert run.floor == 0
    assert run.place(3) == "step 3"
    again = read(tmp_path, [*story, t.start(), t.end(), *story])
    assert [s.first_x for s in again.sessions] == [0, 5]
    assert again.place(7) == "step 2 of session 2"


def test_sessions_that_trained_nothing_say_nothing_of_their_cure(tmp_path: Path) -> None:
    """Appended to the same file, as the advice is: all else as before."""
    sick = t.story(40, lambda *_: True)
    broken = '{"kind":"window","step":40,"ti'
    cured = t.story(30, lambda *_: False)
    run = read(tmp_path, [*sick, broken, *sick, t.start(), t.end(), *cured])
    assert verdict(run) == "30 steps, none skipped."
    assert (run.windows, run.last_x, run.place(3), len(run.sessions)) == (30, 29, "step 3", 1)
    # The last one is never left out, nor one that has trained.
    again = read(tmp_path, [*cured, *sick])
    assert (again.windows, again.skips) == (70, 40)
    assert verdict(again).startswith("Did not train past step 29 of session 1: ")


BAD = {
    "cut off": json.dumps(t.window(2))[:-20],
    "the same step": json.dumps(t.window(1)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_line_is_counted_and_skipped(name: str, tmp_path: Path) -> None:
    odd = [{"kind": "weather", "sky": "blue"}, "", t.window(2, skipped=True)]  # no fault
    lines = [t.start(), t.names(["a", "b"]), t.window(1), BAD[name], *odd]
    run = read(tmp_path, lines)
    assert run.broken == 1
    assert "1 of 6 lines could not be read" in " ".join(each.title for each in find(run))
    assert (run.windows, run.skips, run.sessions[0].last_step) == (2, 1, 2)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_a_run_without_windows(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert read_run(path).windows == 0


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"hello\nworld\n", "not JSON"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "not JSON"),
        (b'{"loss": 1.0}\n', "without kind"),
        (b'{"kind":"window","step":0}\n', "window"),
        (b'{"kind":"weather"}\n', "another line first"),
        (b'{"kind":"start","form', "not JSON"),
    ],
)
def test_what_is_not_telemetry_is_refused_in_one_line(
    content: bytes, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 1: not a telemetry file of accel_scaler: found")
    assert found in text
    assert '"format":2' in text
    assert "\n" not in text


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_refused(other: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"line 1: telemetry of format {other}; .* reads 2\."):
        read(tmp_path, [t.start(format=other), t.window(0)])


@pytest.mark.parametrize("path", [".", "nowhere.jsonl"])
def test_what_cannot_be_read_is_one_line(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / path)
