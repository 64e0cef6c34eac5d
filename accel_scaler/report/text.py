"""The report as plain text, for a terminal."""

from __future__ import annotations

from ..telemetry import verdict
from .findings import facts, find
from .run import Run


def in_words(run: Run) -> str:
    """A heading, the verdict, key numbers, then a paragraph a finding."""
    lines = [run.label, "=" * min(len(run.label), 80), verdict(run, is_file=True), ""]
    width = max((len(name) for name, _ in facts(run)), default=0)
    lines += [f"{name:<{width}}  {value}" for name, value in facts(run)]
    marks = {"bad": "[!!]", "warn": "[! ]", "note": "[  ]", "good": "[ok]"}
    for finding in find(run):
        lines += ["", f"{marks[finding.level]} {finding.what}"]
        lines += [f"     {text}" for text in (finding.look, finding.do) if text]
    return "\n".join(lines)
