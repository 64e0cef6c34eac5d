"""The wheel and the sdist: what they hold, and that a stranger's environment needs nothing else.

The environment here holds the distributions that torch and Accelerate require, by links, and the
wheel. `make check-dist` does the same with pip and a real, empty environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]
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
    assert {"accel_scaler/py.typed", "accel_scaler/startup/sitecustomize.py"} <= inside.keys()
    for config in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert inside[f"accel_scaler/accelerate_configs/{config.name}"] == config.read_bytes()
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    top = ("README.md", "FAULTS.md", "LICENSE", "Makefile")
    for needed in (*top, "tests/conftest.py", "recipes", ".ci/run"):
        assert (source / needed).exists(), needed
    build(source, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)


def required(name: str, found: dict[str, Path]) -> dict[str, Path]:
    """Top-level files and folders of a distribution and, without extras, of what it requires."""
    try:
        dist = distribution(name)
    except PackageNotFoundError:  # a requirement of another platform
        return found
    if f"{dist.name}/" in found:
        return found
    found[f"{dist.name}/"] = Path()
    for file in dist.files or []:
        top = Path(file).parts[0]
        if top not in ("..", "__pycache__"):
            found[top] = Path(str(dist.locate_file(top)))
    for need in dist.requires or []:
        if "extra ==" not in need:
            required(re.split(r"[^\w.-]", need)[0], found)
    return found


@pytest.fixture
def stranger(built: Path, tmp_path: Path) -> Path:
    """An environment's python."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for top, path in (required("torch", {}) | required("accelerate", {})).items():
        if not top.endswith("/"):
            (site / top).symlink_to(path)
    python = tmp_path / "env" / "bin" / "python"
    install = ["install", "--no-index", "--no-deps", "--quiet", str(wheel)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the environment is made of symbolic links")
def test_installed_beside_torch_and_accelerate_it_imports_clean_and_works(
    stranger: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ACCEL"))}
    done = subprocess.run(
        [str(stranger), "-I", str(ROOT / "tests" / "installed.py"), str(tmp_path / "folder"), "1"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no thread, no patch" in done.stdout
    assert "commands: help" in done.stdout
