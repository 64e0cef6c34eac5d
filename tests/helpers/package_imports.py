"""Who imports whom in the package: for the test of its layers, and the picture in ARCHITECTURE.md.

python tests/helpers/package_imports.py    # draws the picture anew
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache

from places import ROOT

PACKAGE = ROOT / "accel_scaler"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "```mermaid\n", "```\n"

FOLDERS = (
    *("scaling", "optimizer_step", "async_optimizer", "telemetry", "report", "overflow"),
    *("integrations", "launch", "selftest"),
)
"""Each may import those before it, and the single modules."""


MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "sitecustomize.py"
}
"""``scaling/window``; a face is ``scaling/__init__``."""


@cache
def tree_of(name: str) -> ast.Module:
    """A module, parsed."""
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def own_imports(name: str) -> Iterator[tuple[str, str]]:
    """``(module or folder, name taken from it)`` for each import of ours, late ones included."""
    folder = name.split("/")[:-1]
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = folder[: len(folder) - node.level + 1]
            start = "/".join([*above, *(node.module or "").split(".")]).strip("/")
            for alias in node.names:
                whole = f"{start}/{alias.name}".strip("/")
                if whole in MODULES or f"{whole}/__init__" in MODULES:
                    yield whole, ""
                else:
                    yield start, alias.name


def arrows() -> Counter[tuple[str, str]]:
    """``(folder, folder that it imports from)``, with the number of names taken."""
    taken = {
        (name.partition("/")[0], module.partition("/")[0], module, what)
        for name in MODULES
        for module, what in own_imports(name)
    }
    return Counter(
        (above, below)
        for above, below, _, _ in taken
        if above != below and above in FOLDERS and below in FOLDERS
    )


def picture() -> str:
    """The folders as a Mermaid flowchart, users above what they use."""
    found = arrows()
    lines = ["flowchart TD"]
    lines += [f"    {folder}" for folder in reversed(FOLDERS)]
    for (above, below), names in sorted(found.items()):
        lines.append(f"    {above} -- {names} --> {below}")
    return "\n".join(lines) + "\n"


def drawn() -> str:
    """The picture as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + picture() + END + after, encoding="utf-8")
