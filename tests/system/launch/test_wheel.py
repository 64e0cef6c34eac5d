"""The wheel and the sdist: what they hold.

`make check-dist`, which CI runs too, installs them where nothing is but what they require, and
looks at the commands there (``installed.py``).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("hatchling")
LIMIT_S = 250


def build(source: Path, target: Path, *kinds: str) -> None:
    chosen = [word for kind in kinds for word in ("-t", kind)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(target)],
        cwd=source, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_its_files_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = contents(wheel)
    tops = {re.sub(r"-[\d.]+\.", ".", name.split("/")[0]) for name in inside}
    assert tops == {"accel_scaler", "accel_scaler.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "accel_scaler").rglob("*.py")}
    assert sources <= inside.keys()
    assert {
        "accel_scaler/py.typed",
        "accel_scaler/launch/startup/sitecustomize.py",
        "accel_scaler/report/assets/page.css",
        "accel_scaler/report/assets/page.html",
        "accel_scaler/report/assets/page.js",
        "accel_scaler/report/assets/uPlot.iife.min.js",
        "accel_scaler/report/assets/uPlot.min.css",
    } <= inside.keys()
    for config in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert inside[f"accel_scaler/accelerate_configs/{config.name}"] == config.read_bytes()
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert any(
        name.endswith("licenses/accel_scaler/report/assets/uPlot.LICENSE") for name in inside
    )
    (points,) = [name for name in inside if name.endswith("entry_points.txt")]
    assert b"accel-scaler = accel_scaler.cli:main" in inside[points]


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    top = ("README.md", "LICENSE", "Makefile", "mkdocs.yml")
    for needed in (*top, "tests/conftest.py", "recipes", "docs", ".ci/run"):
        assert (source / needed).exists(), needed
    build(source, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)
