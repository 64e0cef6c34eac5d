"""A run overflows in one process; ``accel-scaler replay`` says the same in another, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from accel_scaler.overflow_finder import read

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SCRIPT = ROOT / "tests" / "helpers" / "overflowing.py"


def python(*argv: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def saved(folder: Path, kind: str, *settings: str) -> Path:
    """The file of a run."""
    said = python(str(SCRIPT), str(folder), kind, *settings)
    (path,) = folder.iterdir()
    assert f"accel-scaler replay {path}" in said
    return path


def replay(path: Path, *argv: str, status: int = 0) -> str:
    return python("-m", "accel_scaler", "replay", str(path), *argv, status=status)


def model(name: str) -> tuple[str, str]:
    return "--model", f"{SCRIPT}:{name}"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("net", []),
        ("net", ["step_mode=overlap"]),
        ("net", ["step_mode=delayed", "offload=cpu"]),
        ("outside", []),
        ("half", []),
        ("frozen", []),
        ("sharp", []),
        ("gpt2", ["init_scale=65536"]),
    ],
    ids=str,
)
def test_another_process_says_the_same(kind: str, settings: list[str], tmp_path: Path) -> None:
    path = saved(tmp_path / "out", kind, *settings)
    # On other weights the function's own would give other numbers: those of the file are used.
    name = {"outside": "net", "net": "moved"}.get(kind, kind)
    said = replay(path, *model(name))
    assert f"The same verdict, bit for bit: {read(path).origin['text']}" in said
