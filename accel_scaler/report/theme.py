"""Colours of the page, light and dark."""

from __future__ import annotations

HUES = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#161b22"),
    "ground": ("#f5f7f9", "#0d1117"),
    "bad": ("#c84e00", "#ff8f4a"),
    "warn": ("#8a6100", "#e3b341"),
    "good": ("#1a7f37", "#4ac26b"),
    "line-0": ("#0072b2", "#58b0ea"),
    "line-1": ("#b5407c", "#f08fc0"),
    "line-2": ("#00795a", "#3fcf9d"),
    "line-3": ("#8a6100", "#e3b341"),
    "optimizer": ("#cc79a7", "#e39bc4"),
    "wait": ("#6e7781", "#8b949e"),
}
"""Of each name the colour on light and on dark paper. Told apart by those who see colours
differently as well (after Okabe and Ito)."""
