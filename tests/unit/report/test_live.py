"""The live report: lines for a pipe, a picture for a terminal of any width, one end."""

from __future__ import annotations

import builtins
import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t
from rich.console import Console

from accel_scaler.errors import ConfigError
from accel_scaler.report import live
from accel_scaler.report.following import Follower
from accel_scaler.report.live import ASCII_BLOCKS, BLOCKS, follow, picture, spark


def lines(count: int, **settings: Any) -> list[Any]:
    story = t.story(count, lambda s, scale: scale > 16384 or 40 <= s < 44, growth_interval=25)
    story[0]["settings"] |= settings
    return [
        line | {"loss": 3 * math.exp(-line["step"] / 30) + 1} if line["kind"] == "window" else line
        for line in story
    ]


def shown(path: Path, width: int = 80, encoding: str = "utf-8") -> str:
    follower = Follower(str(path))
    follower.poll()
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=stream, width=width, force_terminal=False, legacy_windows=False)
    console.print(picture(follower, console))
    stream.seek(0)
    follower.close()
    return stream.read()


@pytest.mark.parametrize("width", [20, 60, 200])
def test_the_picture_has_what_one_looks_at_first_in_every_width(tmp_path: Path, width: int) -> None:
    path = t.write(tmp_path / "run.jsonl", lines(100, step_mode="overlap")[:-1])
    text = shown(path, width)
    flat = " ".join(text.split())
    for part in ("run.jsonl", "windows 100", "skipped 7", "loss 1.1106", "Trained: 100 windows"):
        assert part in flat
    assert "scale 4096" in flat
    assert "The scale fell to" in flat
    assert "was killed" not in flat  # it goes on
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 60:
        (loss,) = [line for line in text.splitlines() if line.startswith("loss ")][-1:]
        assert loss.split()[1][0] == BLOCKS[-1]
        assert loss.split()[1][-1] == BLOCKS[0]
        assert loss.endswith("1.111 to 4")


def test_a_terminal_of_another_alphabet_gets_plain_signs(tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", lines(50))
    text = shown(path, encoding="ascii")
    assert not set(text) & set(BLOCKS)
    assert set(text) & set(ASCII_BLOCKS)


def test_names_in_the_file_are_shown_as_text(tmp_path: Path) -> None:
    story = t.story(60, lambda s, _: 40 <= s < 46)
    story[0]["device_name"] = "[bold]GPU[/bold]\x1b[31m"
    text = shown(t.write(tmp_path / "run.jsonl", story[:-1]))
    assert "[bold]GPU[/bold]\ufffd[31m" in text
    assert "fp32_modules: ['transformer.h.3.mlp.c_fc']" in " ".join(text.split())


def test_before_there_is_anything_it_waits(tmp_path: Path) -> None:
    assert "waiting for the file" in shown(tmp_path / "run.jsonl")
    assert "no window has closed yet" in shown(t.write(tmp_path / "run.jsonl", [t.start()]))


@pytest.mark.parametrize("whole", [True, False])
def test_into_a_pipe_goes_a_line_every_hundred_windows_until_the_end(
    tmp_path: Path, whole: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path, story = tmp_path / "run.jsonl", lines(450)
    monkeypatch.setattr(live, "LINE_EVERY_S", math.inf)
    pieces = [[*story]] if whole else [story[n : n + 30] for n in range(0, len(story), 30)]
    left = iter(pieces)

    def sleep(seconds: float) -> None:
        with open(path, "ab") as file:
            t.write(tmp_path / "piece", next(left))
            file.write((tmp_path / "piece").read_bytes())

    assert follow(str(path), sleep) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("run.jsonl: waiting for the file")
    steps = [line for line in told if line.startswith("step ")]
    assert len(steps) == (1 if whole else 4)
    assert steps[-1].startswith("step 449  windows 450 (10/s)  skipped ")
    assert told[-1].startswith("Trained: 450 windows")


def test_ctrl_c_lets_go_of_the_file_and_is_not_hidden(tmp_path: Path) -> None:
    path = t.write(tmp_path / "run.jsonl", lines(20)[:-1])

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(str(path), sleep)


def test_without_rich_a_terminal_gets_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    path = t.write(tmp_path / "run.jsonl", lines(20))
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError("No module named 'rich'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"needs rich .* pip install accel_scaler\[report\]"):
        follow(str(path))


def test_blocks_are_means_of_neighbours_between_the_least_and_the_largest() -> None:
    assert spark([], 10) == ""
    assert spark([5.0], 10) == "▁"
    assert spark([0.0, 7.0, None, 3.5], 10, "01234567") == "07 4"
    assert spark([0.0, 2.0, 6.0, 8.0], 2, "01") == "01"
    assert spark([1.0, 2.0, 4.0], 9, "012", is_log=True) == "012"
    assert len(spark([float(n) for n in range(1000)], 37)) == 37
    assert spark([-1.7e308, 0.0, 1.7e308], 9, "012") == "012"
    assert spark([1.7e308, 1.7e308, 0.0, 0.0], 2, "01") == "10"
    assert spark([math.nan, 1.0, math.inf, 2.0], 9, "01") == " 0 1"
