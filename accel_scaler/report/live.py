"""``accel-scaler report --live``: a run in the terminal while it trains."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..console import number, percent, say
from ..errors import ConfigError
from ..telemetry import verdict
from .findings import Finding, find
from .following import Follower
from .run_summary import Run
from .samples import Bin
from .verdict import outcome_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

POLL_S = 0.5
LINE_EVERY = 100
"""Windows between two lines where the output is no terminal."""
LINE_EVERY_S = 10.0
"""Or so many seconds, for slow ones."""
SILENT_S = 10.0
"""After so many without a line it is said how long it is."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"
NARROWEST = 10
"""Columns of a sparkline, whatever the terminal's width."""
STYLES = {"bad": "bold red", "warn": "yellow", "note": "", "good": "green"}


def follow(path: str, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show a run until its end line; 0 then. Ctrl-C ends it as it ends any command.

    A terminal gets a display that is drawn anew in its place (rich); anything else a plain line
    every ``LINE_EVERY`` windows.

    Raises:
        ConfigError: a file that is not telemetry, a directory; rich is not installed.
    """
    follower = Follower(path)
    try:
        with _ended_in_order():
            if sys.stdout.isatty():
                _follow_in_place(follower, sleep)
            else:
                _follow_in_lines(follower, sleep)
    finally:
        follower.close()
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Whoever ends the process by SIGTERM leaves the terminal as it was, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Where the output is no terminal.


def _follow_in_lines(follower: Follower, sleep: Callable[[float], None]) -> None:
    told, told_at, note = 0, -math.inf, ""
    while True:
        is_new = follower.poll()
        run, over = follower.run, follower.is_over
        if follower.note != note:
            note = follower.note
            if note:
                say(f"{follower.path}: {note}")
        late = time.monotonic() - told_at > LINE_EVERY_S
        if run.windows < told:
            told = 0
        if run.windows - told >= (1 if over or late else LINE_EVERY):
            told, told_at = run.windows, time.monotonic()
            say(plain_line(follower))
        if over:
            say(_verdict(run))
            return
        if not is_new:
            sleep(POLL_S)


def plain_line(follower: Follower) -> str:
    """``step 410  windows 411 (12.3/s)  skipped 3 (0.7 %)  loss 2.345  scale 65536``."""
    told = (f"{name} {value}" for name, value in tiles(follower))
    return "  ".join([follower.run.place(follower.run.last_x), *told])


def tiles(follower: Follower) -> list[tuple[str, str]]:
    """Name and value of what one looks at first; what the run does not have is left out."""
    run, speed = follower.run, follower.windows_per_second
    rate = "" if speed is None else f" ({speed:.3g}/s)"
    found = [
        ("windows", f"{run.windows:,}{rate}"),
        ("skipped", f"{run.skips:,} ({percent(run.skips, run.windows)})"),
    ]
    if run.last_loss is not None:
        found.append(("loss", f"{run.last_loss:.5g}"))
    if run.is_scaled:
        found.append(("scale", number(run.last_scale)))
    if run.hidden_share:
        found.append(("hidden", percent(run.hidden_share, 1)))
    return found


def _verdict(run: Run) -> str:
    """Of a run that goes on: nobody misses its end."""
    return verdict(replace(outcome_of(run), is_over=True))


def _worst(run: Run) -> Finding | None:
    """The most important of the findings; that there is no end yet is none."""
    found = [each for each in find(run) if each.subject != "end"]
    return found[0] if found and found[0].level != "good" else None


# In a terminal.


def _follow_in_place(follower: Follower, sleep: Callable[[float], None]) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ConfigError(
            f"report --live needs rich ({error}): pip install accel_scaler[report], or follow it "
            "in plain lines: accel-scaler report --live FILE | cat."
        ) from None
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            is_new = follower.poll()
            live.update(picture(follower, console), refresh=True)
            if follower.is_over:
                return
            if not is_new or follower.share_read == 1:
                sleep(POLL_S)


def picture(follower: Follower, console: Console) -> RenderableType:
    """What the terminal shows; no line is wider than it, findings are broken into several."""
    from rich.console import Group
    from rich.text import Text

    run, width = follower.run, console.width
    blocks = ASCII_BLOCKS if console.options.ascii_only else BLOCKS
    dot = " - " if console.options.ascii_only else " · "
    lines: list[Any] = [Text(dot.join(_heading(run, follower.path)), style="bold", no_wrap=True)]
    if follower.note or not run.windows:
        text = follower.note or "no window has closed yet"
        lines.append(Text(f"{text} (Ctrl-C ends this)", style="dim"))
    if follower.share_read < 1:
        lines.append(Text(f"reading: {percent(follower.share_read, 1)}", style="dim"))
    if not run.windows:
        return Group(*lines)
    lines += [Text(_verdict(run)), Text()]
    lines += _tiles_in(width, tiles(follower))
    for name, of, style, is_log in (
        ("loss", _loss_of, "cyan", False),
        ("scale", _scale_of, "green", True),
    ):
        line = _sparkline(name, run.bins.done, of, width, blocks, is_log)
        if line is not None:
            parts = ((f"{name:<6}", "dim"), (line[0], style), f" {line[1]}")
            lines.append(Text.assemble(*parts, no_wrap=True, overflow="crop"))
    finding = _worst(run)
    if finding is not None:
        lines += [Text(), Text(finding.what, style=STYLES[finding.level])]
        lines += [Text(finding.do)] if finding.do else []
    silent = follower.silent_s
    if silent is not None and silent > SILENT_S and not follower.is_over:
        lines.append(Text(f"nothing new for {silent:.0f} s", style="dim"))
    return Group(*lines)


def _heading(run: Run, path: str) -> list[str]:
    parts = [os.path.basename(path) or path]
    if run.sessions:
        last = run.sessions[-1]
        mode = last.settings.get("step_mode")
        known = [last.facts.get("precision"), mode, last.facts.get("device_name")]
        parts += [str(each) for each in known if each]
        if len(run.sessions) > 1:
            parts.append(f"session {len(run.sessions)}")
    return parts


def _tiles_in(width: int, found: Sequence[tuple[str, str]]) -> list[Any]:
    """In as few lines as they fit into."""
    from rich.text import Text

    lines: list[Any] = []
    for name, value in found:
        cell = Text.assemble((f"{name} ", "dim"), (value, "bold"))
        if lines and lines[-1].cell_len + 3 + cell.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "   ", cell)
        else:
            lines.append(cell)
    return lines


def _loss_of(each: Bin) -> float | None:
    return each.loss.middle


def _scale_of(each: Bin) -> float | None:
    return each.scale if 0 < each.scale < math.inf else None


def _sparkline(
    name: str,
    bins: Sequence[Bin],
    of: Callable[[Bin], float | None],
    width: int,
    blocks: str,
    is_log: bool,
) -> tuple[str, str] | None:
    """The line, and between what it runs; None: there is no number."""
    values = [of(each) for each in bins]
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    between = number(low) if low == high else f"{number(low)} to {number(high)}"
    room = max(NARROWEST, width - len(f"{name:<6}") - 1 - len(between))
    return spark(values, room, blocks, is_log), between


def spark(
    values: Sequence[float | None], width: int, blocks: str = BLOCKS, is_log: bool = False
) -> str:
    """A line of at most ``width`` blocks: means of neighbours, from the least to the largest.

    A gap where there is no number.

    >>> spark([1.0, 2.0, None, 8.0], 4)
    '▁▂ █'
    """
    shown = [
        None if v is None or (is_log and v <= 0) else math.log(v) if is_log else v for v in values
    ]
    cells = min(width, len(shown))
    means: list[float | None] = []
    for cell in range(cells):
        part = shown[cell * len(shown) // cells : (cell + 1) * len(shown) // cells]
        inside = [value for value in part if value is not None and math.isfinite(value)]
        means.append(sum(v / len(inside) for v in inside) if inside else None)
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0) / 2, max(known, default=0.0) / 2  # their range is a float
    top = len(blocks) - 1

    def block(mean: float | None) -> str:
        if mean is None:
            return " "
        return blocks[0 if high <= low else round((mean / 2 - low) / (high - low) * top)]

    return "".join(map(block, means))
