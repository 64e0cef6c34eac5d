"""The telemetry file against its format, read with plain json; nothing about it ends a run."""

from __future__ import annotations

import base64
import errno
import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from telemetry_runs import kinds_of, lines_of, parse, windows_of

from accel_scaler import ConfigError
from accel_scaler.telemetry import writer as writer_module
from accel_scaler.telemetry.record import Record
from accel_scaler.telemetry.writer import FORMAT, Journal, check_path

INF, NAN = math.inf, math.nan
FACTS = {"package": "0", "rank": 0, "ranks": 1, "device": "cpu", "precision": "fp16"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are written one by one, except where a test wants them to wait."""
    monkeypatch.setattr(writer_module, "LONGEST_WAIT_S", 0.0)


def record(index: int = 0, **rest: Any) -> Record:
    values: dict[str, Any] = {"scale": 8.0, "next_scale": 8.0, "skipped": False, "grad_norm": 1.5}
    return Record(index, **(values | rest))


def put(journal: Journal, *records: Record) -> None:
    for each in records:
        count = len(each.names)
        journal.add(each, list(range(count)), [3] * count)


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_the_first_line_says_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), {**FACTS, "settings": {"min_scale": None}})
    (line,) = lines_of(path)  # at once, before any window
    assert (line["kind"], line["format"]) == ("start", 1)
    assert line["unix_time"] == pytest.approx(os.stat(path).st_mtime, abs=60)
    assert {key: line[key] for key in FACTS} == FACTS
    assert line["settings"] == {"min_scale": None}
    journal.close()


def test_a_window_line_has_every_number_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    full = record(
        3,
        scale=65536.0,
        next_scale=32768.0,
        skipped=True,
        found_inf=True,
        growth_tracker=7,
        grad_norm=1.25,
        max_norm=1.0,
        clip_coefficient=0.8,
        lr=(0.001, 0.5),
        names=("a", "b"),
        norms=floats(0.75, 1.0),
        nonfinite=((1, 2),),
        underflow=((0, 0.25, 0.123456789),),
        loss_nonfinite=3,
        first={"where": "forward", "text": "it began"},
        time=0.5123456789,
        optimizer_s=0.001234,
        waited_s=0.00001,
        spans=(
            ("step", journal.start_s + 1.5, 0.25),
            ("wait", journal.start_s + 2.0, 0.125, "a"),
        ),
    )
    put(journal, full)
    journal.close()
    _, names, line, _ = lines_of(path)
    assert names == {"kind": "names", "names": ["a", "b"], "places": [0, 1], "elements": [3, 3]}
    assert line == {
        "kind": "window",
        "step": 3,
        "time": 0.512346,
        "scale": 65536.0,
        "next_scale": 32768.0,
        "growth_tracker": 7,
        "found_inf": True,
        "skipped": True,
        "grad_norm": 1.25,
        "max_norm": 1.0,
        "clip_coefficient": 0.8,
        "lr": [0.001, 0.5],
        "norms": base64.b64encode(struct.pack("<2f", 0.75, 1.0)).decode(),
        "nonfinite": [[1, 2]],
        "loss_nonfinite": 3,
        "first": {"where": "forward", "text": "it began"},
        "underflow": [[0, 0.25, 0.123457]],
        "optimizer_us": 1234,
        "waited_us": 10,
        "hidden_us": 1224,
        "spans": [["step", 1500000, 250000], ["wait", 2000000, 125000, "a"]],
    }


def test_what_is_not_known_is_left_out_or_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    put(journal, record(grad_norm=None, lr=(None,)))
    journal.close()
    start, line, _ = lines_of(path)
    assert start["kind"] == "start"
    assert (line["grad_norm"], line["max_norm"], line["clip_coefficient"]) == (None, None, None)
    assert line["lr"] == [None]
    optional = ("norms", "nonfinite", "loss_nonfinite", "first", "underflow", "spans")
    assert not line.keys() & {*optional, "optimizer_us", "waited_us", "hidden_us"}


def test_the_last_line_sums_up(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    put(journal, record(0), record(1, skipped=True), record(2, skipped=True))
    journal.close("OverflowStreakError: it did not end")
    journal.close()
    assert kinds_of(path) == ["start", "window", "window", "window", "end"]
    line = lines_of(path)[-1]
    assert line.pop("time") >= 0
    error = "OverflowStreakError: it did not end"
    assert line == {"kind": "end", "windows": 3, "skips": 2, "error": error}
    put(journal, record(3))  # after the end: dropped
    assert kinds_of(path)[-1] == "end"


def test_names_are_written_again_only_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    one, two = ("a",), ("a", "b")
    put(journal, record(0), record(1, names=one), record(2, names=("a",)), record(3, names=two))
    put(journal, record(4), record(5, names=two), record(6, names=one))
    journal.close()
    assert [
        len(line["names"]) if line["kind"] == "names" else line["step"]
        for line in lines_of(path)[1:-1]
    ] == [0, 1, 1, 2, 2, 3, 4, 5, 1, 6]


def test_numbers_that_json_has_not_are_text_that_float_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    norms = floats(INF, NAN)
    put(journal, record(0, grad_norm=INF, lr=(NAN, -INF), names=("a", "b"), norms=norms))
    put(journal, record(1, grad_norm=NAN, max_norm=INF, clip_coefficient=NAN))
    journal.close()
    first, second = windows_of(path)  # read strictly
    assert (first["grad_norm"], first["lr"]) == ("inf", ["nan", "-inf"])
    assert first["norms"]["a"] == INF
    assert math.isnan(first["norms"]["b"])
    assert [float(second[k]) for k in ("max_norm",)] == [INF]
    assert (second["grad_norm"], second["clip_coefficient"]) == ("nan", "nan")


def test_norms_are_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = floats(1.5, -2.0)
    assert writer_module._little_endian(own) == struct.pack("<2f", 1.5, -2.0)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert writer_module._little_endian(struct.pack(">2f", 1.5, -2.0)) == struct.pack(
        "<2f", 1.5, -2.0
    )


def test_windows_wait_for_each_other_but_not_long_and_not_after_an_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LONGEST_WAIT_S", 1e9)
    monkeypatch.setattr(writer_module, "MOST_WAITING", 3)
    path = tmp_path / "run.jsonl"
    journal, counts = Journal(str(path), FACTS), []
    bad = record(5, found_inf=True)
    for each in (*map(record, range(5)), bad, record(6)):
        put(journal, each)
        counts.append(kinds_of(path).count("window"))
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    monkeypatch.setattr(writer_module, "LONGEST_WAIT_S", 0.0)
    put(journal, record(7))
    assert kinds_of(path).count("window") == 8
    monkeypatch.setattr(writer_module, "LONGEST_WAIT_S", 1e9)
    put(journal, record(8))
    journal.close()
    assert [line["step"] for line in windows_of(path)] == list(range(9))


def test_a_second_run_is_appended_behind_the_first(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "run.jsonl"  # folders are made
    for number in range(2):
        journal = Journal(str(path), FACTS)
        put(journal, record(number, names=("a",)))
        journal.close()
    assert kinds_of(path) == ["start", "names", "window", "end"] * 2


@pytest.mark.parametrize("kept", [1, 10, 40])
def test_a_last_line_that_was_cut_off_is_closed_first(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    put(journal, record(0))
    journal.close()
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-2]) + whole[-2][:kept])
    Journal(str(path), FACTS).close()
    found = path.read_bytes().split(b"\n")
    assert found[1] == whole[1][:kept]
    assert [parse(line)["kind"] for line in (found[0], *found[2:4])] == ["start", "start", "end"]


@pytest.mark.parametrize("kept", [0, 9, 30])
def test_a_file_whose_first_line_was_cut_off_can_be_resumed_again_and_again(
    tmp_path: Path, kept: int
) -> None:
    path = tmp_path / "run.jsonl"
    Journal(str(path), FACTS).close()
    path.write_bytes(path.read_bytes()[:kept])
    for _ in range(3):
        Journal(str(path), FACTS).close()
    found = path.read_bytes().splitlines()
    if kept:
        found = found[1:]
    assert [parse(line)["kind"] for line in found] == ["start", "end"] * 3


FOREIGN = {
    "a text": b"step,loss\n1,2\n",
    "other json lines": b'{"loss": 1}\n',
    "a list": b"[1]\n",
    "one word": b"hello",
    "bytes": bytes(range(256)),
    "an empty line": b"\n",
    "a deep nest": b"[" * 60000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not a telemetry file.*another path") as caught:
        Journal(str(path), FACTS)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("version", [FORMAT + 1, "2", None, 1e300])
def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "run.jsonl"
    text = '{"kind":"start","format":' + json.dumps(version) + "}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"format .*this version writes {FORMAT}\."):
        Journal(str(path), FACTS)
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    """Below a regular file: not even root can make that."""
    file = tmp_path / "file"
    file.write_text("")
    for path, reason in ((file / "run.jsonl", "file' is not a directory"), (tmp_path, "it is")):
        with pytest.raises(ConfigError, match=reason) as caught:
            Journal(str(path), FACTS)
        assert f"got '{path}', which cannot be appended to" in str(caught.value)
    with pytest.raises(ConfigError, match="name too long"):
        Journal(str(tmp_path / ("x" * 300)), FACTS)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_disk_that_is_full_at_the_start_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'/dev/full'.*No space left"):
        Journal("/dev/full", FACTS)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0

    before = count()
    journal = Journal(str(tmp_path / "a"), FACTS)
    assert count() == before + 1 or not before
    journal.close()
    dropped = Journal(str(tmp_path / "b"), FACTS)
    del dropped
    if os.path.exists("/dev/full"):
        with pytest.raises(ConfigError):
            Journal("/dev/full", FACTS)
    assert count() == before


class Disk:
    """``os.write`` onto a disk that may be full after some more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        write = os.write

        def limited(fd: int, data: Any) -> int:
            if self.room is None:
                return write(fd, data)
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = write(fd, data[: self.room])
            self.room -= done
            return done

        monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 25])
