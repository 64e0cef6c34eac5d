"""Commands in processes of their own, as a user types them; none outlives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import HELPERS, ROOT

LIMIT_S = 280
STOCK = [sys.executable, "-m", "accelerate.commands.launch"]
OURS = [sys.executable, "-m", "accel_scaler", "launch"]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """This process's, without what other tests or a user have set; nothing is downloaded."""
    others = ("ACCELERATE_", "ACCEL_SCALER_", "KAGGLE", "PYTEST_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    ours = {
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # threads that share busy cores wait for each other
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return kept | ours | extra


def start(command: list[Any], folder: Path, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment(folder, **extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A job in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    """Exit status, standard output, standard error; what is left of it is ended."""
    try:
        said = process.communicate(stdin, timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, *said


def run(command: list[Any], folder: Path, stdin: str = "", **extra: str) -> tuple[int, str, str]:
    return finish(start(command, folder, **extra), stdin)


def facts_in(output: str) -> list[dict[str, Any]]:
    """What ranks printed as JSON, by rank: two of them may write into one line."""
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(text)[0] for text in output.split("FACTS ")[1:]]
    return sorted(found, key=lambda fact: int(fact.get("rank", 0)))
