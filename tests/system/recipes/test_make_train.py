"""``make train`` as it stands in the Makefile, for fewer steps: piped, and in a narrow terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from launching import environment, run
from places import ROOT
from telemetry_runs import windows_of

pytestmark = pytest.mark.process

STEPS = 6
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""As the Makefile has it."""
COLUMNS = 60


def commands(folder: Path) -> list[list[str]]:
    """What make would run, with this environment's Python, and its files in another folder."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    stamp = folder / "venv" / ".recipes"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    said = subprocess.run(
        ["make", "--no-print-directory", "-n", "train", f"VENV={stamp.parent}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environment(folder),
    ).stdout
    lines = said.replace("\\\n", " ").replace("out/train", str(folder / "train")).splitlines()
    program = f"{stamp.parent}/bin/accel-scaler"
    return [
        [sys.executable, "-m", "accel_scaler", *words[1:]] if words[0] == program else words
        for words in map(shlex.split, lines)
    ]


def test_it_installs_before_it_runs_and_says_so(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    for target, stamps in (("train", [".recipes"]), ("test", [".recipes", ".installed"])):
        asked = ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path / 'new'}"]
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert said.startswith('echo "Installing torch')
        assert re.findall(r"touch .*/(\S+)", said) == stamps
        assert said.count('echo "Installing') == len(stamps)


def test_it_shows_two_skips_and_makes_the_report(tmp_path: Path) -> None:
    clear, train, report = commands(tmp_path)
    assert clear == ["rm", "-rf", str(tmp_path / "train")]  # so a second run replaces the first
    short = ["--max_steps", str(STEPS), "--max_eval_samples", "8"]
    code, out, err = run([*train, *short], ROOT, **PASSIVE)
    assert code == 0, err
    lines = out.splitlines()
    assert "step 1: overflow, skipped; the scale is 524288 now" in lines
    assert "step 2: overflow, skipped; the scale is 262144 now" in lines
    last = f"step {STEPS} of {STEPS}: loss "
    (line,) = [line for line in lines if line.startswith(last)]
    assert re.fullmatch(r"[\d.]+, scale 262144, skipped 2", line.removeprefix(last))
    ours = [line for line in err.splitlines() if "accel" in line]
    assert len(ours) <= 2, err  # what the launcher sets, and how it ended
    assert "were not passed to `accelerate launch`" not in err
    found = windows_of(tmp_path / "train" / "run.jsonl")
    assert [window["skipped"] for window in found] == [True] * 2 + [False] * (STEPS - 2)
    code, out, err = run(report, ROOT)
    assert code == 0, err
    page = tmp_path / "train" / "report.html"
    assert str(page) in out
    assert "</html>" in page.read_text(encoding="utf-8")


def test_in_a_terminal_of_60_columns_the_bar_shows_loss_scale_and_skips(tmp_path: Path) -> None:
    _, train, _ = commands(tmp_path)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [*train, "--max_steps", "5", "--max_eval_samples", "8"],
        cwd=ROOT,
        env=environment(tmp_path, **PASSIVE),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        while part := read(ours):
            said += part
        assert process.wait(timeout=60) == 0, said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    bars = [line for line in re.split(r"[\r\n]+", said.decode()) if re.match(r"\d/5 \|", line)]
    assert all(len(bar) <= COLUMNS for bar in bars)
    assert re.fullmatch(r"5/5 \|.+\| \d\d:\d\d, loss=[\d.]+, scale=262144, skipped=2", bars[-1])
    assert "step 5 of 5" not in said.decode()


def read(terminal: int) -> bytes:
    """b"": the other side was closed, which Linux says with an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