def test_a_disk_that_fills_is_one_warning_and_later_windows_are_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    path = tmp_path / "run.jsonl"
    journal, disk = Journal(str(path), FACTS), Disk(monkeypatch)
    put(journal, record(0))
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        disk.room = room
        put(journal, record(1, names=("a",)), record(2, names=("a",), skipped=True))
        disk.room = None
        put(journal, record(3, names=("a",)))
        disk.room = 0
        put(journal, record(4, names=("a",)))
        disk.room = None
        journal.close()
    (message,) = [r.getMessage() for r in caplog.records]
    assert str(path) in message
    assert "No space left on device. Training goes on; later windows are tried again" in message
    whole, broken = [], 0
    for line in path.read_bytes().splitlines():
        try:
            whole.append(parse(line))
        except ValueError:
            broken += 1
    assert broken == (1 if room else 0)
    # The names were lost with the first window that had them.
    assert [line["kind"] for line in whole] == ["start", "window", "names", "window", "end"]
    assert [line["step"] for line in whole if line["kind"] == "window"] == [0, 3]
    assert (whole[-1]["windows"], whole[-1]["skips"], whole[-1]["lost"]) == (5, 1, 3)


def test_a_slow_disk_that_takes_a_few_bytes_at_a_time_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "run.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    journal = Journal(str(path), FACTS)
    put(journal, record(0))
    journal.close()
    assert kinds_of(path) == ["start", "window", "end"]


