"""A file that grows: every line once, no byte twice, whatever is done to the file meanwhile."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.errors import ConfigError
from accel_scaler.report import following
from accel_scaler.report.findings import facts, find
from accel_scaler.report.following import Follower
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run


def bytes_of(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def story(count: int, seed: int = 0) -> list[Any]:
    lines = t.story(count, lambda s, scale: scale > 8192 or s % 50 == 49, seed=seed)
    return [line | {"loss": 1.0} if line["kind"] == "window" else line for line in lines]


def same(one: Run, other: Run) -> bool:
    return facts(one) == facts(other) and find(one) == find(other)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read gave."""
    found: list[int] = []
    real: Callable[[int, int], bytes] = os.read

    def read(fd: int, count: int) -> bytes:
        data = real(fd, count)
        found.append(len(data))
        return data

    monkeypatch.setattr(os, "read", read)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_any_length_give_what_the_whole_file_gives(
    tmp_path: Path, seed: int, reads: list[int]
) -> None:
    rng, path = random.Random(seed), tmp_path / "run.jsonl"
    data = bytes_of([*story(60), *story(90, 1)[:-1]]) + b'{"kind":"end"\n' + bytes_of([t.end(90)])
    follower, at, polls = Follower(str(path)), 0, 0
    assert not follower.poll()
    assert follower.note == "waiting for the file"
    while at < len(data):
        piece = data[at : at + rng.choice([1, 7, 500, 5000])]
        at += len(piece)
        with open(path, "ab") as file:
            file.write(piece)
        if rng.random() < 0.7 or at == len(data):
            assert follower.poll()
            polls += 1
            assert not follower.poll()
        assert follower.is_over == (at == len(data)) or at < len(data)
    assert same(follower.run, read_run(path))
    assert follower.is_over
    peeks = 3 * polls * following.HEAD  # whether it is the same file still
    assert sum(reads) <= len(data) + peeks + following.HEAD * 10
    follower.close()


def test_what_is_there_is_read_in_pieces_of_time_and_the_rest_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = t.write(tmp_path / "run.jsonl", story(3000)), [0.0]
    monkeypatch.setattr(following, "CHUNK", 10_000)

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    follower, shares = Follower(str(path), clock), []
    while not follower.is_over:
        assert follower.poll(2.5)
        shares.append(follower.share_read)
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert (shares[-1], follower.run.windows) == (1.0, 3000)


def test_a_run_so_far_is_that_of_a_file_so_far_and_goes_on(tmp_path: Path) -> None:
    path, lines = tmp_path / "run.jsonl", story(200)
    follower = Follower(str(path))
    for end in range(10, len(lines), 13):
        t.write(path, lines[:end])
        part = t.write(tmp_path / "part.jsonl", lines[:end])
        follower.poll()
        seen = follower.run
        assert same(seen, read_run(part)), end
    t.write(path, lines)
    follower.poll()
    assert same(follower.run, read_run(path))


def test_a_file_that_was_begun_again_is_followed_from_its_beginning(tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", story(50))
    follower = Follower(str(path))
    follower.poll()
    t.write(path, story(20)[:-1])
    assert follower.poll()
    assert (follower.run.windows, follower.note) == (20, "the file was begun again")
    longer = [t.start(unix_time=1.8e9), *story(400)[1:]]
    t.write(path, longer)  # as long as before and longer: another start line
    assert follower.poll()
    assert (follower.run.windows, follower.is_over) == (400, True)


def test_a_file_emptied_under_its_writer_goes_on_with_the_start_that_was_there(
    tmp_path: Path,
) -> None:
    lines, path = story(60), tmp_path / "run.jsonl"
    t.write(path, lines[:40])
    follower = Follower(str(path))
    follower.poll()
    t.write(path, [])
    follower.poll()
    assert follower.run.windows == 0
    t.write(path, lines[40:])
    follower.poll()
    assert follower.run.windows == 60 - 38
    assert follower.run.sessions[0].settings == lines[0]["settings"]
    assert follower.is_over


def test_a_file_moved_away_is_read_to_its_end_and_the_next_one_begun(tmp_path: Path) -> None:
    path, lines = tmp_path / "run.jsonl", story(30)
    t.write(path, lines[:10])
    follower = Follower(str(path))
    follower.poll()
    os.rename(path, tmp_path / "run.1.jsonl")
    with open(tmp_path / "run.1.jsonl", "ab") as file:
        file.write(bytes_of(lines[10:20]))
    assert follower.poll()
    assert follower.run.windows == 18
    assert not follower.poll()
    assert follower.note == "the file is gone; waiting for another"
    t.write(path, story(5))
    assert follower.poll()
    assert (follower.run.windows, follower.note) == (5, "")


def test_a_line_without_an_end_is_not_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LONGEST_LINE", 10_000)
    monkeypatch.setattr(following, "CHUNK", 1_000)
    path = t.write(tmp_path / "run.jsonl", [t.start(), b"x" * 100_000, t.window(0)])
    follower = Follower(str(path))
    follower.poll(60.0)
    assert follower.run.windows == 1
    assert follower.run.broken >= 9


def test_speed_and_silence_are_of_the_last_windows_and_the_present_session(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "run.jsonl"
    follower = Follower(str(path), lambda: now[0])
    assert (follower.windows_per_second, follower.silent_s) == (None, None)
    lines = [t.start(), *(t.window(s, time=100.0 + s) for s in range(100))]
    lines += [t.start(), *(t.window(s, time=0.25 * s) for s in range(5))]
    t.write(path, lines)
    follower.poll()
    assert follower.windows_per_second == 4.0
    now[0] += 30.0
    follower.poll()
    assert follower.silent_s == 30.0


@pytest.mark.parametrize("content", [b"\x80\x04binary\n", b"[1, 2]\n", b"words\n"])
def test_what_is_no_telemetry_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"line 1: not a telemetry file"):
        Follower(str(path)).poll()
    with pytest.raises(ConfigError, match="cannot be read"):
        Follower(str(tmp_path)).poll()


def test_the_end_of_a_session_without_a_window_is_not_the_runs(tmp_path: Path) -> None:
    """A launcher attached first, then its script with settings of its own."""
    path, whole = tmp_path / "run.jsonl", story(3)
    path.write_bytes(bytes_of([whole[0], t.end(0)]))
    follower = Follower(str(path))
    assert follower.poll()
    assert not follower.is_over
    with open(path, "ab") as file:
        file.write(bytes_of(whole))
    assert follower.poll()
    assert follower.is_over
    assert len(follower.run.sessions) == 1
    follower.close()
