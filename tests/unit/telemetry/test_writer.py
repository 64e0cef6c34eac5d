"""The telemetry file, read with plain json; nothing about it ends a run."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from telemetry_runs import kinds_of, lines_of, parse, windows_of

from accel_scaler import ConfigError
from accel_scaler.telemetry import writer
from accel_scaler.telemetry.record import FORMAT, Record
from accel_scaler.telemetry.writer import Journal

FACTS = {"package": "0", "rank": 0, "ranks": 1, "device": "cpu", "precision": "fp16"}


def record(index: int = 0, **rest: Any) -> Record:
    values: dict[str, Any] = {"scale": 8.0, "next_scale": 8.0, "skipped": False, "grad_norm": 1.5}
    return Record(index, **(values | rest))


def put(journal: Journal, *records: Record) -> None:
    for each in records:
        journal.add(each)
    journal.flush()


def test_the_first_line_says_what_runs_and_the_last_one_sums_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), {**FACTS, "settings": {"min_scale": None}})
    (line,) = lines_of(path)  # at once, before any window
    assert (line["kind"], line["format"]) == ("start", FORMAT)
    assert line["unix_time"] == pytest.approx(os.stat(path).st_mtime, abs=60)
    assert {key: line[key] for key in FACTS} == FACTS
    assert line["settings"] == {"min_scale": None}
    put(journal, record(0), record(1, skipped=True), record(2, skipped=True))
    error = "OverflowStreakError: it did not end"
    journal.error = error
    journal.close()
    journal.close()
    assert kinds_of(path) == ["start", "window", "window", "window", "end"]
    line = lines_of(path)[-1]
    assert line.pop("time") >= 0
    assert line == {"kind": "end", "error": error}
    put(journal, record(3))  # after the end: dropped
    assert kinds_of(path)[-1] == "end"


def test_names_are_written_again_only_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    one, two = ("a",), ("a", "b")
    put(journal, record(0), record(1, names=one), record(2, names=("a",)), record(3, names=two))
    put(journal, record(4), record(5, names=two), record(6, names=one))
    journal.close()
    lines = lines_of(path)[1:-1]
    assert [len(x["names"]) if x["kind"] == "names" else x["step"] for x in lines] == [
        *(0, 1, 1, 2, 2, 3, 4, 5, 1, 6)
    ]
    assert lines[4] == {"kind": "names", "names": ["a", "b"]}


@pytest.mark.parametrize("kept", [0, 200])
def test_a_file_that_was_cut_off_can_be_resumed_again_and_again(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    put(journal, record(0))
    journal.close()
    whole = path.read_bytes()
    assert len(whole.splitlines()[0]) < 200 < len(whole)
    path.write_bytes(whole[:kept])
    for _ in range(3):
        Journal(str(path), FACTS).close()
    before = whole[:kept].splitlines()
    found = path.read_bytes().splitlines()
    assert found[: len(before)] == before
    assert [parse(line)["kind"] for line in found[len(before) :]] == ["start", "end"] * 3


FOREIGN = {
    "other json lines": (b'{"loss": 1}\n', "not a telemetry file"),
    "an end first": (b'{"kind":"end"}\n', "not a telemetry file"),
    "bytes": (bytes(range(256)), "not a telemetry file"),
    "a first line that was cut off": (b'{"kind":"sta', "not a telemetry file"),
    "an older format": (b'{"kind":"start","format":1}\n', "this version writes 2"),
    "a newer format": (b'{"kind":"start","format":3}\n', "this version writes 2"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_or_format_is_refused_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    path, (content, why) = tmp_path / "data", FOREIGN[name]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"(?s){why}.*another path") as caught:
        Journal(str(path), FACTS)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("below", ["", "file/run.jsonl", "x" * 300])
def test_a_path_that_cannot_be_written_is_said_at_once(tmp_path: Path, below: str) -> None:
    """Below a regular file: not even root can make that."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which cannot be appended to"):
        Journal(str(tmp_path / below), FACTS)


def test_the_error_that_ends_the_process_is_in_the_end_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python keeps it there when it exits, and nothing else has raised."""
    journal = Journal(str(tmp_path / "run.jsonl"), FACTS)
    monkeypatch.setattr(sys, "last_value", RuntimeError("no more data"), raising=False)
    journal.close()
    end = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert end["error"] == "RuntimeError: no more data"


class Disk:
    """``os.write`` onto a disk that may be full after some more bytes, a few at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        write = os.write

        def limited(fd: int, data: Any) -> int:
            if self.room is None:
                return write(fd, data[:7])
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = write(fd, data[: self.room])
            self.room -= done
            return done

        monkeypatch.setattr(os, "write", limited)


def test_a_disk_that_is_full_at_the_start_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch).room = 0
    with pytest.raises(ConfigError, match=r"run\.jsonl'.*No space left"):
        Journal(str(tmp_path / "run.jsonl"), FACTS)


@pytest.mark.parametrize("room", [0, 25])
def test_a_disk_that_fills_is_one_warning_and_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "run.jsonl"
    journal, disk = Journal(str(path), FACTS), Disk(monkeypatch)
    put(journal, record(0))
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        disk.room = room
        put(journal, record(1, names=("a",)), record(2, names=("a",), skipped=True))
        disk.room = None
        put(journal, record(3, names=("a",)))
        journal.close()
    (message,) = [r.getMessage() for r in caplog.records]
    assert str(path) in message
    assert "No space left on device" in message
    *whole, last = path.read_bytes().splitlines()
    assert [parse(line)["kind"] for line in whole + [last] * (not room)] == ["start", "window"]
    assert len(last) == room or not room


def test_windows_are_written_together_and_the_last_one_may_be_amended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(writer, "MAX_WAIT_S", 1e9)
    journal = Journal(str(path), FACTS)
    for index in range(3):
        journal.add(record(index))
        journal.add(record(index, loss=0.5))
    assert windows_of(path) == []
    monkeypatch.setattr(writer, "MAX_WAIT_S", 0.0)
    journal.add(record(3))
    assert [(line["step"], line["loss"]) for line in windows_of(path)] == [
        (step, 0.5) for step in range(3)
    ]
    journal.close()
    assert len(windows_of(path)) == 4


CHILD = """
import os, sys
from accel_scaler.telemetry.record import Record
from accel_scaler.telemetry.writer import Journal
journal = Journal(sys.argv[1], {})
def put(index):
    journal.add(Record(index, 8.0, 8.0, False, None))
    journal.flush()
put(0)
"""


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD + program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.process
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = """
if os.fork() == 0:
    put(100)
    journal.close()
    sys.exit(0)
os.wait()
put(1)
journal.close()
"""
    done = run(program, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert kinds_of(path) == ["start", "window", "window", "end"]
    assert [line["step"] for line in windows_of(path)] == [0, 1]
