"""The flags of ``accel-scaler launch``, one for each setting, and its help.

Imports neither torch nor Accelerate, so that help comes at once.
"""

from __future__ import annotations

import argparse

from ..config import ABOUT, FIELDS, KINDS, SWITCH, help_of

DEST = "accel_scaler_"
"""The prefix of our values among the arguments of Accelerate."""

DESCRIPTION = (
    "Start an unchanged script as `accelerate launch` does, with its flags, and attach every "
    "Accelerator and Trainer in it. --config_file also takes names such as gpu_fp16. A flag "
    "outranks a variable ACCEL_SCALER_<NAME>, which outranks the file's section `accel_scaler:`. "
    "A step is one optimizer step with all of its micro-batches."
)
USAGE = "accel-scaler launch [flags] script.py [arguments of the script]"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, whose value stays a text, and the flags of the launcher."""
    group = parser.add_argument_group("Settings")
    for name, spec in FIELDS.items():
        default, dest = spec.default, DEST + name
        if KINDS[name] is not SWITCH:
            about = f"{help_of(name)} Default: {default}."
            group.add_argument(f"--{name}", dest=dest, metavar="VALUE", help=about)
            continue
        about = (f"Set {name} to false; the default is true. " if default else "") + ABOUT[name]
        for flag, value in ((f"--{name}", True), (f"--no_{name}", False)):
            text, shown = str(value).lower(), argparse.SUPPRESS if value is default else about
            group.add_argument(flag, dest=dest, action="store_const", const=text, help=shown)
    group = parser.add_argument_group("The launcher")
    for flag, about in (
        ("no_attach", "Attach nothing; the script may call attach itself."),
        ("dry_run", "Start nothing; print every setting with its source, or what is refused."),
    ):
        group.add_argument(f"--{flag}", dest=DEST + flag, action="store_true", help=about)


def own_parser() -> argparse.ArgumentParser:
    """A parser of our flags alone, for help."""
    parser = argparse.ArgumentParser("accel-scaler launch", USAGE, DESCRIPTION)
    add_flags(parser)
    return parser
