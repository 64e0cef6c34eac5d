"""Telemetry files made from the written format, with nothing of the package's own writer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

NAMES = [
    "transformer.wte.weight",
    *(
        f"transformer.h.{block}.{part}"
        for block in range(4)
        for part in ("ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight")
    ),
    "transformer.ln_f.weight",
]


def start(**changes: Any) -> Line:
    """A start line; ``settings`` are merged into the defaults."""
    settings = {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": None,
        "step_mode": "sync",
        **changes.pop("settings", {}),
    }
    line = {
        "kind": "start",
        "format": 2,
        "package": "0.1.0",
        "unix_time": 1.7e9,
        "rank": 0,
        "ranks": 1,
        "device": "cpu",
        "precision": "fp16",
        "torch": "2.13.0",
        "accelerate": "1.15.0",
        "settings": settings,
    }
    return line | changes


def names(of: Sequence[str] = NAMES) -> Line:
    """A names line."""
    return {"kind": "names", "names": list(of)}


def window(step: int, scale: float = 65536.0, skipped: bool = False, **changes: Any) -> Line:
    """A window line; a skipped one halves the scale unless ``next_scale`` says otherwise."""
    line = {
        "kind": "window",
        "step": step,
        "time": round(0.1 * (step + 1), 6),
        "scale": scale,
        "next_scale": scale / 2 if skipped else scale,
        "growth_tracker": 0,
        "found_inf": skipped,
        "skipped": skipped,
        "grad_norm": "inf" if skipped else 1.25,
        "max_norm": 1.0,
        "clip_coefficient": None if skipped else 0.8,
        "lr": [0.001],
    }
    return line | changes


def noted(step: int, **values: Any) -> Line:
    """Numbers that belong to no window."""
    return {"kind": "noted", "step": step, "values": values}


def end(windows: int = 0, error: str | None = None) -> Line:
    """An end line."""
    return {"kind": "end", "time": 0.1 * windows, "error": error}


def norms(values: Iterable[float]) -> list[float | str]:
    """As a line has them."""
    return [value if math.isfinite(value) else str(value) for value in values]


def write(path: Path, lines: Iterable[Line | str | bytes]) -> Path:
    """Write lines as they are (bytes), as text, or as strict JSON; returns the path."""
    with open(path, "wb") as file:
        for line in lines:
            if isinstance(line, dict):
                line = json.dumps(line, allow_nan=False)
            file.write((line.encode() if isinstance(line, str) else line) + b"\n")
    return path


def story(
    count: int,
    skipped: Callable[[int, float], bool],
    *,
    growth_interval: int = 2000,
    first_scale: float = 65536.0,
    culprit: str = "transformer.h.3.mlp.c_fc.weight",
    with_norms: bool = True,
    with_times: bool = False,
    seed: int = 0,
) -> list[Line]:
    """A run of ``count`` windows by torch's own rule for the scale.

    ``skipped(step, scale)`` says which windows overflow: in ``culprit`` and all before it.
    """
    rng = random.Random(seed)
    lines = [start(settings={"growth_interval": growth_interval}), names()]
    scale, tracker = first_scale, 0
    last = NAMES.index(culprit)
    for step in range(count):
        bad = skipped(step, scale)
        tracker = 0 if bad else tracker + 1
        grows = tracker == growth_interval
        after = scale / 2 if bad else scale * 2 if grows else scale
        tracker = 0 if grows else tracker
        norm = 3.0 * math.exp(-step / count) * rng.lognormvariate(0, 0.3)
        line = window(step, scale, bad, next_scale=after, growth_tracker=tracker)
        if not bad:
            line |= {"grad_norm": norm, "clip_coefficient": min(1.0, 1.0 / norm)}
        if with_norms:
            each = [norm * 0.3 * 1.2**-i * rng.lognormvariate(0, 0.2) for i in range(len(NAMES))]
            line["norms"] = norms(
                math.inf if bad and i <= last else value for i, value in enumerate(each)
            )
        if bad:
            line["overflowed"] = [culprit, *NAMES[: min(last, 4)]]
        if with_times:
            line |= {"optimizer_us": 30_000, "waited_us": 2_000}
        lines.append(line)
        scale = after
    return [*lines, end(count)]
