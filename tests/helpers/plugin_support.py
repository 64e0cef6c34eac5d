"""What the tests of the plugin share: the option, the samples' folder, and how a run ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from places import HELPERS, ROOT

THEIRS = ROOT / "tests/system/plugin/theirs"
OPTION = "--with-accel-scaler"


class Ended:
    """A run of pytest: what it printed, and how many tests ended how."""

    def __init__(self, text: str) -> None:
        self.text = text
        last = [line for line in text.splitlines() if re.search(r" in [\d.]+s", line)]
        counts = re.findall(r"(\d+) (passed|failed|error|skipped)", last[-1]) if last else []
        self.counts = {what: int(number) for number, what in counts}

    @property
    def failed(self) -> set[str]:
        """The functions whose tests failed, by the short summary."""
        found = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", self.text, re.MULTILINE)
        return {name.split("::")[-1].split("[")[0] for name in found}


def start(
    command: list[str], folder: Path, stdin: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this process's environment less what others have set."""
    others = ("ACCELERATE_", "ACCEL_SCALER_", "PYTEST_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests/plugin", HELPERS, THEIRS]))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *command],
        input=stdin,
        cwd=folder,
        env={**kept, **offline, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
