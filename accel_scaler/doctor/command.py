"""``accel-scaler doctor``: what a launch would do here, and what would go wrong in it.

Takes the arguments of ``accel-scaler launch``, script and all, and starts nothing: write ``doctor``
for ``launch`` in a command to have it explained. The script may be left out.

``--json`` prints one object with these keys, which do not change their meaning while ``format`` is
1; more may come:

    format        1
    config_file   path, or null
    versions      {"python", "accel_scaler", "torch", "accelerate", "transformers", "trl", "peft"}:
                  text, null where not installed
    devices       {"accelerator": type or null, "names": [one for each], "cpu_fp16": the processor
                  has fp16 instructions: true, false, null (unknown)}
    job           {"precision", "kind", "device", "wants_cpu", "hosts", "processes",
                  "processes_here", "joined"}, as in ``environment.Processes``
    scaling       {"scaler": "accel_scaler", "torch" (stock Accelerate's), "other" or null,
                  "autocast": "float16", "bfloat16" or null, "text": a sentence}
    threads       {"cores", "training", "auto", "optimizer", "own_thread"}, as in
                  ``environment.Threads``
    settings      {field: {"value", "source": flag, variable, "file, line n" or "default"}}
    hazards       [{"id": "F1" to "F12" or a word, "text": a line}]
    mended        the same, of what attaching mends in this launch

    or, where a setting cannot be used, {"format": 1, "error": a line}; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..console import plain, say
from ..errors import AccelScalerError
from ..integrations import scaled_elsewhere
from ..launch import launcher
from .diagnostics import hazards, mended
from .environment import LaunchPlan, plan_of

FORMAT = 1
"""Version of the ``--json`` output."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str], bool]:
    """``(arguments of Accelerate's parser, {field: text} of the flags, --json)``.

    ``training_script`` is None where there is none.
    """
    parser = launcher.make_parser()
    parser.prog = "accel-scaler doctor"
    parser.usage = "accel-scaler doctor [--json] [arguments of accel-scaler launch] [script ...]"
    parser.description = (
        "Say what `accel-scaler launch` with the same arguments would do on this machine, where "
        "each setting comes from, and what would go wrong. Starts nothing. Exit status 0; 1 where "
        "a setting cannot be used."
    )
    # The formatter shows those groups whose titles it knows.
    group = next(group for group in parser._action_groups if group.title == launcher.TITLE)
    group.add_argument("--json", action="store_true", help="for machines: keys that do not change")
    script = next(action for action in parser._actions if action.dest == "training_script")
    script.nargs, script.required = "?", False
    args, flags = launcher.parse(parser, argv)
    return args, flags, args.__dict__.pop("json")


def main(argv: Sequence[str]) -> int:
    """Run ``accel-scaler doctor``: 0, or 1 where a launch would refuse, one line on stderr."""
    args, flags, as_json = parse(argv)
    try:
        with launcher.prepared(args, flags) as (path, settings):
            found = plan_of(args, settings, os.environ)
    except AccelScalerError as error:
        line = " ".join(str(error).split())
        if as_json:
            say(json.dumps({"format": FORMAT, "error": line}))
        print("accel-scaler: error:", plain(line), file=sys.stderr)
        return 1
    facts = as_dict(path, found)
    say(json.dumps(facts, indent=2) if as_json else as_text(facts))
    return 0


def scaling(found: LaunchPlan) -> dict[str, str | None]:
    """Who scales what, as ``--json`` has it."""
    precision, settings = found.job.precision, found.settings
    autocast = {"fp16": "float16", "bf16": "bfloat16"}.get(precision)
    scaler: str | None = None
    elsewhere = scaled_elsewhere(found.job.kind, precision)
    if elsewhere is not None:
        scaler, text = "other", f"nothing is attached: {elsewhere}"
    elif not found.fp16:
        text = f"mixed_precision={precision}: nothing is scaled, nothing needs to be"
        if settings.attach and settings.config.telemetry is not None:
            text += "; telemetry is written"
    elif not settings.attach:
        text = "not attached: stock Accelerate, unless the script calls attach"
        scaler = None if found.on_cpu else "torch"
        if found.on_cpu:
            autocast, text = None, f"{text}; it has neither autocast nor a scaler for fp16 on a CPU"
    elif not settings.config.enabled:
        text = "enabled=false: attached, nothing is scaled"
    else:
        scaler = "accel_scaler"
        text = "every Accelerator and Trainer of the script is attached: losses are scaled"
        if found.on_cpu:
            text += "; autocast to float16 comes from attach, too"
    return {"scaler": scaler, "autocast": autocast, "text": text}


def as_dict(path: Path | None, found: LaunchPlan) -> dict[str, Any]:
    """What ``--json`` prints; the keys stand in the module's docstring."""
    settings, sources = found.settings, found.settings.sources
    values = {"attach": settings.attach, **dataclasses.asdict(settings.config)}
    return {
        "format": FORMAT,
        "config_file": None if path is None else str(path),
        "versions": found.versions,
        "devices": dataclasses.asdict(found.devices),
        "job": dataclasses.asdict(found.job),
        "scaling": scaling(found),
        "threads": dataclasses.asdict(found.threads),
        "settings": {
            name: {"value": value, "source": sources.get(name, "default")}
            for name, value in values.items()
        },
        "hazards": [{"id": word, "text": text} for word, text in hazards(found)],
        "mended": [{"id": word, "text": text} for word, text in mended(found)],
    }


def as_text(facts: dict[str, Any]) -> str:
    """What a person reads: the same, in columns."""
    lines = [("config file", str(facts["config_file"] or "none"))]
    for key in ("versions", "devices", "job", "scaling", "threads"):
        values = [
            f"{name} {value}" for name, value in facts[key].items() if value not in (None, ())
        ]
        lines.append((key, facts[key].get("text") or ", ".join(values)))
    parts = [_table(lines)]
    settings = [
        (name, json.dumps(one["value"]), one["source"]) for name, one in facts["settings"].items()
    ]
    parts.append("settings\n" + _table(settings, "  "))
    for key in ("hazards", "mended"):
        rows = [(one["id"], one["text"]) for one in facts[key]]
        title = "mended by attaching" if key == "mended" else key
        parts.append(f"{title}\n{_table(rows, '  ')}" if rows else f"{title}: none found")
    return "\n\n".join(parts)


def _table(rows: Sequence[tuple[str, ...]], indent: str = "") -> str:
    """Rows in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
