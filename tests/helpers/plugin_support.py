"""What the tests of the plugin share: the option, the samples, and a Python that has both."""

from __future__ import annotations

import os
from pathlib import Path
from sys import executable

from launching import run
from places import HELPERS, ROOT

THEIRS = ROOT / "tests/system/plugin/theirs"
OPTION = "--with-accel-scaler"


def python(command: list[str], folder: Path) -> str:
    """Run it in a folder; what it printed, once it ended well."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests/plugin", HELPERS, THEIRS]))
    code, out, err = run([executable, *command], folder, PYTHONPATH=path)
    assert code == 0, out + err
    return out