CHILD = """
import os, sys
from accel_scaler.telemetry import writer as module
from accel_scaler.telemetry.writer import Journal
module.LONGEST_WAIT_S = 0.0
from accel_scaler.telemetry.record import Record
journal = Journal(sys.argv[1], {})
def put(index):
    journal.add(Record(index, 8.0, 8.0, False, None), (), ())
put(0)
"""


def run(program: str, path: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD + program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **more)


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


@pytest.mark.process
def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    done = run("put(1)\nos.kill(os.getpid(), 9)\nput(2)", path)
    assert done.returncode == -signal.SIGKILL
    assert kinds_of(path) == ["start", "window", "window"]
    Journal(str(path), FACTS).close()
    assert kinds_of(path) == ["start", "window", "window", "start", "end"]


@pytest.mark.process
def test_a_file_as_large_as_it_may_be_does_not_end_the_process(tmp_path: Path) -> None:
    """A real refusal by the kernel, in the middle of a line."""
    path = tmp_path / "run.jsonl"
    program = """
import resource
room = os.path.getsize(sys.argv[1]) + 300
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
for index in range(1, 9):
    put(index)
journal.close()
print("trained on")
"""
    done = run(program, path)
    assert (done.returncode, done.stdout) == (0, "trained on\n")
    assert done.stderr.count("cannot be written: File too large") == 1
    assert "Traceback" not in done.stderr
    *whole, last = path.read_bytes().split(b"\n")
    assert [parse(line)["kind"] for line in whole] == ["start", "window", "window"]
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        parse(last)


def test_a_reader_that_left_a_pipe_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    journal = Journal(str(path), FACTS)
    put(journal, record(0))
    found = os.read(reading, 1 << 16).decode().splitlines()
    assert [parse(line)["kind"] for line in found] == ["start", "window"]
    os.close(reading)
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        put(journal, record(1), record(2))
        journal.close()
    assert [r.getMessage().count("Broken pipe") for r in caplog.records] == [1]


def test_a_tensor_of_numbers_never_reaches_the_file(tmp_path: Path) -> None:
    """The journal takes Python numbers; a float of torch's float32 is one."""
    path = tmp_path / "run.jsonl"
    journal = Journal(str(path), FACTS)
    put(journal, record(0, lr=(float(torch.tensor(0.1)),)))
    journal.close()
    assert windows_of(path)[0]["lr"] == [float(torch.tensor(0.1))]


@pytest.mark.parametrize(
    "path",
    ["run.jsonl", "new/below/run.jsonl", "ours.jsonl", "cut.jsonl", "empty", ".",
     "file/run.jsonl", "file/below/run.jsonl", "file", "newer.jsonl"],
)  # fmt: skip
def test_a_check_beforehand_refuses_what_a_journal_refuses_and_leaves_no_trace(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not telemetry\n")
    Path("empty").write_text("")
    Path("ours.jsonl").write_text('{"kind": "start", "format": 1}\n')
    Path("cut.jsonl").write_text('{"kind": "sta')
    Path("newer.jsonl").write_text('{"kind": "start", "format": 99}\n')
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}

    def refuses(attempt: Callable[[str], object]) -> bool:
        try:
            attempt(path)
        except ConfigError:
            return True
        return False

    expected = path in (".", "file/run.jsonl", "file/below/run.jsonl", "file", "newer.jsonl")
    assert refuses(check_path) == expected
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before
    assert refuses(lambda path: Journal(path, {}).close()) == expected
