"""``accel-scaler report``: telemetry files to a page, or to words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..console import plain, say
from ..errors import ConfigError
from .html import html_page
from .reader import read_run
from .run_summary import Run
from .text import all_in_words

MOST_RUNS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``accel-scaler report`` to a parser."""
    parser.description = (
        "Show what the scaler did: the summary in words, charts, and a table of what overflowed. "
        "The file is written by training with telemetry=PATH."
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="run.jsonl",
        help=f"telemetry files, at most {MOST_RUNS}; several are compared",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="where to write the page (default: report.html)",
    )
    parser.add_argument("--text", action="store_true", help="print the summary and write nothing")


def run(args: argparse.Namespace) -> int:
    """Make the report that ``add_arguments`` describes; 0 when it is there.

    Raises:
        ConfigError: a file that is not telemetry, an output that cannot be written.
    """
    if len(args.files) > MOST_RUNS:
        raise ConfigError(
            f"report: got {len(args.files)} files, expected at most {MOST_RUNS}; leave some out."
        )
    if args.text and args.output:
        raise ConfigError("report: --text prints, -o writes; give one of the two.")
    if args.output and any(_same(args.output, path) for path in args.files):
        raise ConfigError(f"report: {args.output} is one of the files to read; write elsewhere.")
    runs = [read_run(path) for path in args.files]
    label(runs)
    for one in runs:
        if not one.windows:
            print(f"{one.label}: no windows in this file.", file=sys.stderr)
    if args.text:
        say(all_in_words(runs))
        return 0
    output = Path(args.output or "report.html")
    try:
        output.write_text(html_page(runs), encoding="utf-8", newline="\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{output}: cannot be written ({why}); give another place with -o."
        ) from None
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def label(runs: Sequence[Run]) -> None:
    """Name each run: its file, all of its path where names are alike, the rank of several."""
    names = [Path(one.path).name for one in runs]
    for one, name in zip(runs, names, strict=True):
        facts = one.sessions[0].facts if one.sessions else {}
        several = facts.get("ranks", 1) > 1
        text = one.path if names.count(name) > 1 else name
        one.label = plain(text + (f" (rank {facts.get('rank', '?')})" if several else ""))


def _same(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)
