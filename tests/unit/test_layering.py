"""Imports between the folders point one way, through each folder's face; each folder has a size."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from package_imports import FOLDERS, MODULES, PACKAGE, own_imports, tree_of

ORDER = [
    *("version", "errors", "console", "devices", "models", "config_file", "config"),
    *(f"{folder}/" for folder in FOLDERS),
    *("__init__", "cli", "__main__"),
]
"""Modules and folders of the package: each may import those before it."""

WITHOUT_FACE = {"launch"}
"""A launched process imports one module of it alone: others would cost it Accelerate's commands."""

ONLY_IN = {
    "accelerate": {
        "integrations/accelerator",
        "integrations/attaching",
        "integrations/attachment",
        "integrations/autocast",
        "integrations/optimizer",
        "integrations/stock_scaler",
        "launch/launcher",
        "selftest/command",
        "selftest/rows",
        "selftest/training",
    },
    "psutil": {"async_optimizer/worker", "devices"},
    "transformers": {"integrations/trainer"},
    "yaml": {"config_file"},
}
"""Whose modules may import another library; torch is everywhere but in ``WITHOUT_TORCH``."""

WITHOUT_TORCH = {
    *("report", "config", "config_file", "console", "errors", "version", "cli"),
    *("__init__", "__main__"),
}


MAX_LINES = {
    "scaling": 2_550,
    "optimizer_step": 4_421,
    "async_optimizer": 1_430,
    "integrations": 1_256,
    "overflow": 2_510,
    "telemetry": 1_266,
    "report": 597,
    "launch": 446,
    "selftest": 653,
    "": 984,
}
"""Lines of ``*.py`` in each folder, docstrings and comments included; "": the single modules."""

AIR = 1.05
"""A folder may be 5 per cent above its row, so that a first contribution has room. Who needs more
makes the folder smaller, or takes the lines from another row; the sum of the rows stays."""

MAX_SUM = 16_113
"""The aim is 15,000."""


def place(name: str) -> int:
    """Where a module's name stands in ``ORDER``."""
    folder, inside, _ = name.partition("/")
    return ORDER.index(folder + inside)


def broken(name: str) -> Iterator[tuple[str, str]]:
    """``(module, what)`` for every import of ours in it that breaks a rule."""
    tree = tree_of(name)
    folder, modules = name.partition("/")[0], set()
    for module, taken in own_imports(name):
        other, _, inside = module.partition("/")
        is_folder = f"{other}/__init__" in MODULES
        if taken.startswith("_") and not taken.startswith("__"):
            yield name, f"takes {module}: {taken}"
        if not taken:
            modules.add(module.rpartition("/")[2])
        if is_folder and other == folder:
            continue
        if place(f"{other}/" if is_folder else other) >= place(name):
            yield name, f"looks up to {other}"
        if inside and other not in WITHOUT_FACE:
            yield name, f"looks into {module}"
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if private and ast.unparse(node.value) in modules:
            yield name, f"takes {ast.unparse(node.value)}: {node.attr}"


def libraries(name: str) -> set[str]:
    """Other people's packages that a module imports."""
    found: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names)


def test_every_module_has_a_place() -> None:
    tops = {name.partition("/")[0] + ("/" if "/" in name else "") for name in MODULES}
    assert tops == set(ORDER)


def test_imports_point_one_way_and_enter_by_the_face() -> None:
    found = {each for name in MODULES for each in broken(name)}
    assert found == set()


@pytest.mark.parametrize("folder", [name[:-1] for name in ORDER if name.endswith("/")])
def test_a_face_says_what_its_folder_is_for_and_hands_out_what_others_use(folder: str) -> None:
    tree = tree_of(f"{folder}/__init__")
    assert len((ast.get_docstring(tree) or "").split("\n\n")) == 2
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1]
    given = {alias.name for node in imports for alias in node.names}
    used = set()
    for name in MODULES:
        if name.partition("/")[0] != folder:
            used |= {taken for module, taken in own_imports(name) if module == folder and taken}
            if (folder, "") in own_imports(name):
                used |= {
                    n.attr
                    for n in ast.walk(tree_of(name))
                    if isinstance(n, ast.Attribute) and ast.unparse(n.value) == folder
                }
    assert given == used


@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_imported_where_they_belong(name: str) -> None:
    for library in libraries(name) - {"torch"}:
        assert name in ONLY_IN[library], f"{name} imports {library}"
    assert "torch" not in libraries(name) or name.partition("/")[0] not in WITHOUT_TORCH


@pytest.mark.parametrize("folder", MAX_LINES, ids=lambda folder: folder or "single modules")
def test_a_folder_stays_within_its_lines(folder: str) -> None:
    paths = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    most = int(MAX_LINES[folder] * AIR)
    assert lines <= most, (
        f"accel_scaler/{folder} has {lines} lines, expected at most {most}: make it smaller, or "
        "take the lines from another row of MAX_LINES, whose sum stays"
    )


def test_the_rows_are_the_folders_and_their_sum_is_the_packages() -> None:
    assert set(MAX_LINES) == {*FOLDERS, ""}
    assert sum(MAX_LINES.values()) == MAX_SUM


IMPORT_CHECK = """
import os, threading, sys
before = dict(os.environ), threading.active_count()
import accel_scaler
assert before == (dict(os.environ), threading.active_count())
assert {"torch", "accelerate", "numpy"}.isdisjoint(sys.modules)
del sys.modules["accel_scaler"]
import torch, accelerate
from accelerate.optimizer import AcceleratedOptimizer
before = (dict(os.environ), threading.active_count(), torch.amp.GradScaler.step,
          accelerate.Accelerator.__init__, AcceleratedOptimizer.step)
import accel_scaler
from accel_scaler import *
after = (dict(os.environ), threading.active_count(), torch.amp.GradScaler.step,
         accelerate.Accelerator.__init__, AcceleratedOptimizer.step)
assert before == after
for name in accel_scaler.__all__:
    assert getattr(accel_scaler, name).__doc__, name
"""


@pytest.mark.process
def test_importing_changes_nothing() -> None:
    # This process has imported it already, and what that had set would be inherited.
    kept = ("PATH", "HOME", "PYTHONPATH", "SYSTEMROOT")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_CHECK], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
