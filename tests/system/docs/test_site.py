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


def test_a_broken_link_anchor_picture_or_reference_is_an_error(copy: Path) -> None:
    add_to(copy / "docs/what-to-expect.md", LINKS)
    done = build(copy)
    assert done.returncode == 1
    for broken in ("no-such-page.md", "#no-such-heading", "assets/none.png", "no_such_method"):
        assert broken in done.stderr, done.stderr


def test_a_name_that_the_package_has_not_is_an_error(copy: Path) -> None:
    add_to(copy / "docs/what-to-expect.md", "\n::: accel_scaler.NoSuchError\n")
    done = build(copy)
    assert done.returncode == 1
    assert "accel_scaler.NoSuchError could not be found" in done.stderr


def test_a_link_of_the_readme_to_what_is_no_page_is_an_error(copy: Path) -> None:
    add_to(copy / "README.md", "\n[tests](tests/conftest.py)\n")
    done = build(copy)
    assert done.returncode == 1
    assert "README.md: a link to tests/conftest.py, which is no page of the site" in done.stderr
