"""``make train`` as it stands in the Makefile, for fewer steps: piped, and in a narrow terminal."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment, run
from places import ROOT
from telemetry_runs import windows_of

pytestmark = pytest.mark.process

STEPS = 6
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""As the Makefile has it."""


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
