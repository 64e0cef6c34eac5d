"""The default data set of finetune_classifier.py: docstrings of Python's standard library.

Read from the source files of the running Python, so it needs no network. Each docstring is labelled
by the part of the library it is from, and whole modules are held out.
"""

import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, DatasetDict

# A label is a package, or several of one purpose; a package that this Python lacks is left out.
LABELS = {
    **{name: [name] for name in ("asyncio", "email", "importlib", "logging", "multiprocessing")},
    **{name: [name] for name in ("tkinter", "unittest", "xml")},
    "web": ["html", "http", "urllib", "wsgiref", "xmlrpc"],
}
MIN_CHARACTERS = 30  # less than a short sentence tells nothing
MAX_TRAIN, MAX_HELD_OUT = 240, 40  # of one label, so that no large package rules the score


def docstrings_of(package: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, docstring) for all of a package, read from its source without importing it."""
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "test" in parts or "tests" in parts:
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield ".".join(parts), " ".join(text.split())


def split_by_module(rows: list[dict], rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Hold out whole modules, about a quarter of one label's docstrings, at least one module."""
    by_module: dict[str, list[dict]] = {}
    for row in rows:
        by_module.setdefault(row["module"], []).append(row)
    modules = sorted(by_module)
    rng.shuffle(modules)
    held_out: list[dict] = []
    for module in modules:
        # The largest modules stay in training, else one of them is the whole held-out part.
        room = len(rows) / 4 - len(held_out) if held_out else len(rows) / 3
        if len(by_module[module]) <= room:
            held_out += by_module[module]
    gone = {row["module"] for row in held_out}
    return [row for row in rows if row["module"] not in gone], held_out


def standard_library(seed: int, root: Path | None = None) -> DatasetDict:
    """Build the default data set: docstrings, labelled by the part of the library they are from."""
    root = root or Path(sysconfig.get_path("stdlib"))
    # The package's own name in the text would give the answer away.
    names = re.compile(rf"\b({'|'.join(p for ps in LABELS.values() for p in ps)})\b", re.IGNORECASE)
    found = [
        {"text": names.sub("_", text), "label": label, "module": module}
        for label, packages in LABELS.items()
        for package in packages
        for module, text in docstrings_of(package, root)
        if len(text) >= MIN_CHARACTERS
    ]
    # A text found twice could land in both splits, or stand under two labels.
    times = Counter(row["text"] for row in found)
    rng = random.Random(seed)
    splits: dict[str, list[dict]] = {"train": [], "validation": []}
    for label in LABELS:
        rows = [row for row in found if row["label"] == label and times[row["text"]] == 1]
        train, held_out = split_by_module(rows, rng)
        if train and held_out:
            splits["train"] += rng.sample(train, min(MAX_TRAIN, len(train)))
            splits["validation"] += rng.sample(held_out, min(MAX_HELD_OUT, len(held_out)))
    if not splits["train"]:
        raise SystemExit(f"error: no docstrings in {root}; give your own texts with --train_file")
    return DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
