"""The timeline of a report: what each thread did in a few windows, as data."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .formatting import shorten
from .run_summary import Run
from .samples import KINDS

MOST_BARS = 3000
"""The longest are drawn."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One span."""

    kind: str
    start: float
    """Milliseconds."""
    length: float
    where: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The last windows of one run."""

    name: str
    title: str
    caption: str
    bars: list[Bar]
    ends: list[float]
    """When each window ended, in milliseconds, as far as that is within ``length``."""
    first_end: str
    """What ended at the first of them."""
    length: float
    beside: bool
    """The optimizer has a thread of its own."""

    @property
    def lanes(self) -> list[str]:
        """From the top."""
        return ["training thread", "optimizer thread"][: 1 + self.beside]

    def lane_of(self, kind: str) -> tuple[int, float, float]:
        """``(lane, top, height)`` of its bars, of a lane's height.

        In sync the update runs inside the step: a narrower bar upon it.
        """
        if kind != "optimizer":
            return 0, 0.0, 1.0
        return (1, 0.0, 1.0) if self.beside else (0, 0.3, 0.4)


def timelines(runs: list[Run]) -> list[Timeline]:
    """One of each run whose file has spans; ``runs`` have windows."""
    several = len(runs) > 1
    return [_timeline(run, several, index) for index, run in enumerate(runs, 1) if run.timing.last]


def _timeline(run: Run, several: bool, index: int) -> Timeline:
    (first, _), (last, _) = run.timing.last[0], run.timing.last[-1]
    records = [record for _, record in run.timing.last]
    spans = [s for record in records for s in record.spans if s[0] in KINDS]
    zero = min((start for _, start, *_ in spans), default=0.0)
    shown = heapq.nlargest(MOST_BARS, spans, key=lambda s: s[2])
    bars = [Bar(kind, (s - zero) * 1e3, n * 1e3, "".join(w)) for kind, s, n, *w in shown]
    bars.sort(key=lambda bar: (KINDS.index(bar.kind), bar.start))
    length = max((bar.start + bar.length for bar in bars), default=0.0)
    ends = [(record.index, (record.time - zero) * 1e3) for record in records]
    inside = [(step, at) for step, at in ends if 0 < at <= length]
    mode = run.sessions[run.session_of(last)].settings.get("step_mode")
    of = f" ({shorten(run.label, 30)})" if several else ""
    return Timeline(
        "timeline" + (f"-{index}" if several else ""),
        f"Timeline, {run.place(first)} to {run.place(last)}{of}",
        "What each thread did when, in the last steps. Hatched: the training thread waited for "
        "the optimizer.",
        bars,
        [at for _, at in inside],
        f"end of step {inside[0][0]}" if inside else "",
        max(length, 1e-3),
        mode in ("overlap", "delayed"),
    )
