"""``accel-scaler report``: a telemetry file to a page, or to words."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..console import say
from ..errors import ConfigError
from .html import html_page
from .reader import read_run
from .summary import in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``accel-scaler report`` to a parser."""
    parser.description = (
        "Show what became of each optimizer step, on one page: a summary in words, and charts. "
        "A run writes the file with telemetry=PATH, or accel-scaler launch --telemetry PATH."
    )
    parser.add_argument("file", metavar="run.jsonl", help="the telemetry file")
    to = "where to write the page (default: report.html)"
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", metavar="PATH", help=to)
    where.add_argument("--text", action="store_true", help="print the summary and write nothing")


def run(args: argparse.Namespace) -> int:
    """Make the report that ``add_arguments`` describes; 0 when it is there. Raises ``ConfigError``
    for a file that is not telemetry, and an output that cannot be written."""
    run = read_run(args.file)
    if args.output and os.path.exists(args.output) and os.path.samefile(args.output, args.file):
        raise ConfigError(f"report: {args.output} is the file to read; write elsewhere.")
    if not run.windows:
        print(f"{run.label}: no steps in this file.", file=sys.stderr)
    if args.text:
        say(in_words(run))
        return 0
    output = Path(args.output or "report.html")
    try:
        output.write_text(html_page(run), encoding="utf-8", newline="\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{output}: cannot be written ({why}); give another place with -o."
        ) from None
    say(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
