"""What is broken in the docs ends the build of the site with an error that names it.

That they are not broken is what `make docs` finds, which CI runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.process

LIMIT_S = 200
LINKS = """
[a page](no-such-page.md), [a heading](modes.md#no-such-heading), ![a picture](assets/none.png),
[`a name`][accel_scaler.GradScaler.no_such_method]
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository, its docs as files of its own."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", "out", ".git") and not path.name.startswith(".venv"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def add_to(page: Path, more: str) -> None:
    text = page.read_text("utf-8")
    page.unlink()  # it may be a link to the repository's
    page.write_text(text + more, encoding="utf-8")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_what_is_broken_is_named(copy: Path) -> None:
    """A page, a heading, a picture, a name of the API; a link of the README to no page."""
    broken = ("no-such-page.md", "#no-such-heading", "assets/none.png", "no_such_method")
    add_to(copy / "docs/what-to-expect.md", LINKS)
    first = build(copy)
    add_to(copy / "README.md", "\n[tests](tests/conftest.py)\n")
    second = build(copy)
    assert (first.returncode, second.returncode) == (1, 1)
    for name in broken:
        assert name in first.stderr, first.stderr
    assert "tests/conftest.py" in second.stderr
