"""Every private name of another library that we lean on is still there, and none is unlisted."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from private_names import OPTIONAL, PRIVATE

SOURCES = [p for d in ("accel_scaler", "recipes", "benchmarks") for p in (ROOT / d).rglob("*.py")]
ALL = [
    (library, holder, name)
    for library, holders in PRIVATE.items()
    for holder, names in holders.items()
    for name in names
]
LISTED = {name for _, _, name in ALL} | set(OPTIONAL)


def missing(library: str, holder: Any, name: str) -> str:
    """A sentence, if it is gone."""
    found = pkgutil.resolve_name(holder) if isinstance(holder, str) else holder()
    if hasattr(found, name):
        return ""
    release = sys.version.split()[0] if library == "argparse" else version(library)
    where = holder if isinstance(holder, str) else holder.__doc__.rstrip(".")
    users = sorted(path.name for path, tree in TREES.items() if name in private_names_of(tree))
    return (
        f"{library} {release} has no {name} in {where}, and {', '.join(users)} lean on it: find "
        f"what took its place, or hold {library} below {release} in pyproject.toml"
    )


@pytest.mark.parametrize(("library", "holder", "name"), ALL, ids=[name for *_, name in ALL])
def test_a_private_name_that_we_lean_on_is_there(library: str, holder: Any, name: str) -> None:
    assert not missing(library, holder, name), missing(library, holder, name)


def own_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines: functions, classes, variables, attributes of self, slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))


def used_names(tree: ast.AST) -> Iterator[str]:
    """Private names read, set, imported, or given as a string to getattr and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (alias.name for alias in node.names)
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield str(node.value)


def private_names_of(tree: ast.AST) -> set[str]:
    return {n for n in used_names(tree) if n.startswith("_") and not n.startswith("__")}


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
OURS = {name for tree in TREES.values() for name in own_names(tree)}
PUBLIC_PARTS = {
    "_python_dispatch": "torch documents TorchDispatchMode, of this module alone",
    "_accel_scaler": "our own mark on others' objects",
    "_accel_scaler_emulates": "our own mark on others' objects",
    "_accel_scaler_stepper": "our own mark on others' objects",
    "_global_optimizer_": "the start of two names in the list",
    "_optimizer_step_": "the start of two names in the list",
    "_optimizer_": "the start of what torch keeps hooks in, for its own methods",
    "_hooks": "the end of names in the list",
    "_backward": "the end of a name in the list",
    "_replace": "documented, of a named tuple",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_private_name_of_another_library_is_in_the_list(path: Path) -> None:
    unlisted = private_names_of(TREES[path]) - OURS - LISTED - set(PUBLIC_PARTS)
    assert not unlisted, f"{path.name} leans on {sorted(unlisted)}: add it to private_names.py"


def test_every_name_in_the_list_is_used() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    for name in LISTED:
        # Some names are put together from parts.
        stem = name.replace("_pre_hooks", "").replace("_post_hooks", "")
        assert any(stem in text for text in texts), f"nothing uses {name} any more"
