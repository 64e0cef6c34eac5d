"""What the ranks of a launch did: each tells it as it ends, the launcher says it in one line.

A file a process, in a folder of the launcher's, which stands in the environment. A process that is
killed tells nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..console import counted
from ..integrations import Attachment
from ..telemetry import History

__all__ = ["VARIABLE", "Totals", "closing_line", "read_totals", "tell_at_end"]

VARIABLE = "LAUNCHED_BY_ACCEL_SCALER"
"""Names the folder; not one of the settings, whose names begin otherwise."""

MOST_PATHS = 4
"""As many files as ``accel-scaler report`` takes."""


@dataclass(frozen=True)
class Totals:
    """Of one launch on this host."""

    windows: int = 0
    skips: int = 0
    runs: int = 0
    """Accelerators that had a window."""
    paths: tuple[str, ...] = ()
    """Telemetry files."""
    is_known: bool = False
    """Somebody has told."""


def tell_at_end(attachment: Attachment) -> None:
    """Write what this accelerator did into the launcher's folder, once it is over; rank 0 only."""
    folder, journal = os.environ.get(VARIABLE), attachment.recorder.journal
    if folder is None or attachment.rank != 0:
        return
    path = None if journal is None else os.path.abspath(journal.path)
    recorder = attachment.recorder
    weakref.finalize(recorder, _tell, folder, os.getpid(), recorder.history, path)


def _tell(folder: str, pid: int, history: History, path: str | None) -> None:
    if pid != os.getpid():  # a copy in a forked process
        return
    line = json.dumps({"windows": history.boundaries, "skips": history.skips, "path": path})
    try:
        with open(os.path.join(folder, f"{pid}.jsonl"), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:  # the launcher is gone, the disk is full: a line less, and no trouble
        return


def read_totals(folder: Path) -> Totals:
    """Add up what the processes have told."""
    told = [
        json.loads(line)
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return Totals(
        sum(each["windows"] for each in told),
        sum(each["skips"] for each in told),
        sum(each["windows"] > 0 for each in told),
        tuple(sorted({each["path"] for each in told if each["path"] is not None})),
        bool(told),
    )


def closing_line(totals: Totals, grown: Iterable[str], status: int) -> str | None:
    """One line on what was done and where to see it; None: nothing is known.

    Args:
        grown: telemetry files that have grown, whether somebody told of them or not.
        status: exit status of the job.
    """
    parts = []
    if totals.windows:
        several = f" in {totals.runs} runs" if totals.runs > 1 else ""
        parts.append(f"{counted(totals.windows, 'window')}, {totals.skips} skipped{several}")
    elif totals.is_known and status == 0:
        parts.append("no window: no optimizer step of an attached Accelerator was seen")
    paths = [_short(path) for path in dict.fromkeys([*totals.paths, *map(os.path.abspath, grown)])]
    if paths and (totals.windows or not totals.is_known):
        parts.append(f"to see them: accel-scaler report {shlex.join(paths[:MOST_PATHS])}")
        if len(paths) > MOST_PATHS:
            parts[-1] += f" (and {len(paths) - MOST_PATHS} more files)"
    return f"accel-scaler: {'; '.join(parts)}" if parts else None


def _short(path: str) -> str:
    """From here, where that is not further."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
