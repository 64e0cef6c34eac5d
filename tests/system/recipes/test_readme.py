"""The script in the README, pasted and run: it prints what the README says it does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import run
from places import ROOT

README = (ROOT / "README.md").read_text("utf-8")
FENCED = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


@pytest.mark.process
def test_the_script_prints_what_stands_below_it(tmp_path: Path) -> None:
    (script,) = [text for kind, text in FENCED if kind == "python" and "manual_seed" in text]
    (printed,) = [text for kind, text in FENCED if kind == "text"]
    assert printed.count(", skipped") == 1, "the output shows one skip"
    (tmp_path / "pasted.py").write_text(script, encoding="utf-8")
    code, out, err = run([sys.executable, "pasted.py"], tmp_path)
    assert code == 0, err
    assert out == printed
