"""``accel-scaler doctor``: what a launch would do here, and what would go wrong in it.

Takes the arguments of ``accel-scaler launch``, script and all, and starts nothing: write ``doctor``
for ``launch`` in a command to have it explained. The script may be left out. It says what may go
wrong, then which settings differ from their defaults; with ``--all`` also the rest.

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
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import ScalerConfig
from ..console import plain, say, written
from ..errors import AccelScalerError
from ..integrations import scaled_elsewhere
from ..launch import launcher
from ..launch.flags import DOCTOR, own_parser
from .diagnostics import hazards, mended
from .environment import LaunchPlan, plan_of

FORMAT = 1
"""Version of the ``--json`` output."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str], bool, bool]:
    """``(arguments of Accelerate's parser, {field: text} of the flags, --json, --all)``.

    ``training_script`` is None where there is none.

    Raises:
        ConfigError: a flag that is not known, or a value that it does not take.
    """
    own = own_parser()
    own.prog = "accel-scaler doctor"
    own.usage = "accel-scaler doctor [--all | --json] [flags of launch] [script ...]"
    own.description = textwrap.fill(
        "Say what `accel-scaler launch` with the same arguments would do on this machine, where "
        "each setting comes from, and what would go wrong. Starts nothing. Exit status 0; 1 where "
        "a setting cannot be used.",
        78,
    )
    parser = launcher.make_parser(own)
    for each in (own, parser):
        group = each.add_argument_group(DOCTOR)
        group.add_argument("--all", action="store_true", help="say everything that is known")
        group.add_argument("--json", action="store_true", help="the same, for machines")
    args, flags = launcher.parse(parser, argv)
    return args, flags, args.__dict__.pop("json"), args.__dict__.pop("all")


def main(argv: Sequence[str]) -> int:
    """Run ``accel-scaler doctor``: 0, or 1 where a launch would refuse, one line on stderr."""
    as_json = "--json" in argv
    try:
        args, flags, as_json, everything = parse(argv)
        with launcher.prepared(args, flags) as (path, settings):
            found = plan_of(args, settings, os.environ)
    except AccelScalerError as error:
        line = " ".join(str(error).split())
        if as_json:
            say(json.dumps({"format": FORMAT, "error": line}))
        print("accel-scaler: error:", plain(line), file=sys.stderr)
        return 1
    facts = as_dict(path, found)
    if as_json:
        say(json.dumps(facts, indent=2))
        return 0
    for line, style in in_words(facts, everything):
        say(line, style)
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


def in_words(facts: dict[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    """What a person reads, as ``(line, its style)``: what may go wrong, what differs from the
    defaults, and where ``everything`` is wanted the rest of the facts."""
    hazards, mended = (
        [(one["id"], one["text"]) for one in facts[k]] for k in ("hazards", "mended")
    )
    if hazards:
        yield "what may go wrong", "heading"
        yield from ((line, "wrong") for line in _table(hazards))
    else:
        yield "nothing is seen that would go wrong", "good"
    settings = [
        (name, written(one["value"]), one["source"]) for name, one in facts["settings"].items()
    ]
    plain = {"attach": True, **dataclasses.asdict(ScalerConfig())}
    changed = [row for row in settings if row[1] != written(plain[row[0]])]
    yield "", ""
    if changed:
        yield "settings that differ from their defaults", "heading"
        yield from ((line, "") for line in _table(changed))
    else:
        yield "every setting is at its default", ""
    yield "", ""
    if not everything:
        yield facts["scaling"]["text"], ""
        names = ", ".join(name for name, _ in mended)
        yield (f"mended by attaching: {names}" if names else "mended by attaching: nothing"), ""
        yield "--all says the rest: versions, devices, the job, threads, every setting", ""
        return
    if mended:
        yield "mended by attaching", "heading"
        yield from ((line, "") for line in _table(mended))
    else:
        yield "mended by attaching: nothing", ""
    for title, rows in (("this launch", _facts(facts)), ("settings", settings)):
        yield "", ""
        yield title, "heading"
        yield from ((line, "") for line in _table(rows))


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("config file", str(facts["config_file"] or "none"))]
    for key in ("versions", "devices", "job", "scaling", "threads"):
        values = [
            f"{name} {written(value)}"
            for name, value in facts[key].items()
            if value not in (None, ())
        ]
        rows.append((key, facts[key].get("text") or ", ".join(values)))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()
