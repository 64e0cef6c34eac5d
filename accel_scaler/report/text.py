"""The report as plain text, for a terminal."""

from __future__ import annotations

from ..telemetry import verdict
from .findings import find
from .key_numbers import key_numbers
from .run import Run


def in_words(run: Run) -> str:
    """A heading, the verdict, key numbers, then a paragraph a finding."""
    lines = [run.label, "=" * min(len(run.label), 80), verdict(run, is_file=True), ""]
    numbers = key_numbers(run)
    width = max(len(each.name) for each in numbers)
    lines += [f"{each.name:<{width}}  {each.value}  {each.more}".rstrip() for each in numbers]
    marks = {"bad": "[!!]", "warn": "[! ]", "note": "[  ]", "good": "[ok]"}
    for finding in find(run):
        lines += ["", f"{marks[finding.level]} {finding.title}"]
        lines += [f"     {finding.text}"] if finding.text else []
    return "\n".join(lines)
