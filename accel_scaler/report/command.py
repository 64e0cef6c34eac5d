"""``accel-scaler report``: telemetry files to a page, to pictures, or to words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import say
from ..errors import ConfigError
from ..telemetry.decoding import clean
from .figures import norm_figure, offender_figure, scale_figure, timeline_figure
from .findings import in_words
from .heatmap import heat_figure
from .html import html_page
from .reader import read_run
from .run_summary import Run
from .theme import IN_PAGE, LIGHT, Theme, drawing, save_png, save_stacked, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add_arguments", "run"]

MOST_RUNS = 4
CAPTIONS = {
    "scale": "The factor on the loss. It halves when a window overflows, and that step is skipped; "
    "after growth_interval windows without overflow it doubles.",
    "norm": "The length of the whole gradient at each step, as the optimizer would see it without "
    "clipping.",
    "heat": "Parameters from the input (top) to the output (bottom). A backward runs upwards: what "
    "is non-finite low in a column spreads to all above.",
    "offenders": "In how many windows each parameter's gradient held inf or NaN, and in how many "
    "of them it was the layer that a backward meets first.",
    "timeline": "What each thread did when, for a few steps. Hatched: the training thread waited "
    "for the optimizer.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``accel-scaler report`` to a parser."""
    parser.description = (
        "Show what the scaler did: the summary in words, pictures, and a table of what overflowed. "
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
        help="where to write: the page (default: report.html), or with --format png the folder, "
        "or a NAME.png that gets all of them, one below the other (default: report)",
    )
    parser.add_argument(
        "--format", choices=("html", "png"), default="html", help="a page (default), or pictures"
    )
    parser.add_argument(
        "--text", action="store_true", help="print the summary and write nothing (no matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the report that ``add_arguments`` describes; 0 when it is there.

    Raises:
        ConfigError: a file that is not telemetry, an output that cannot be written, no matplotlib.
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
        say("\n\n".join(in_words(one) for one in runs))
    elif args.format == "png":
        for path in write_pictures(runs, Path(args.output or "report")):
            say(f"wrote {path}")
    else:
        path = Path(args.output or "report.html")
        text = html_page(runs, page_pictures(runs))
        _write(path, text)
        say(f"wrote {path} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def label(runs: Sequence[Run]) -> None:
    """Name each run: its file, with the rank where there are several, and no name twice."""
    paths = [Path(one.path) for one in runs]
    names = [path.name for path in paths]
    for one, path, name in zip(runs, paths, names, strict=True):
        alike = names.count(name) > 1 and path.absolute().parent.name
        text = f"{path.absolute().parent.name}/{name}" if alike else name
        facts = one.sessions[0].facts if one.sessions else {}
        if facts.get("ranks", 1) > 1 or facts.get("rank", 0) > 0:
            text += f" (rank {facts.get('rank', '?')})"
        one.label = clean(text, 100)
    labels = [one.label for one in runs]
    for index, one in enumerate(runs):
        if labels.count(one.label) > 1:
            one.label += f" [{index + 1}]"


def figures(runs: Sequence[Run], theme: Theme) -> Iterator[tuple[str, str, Figure]]:
    """``(name, caption, figure)`` of every picture there is data for; inside ``drawing()``."""
    runs = [one for one in runs if one.windows]
    if not runs:
        return
    yield "scale", CAPTIONS["scale"], scale_figure(runs, theme)
    if (figure := norm_figure(runs, theme)) is not None:
        yield "norm", CAPTIONS["norm"], figure
    kinds = {"heat": heat_figure, "offenders": offender_figure, "timeline": timeline_figure}
    for kind, build in kinds.items():
        for index, one in enumerate(runs):
            several = len(runs) > 1
            figure = build(one, theme, one.label if several else "")
            if figure is not None:
                yield f"{kind}-{index + 1}" if several else kind, CAPTIONS[kind], figure


def page_pictures(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Every picture as an ``<svg>`` element with its caption."""
    if not any(one.windows for one in runs):
        return []
    with drawing(IN_PAGE):
        return [
            (svg(figure, f"{name}", CAPTIONS[name.split("-")[0]].split(".")[0]), caption)
            for name, caption, figure in figures(runs, IN_PAGE)
        ]


def write_pictures(runs: Sequence[Run], output: Path) -> list[Path]:
    """Write PNGs into a folder; where ``output`` ends in ``.png``, all of them as this one."""
    single = output.suffix.lower() == ".png"
    folder = output.parent if single else output
    written = []
    with drawing(LIGHT):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            named = [(name, figure) for name, _, figure in figures(runs, LIGHT)]
            if single and named:
                save_stacked([figure for _, figure in named], output)
                return [output]
            for name, figure in named:
                written.append(folder / f"{name}.png")
                save_png(figure, written[-1])
        except OSError as error:
            raise _unwritable(output, error) from None
    return written


def _same(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    return ConfigError(f"{path}: cannot be written ({why}); give another place with -o.")
