"""Telemetry files made to harm: read as data or refused in one line, shown as text.

``test_fuzz.py`` has those that chance makes, ``test_config_file.py`` config files. Takes about
15 s, most of it drawing pictures.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler import cli
from accel_scaler.errors import shown
from accel_scaler.launch import launcher

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no config file of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "default_config_file", str(tmp_path / "none.yaml"))
    return tmp_path


def test_what_is_shown_of_a_value_is_short_and_what_is_short_is_shown() -> None:
    for short in (None, True, 1.5, "cpu", ["cpu"], {"a": [1]}, 10**30, b"x", Path("a")):
        assert shown(short) == repr(short)
    many: Any = "x"
    for _ in range(60):
        many = [many, many]
    for long in (many, "x" * 10**6, list(range(10**5)), {n: n for n in range(999)}):
        assert len(shown(long)) < 1_300


# Telemetry, as text.

EVIL = [
    "<script>alert(1)</script>",
    "</svg></text><script>1</script>",
    '" onload="alert(1)" x="',
    "' onclick='alert(1)",
    "]]>--><img src=x onerror=1>",
    "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "\u202etxt.exe\u2066\u200b\x00\r\x08",
    "$\\frac{a}{b}$ %s {0} \u2028 \ud800",
    "url(http://x.invalid/) @import",
]
MEAN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Steers a terminal, turns text around, or is none."""


def run_with(texts: list[str], path: Path) -> Path:
    """A telemetry file with these texts (nine) in every field that holds one."""
    first: dict[str, Any] = {
        "where": "forward",
        "module": texts[0],
        "class": texts[1],
        "text": texts[2],
    }
    first |= {"input": [-1.0, "inf"], "output": None, "micro_batch": 1}
    bad: dict[str, Any] = {"overflowed": texts, "loss_nonfinite": 1}
    bad |= {"norms": t.norms([1.0] * len(texts)), "underflow": [[0, 0.5]]}
    bad |= {"optimizer_us": 10, "waited_us": 5, "hidden_us": 5, texts[3]: texts[4]}
    bad |= {"healed": texts}
    bad |= {"spans": [["wait", 1000 + 10 * i, 5, text] for i, text in enumerate(texts)]}
    lines: list[Any] = [
        t.start(
            package=texts[0], device=texts[1], precision=texts[2], torch=texts[3],
            accelerate=texts[4], note=texts[5],
            settings={"step_mode": "overlap", "growth_interval": texts[6]}
            | {text: texts[i - 1] for i, text in enumerate(texts)},
        ),
        t.names(texts),
        {"kind": texts[6], texts[7]: texts[8]},
        *(t.window(s, skipped=True, first=first, **bad) for s in range(9)),
        *(t.window(s, mode_seconds=texts) for s in range(9, 12)),
        t.end(12, " ".join(texts)),
    ]  # fmt: skip
    return t.write(path, [json.dumps(line) for line in lines])


@pytest.mark.parametrize("argv", [["--text"], ["-o", "r.html"]])
def test_a_terminal_gets_no_control_characters_of_a_file(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_with(EVIL, folder / "run\x1b[2J\u202e.jsonl")
    empty = folder / "empty\x1b[31m.jsonl"
    empty.touch()
    for file in (path, empty):
        assert cli.main(["report", str(file), *argv]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "no steps in this file" in err
    assert not MEAN.search(out.replace("\n", "") + err.replace("\n", ""))


def test_an_error_about_a_file_steers_no_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'accel_scaler:\n  "\\e[2J\\u202e": 1\n'
    (folder / "c\x1b[2J.yaml").write_text(text)
    (folder / "c\x1b[2J.jsonl").write_text("\x1b[2J no telemetry")
    (folder / "d\x1b[2J.yaml").write_text('"\\e[2J\\u202e": 1\ndistributed_type: "\\e[2JNO"\n')
    for argv in (
        ["launch", "--dry_run", "--config_file", "c\x1b[2J.yaml"],
        ["launch", "--dry_run", "--config_file", "d\x1b[2J.yaml"],
        ["launch", "--dry_run", "--cpu", "--telemetry", "e\x1b[2J.jsonl"],
        ["launch", "--cpu", "script\x1b[2J.py"],
        ["report", "c\x1b[2J.jsonl"],
        ["report", "none\x1b[2J.jsonl"],
    ):
        status = cli.main(argv)
        out, err = capsys.readouterr()
        assert err if status else out
        assert not MEAN.search((out + err).replace("\n", "")), argv
