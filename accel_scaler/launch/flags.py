"""The flags of ``accel-scaler launch``, one for each setting, and its help.

Imports neither torch nor Accelerate, so that help comes at once.
"""

from __future__ import annotations

import argparse

from ..config import ABOUT, FIELDS, SWITCH

__all__ = ["DEST", "add_flags", "own_parser"]

DEST = "accel_scaler_"
"""The start of the names of our values among the arguments of Accelerate."""

DESCRIPTION = (
    "Start an unchanged script as `accelerate launch` does, with every Accelerator and Trainer of "
    "it attached. Takes the flags of `accelerate launch`, too; --config_file also takes the name "
    "of a shipped file, and a file may have a section `accel_scaler:` with these settings. A flag "
    "outranks a variable ACCEL_SCALER_<NAME>, which outranks the section. A switch --NAME has the "
    "form --no_NAME, too."
)
NO_ATTACH = "Attach nothing; the script may call attach itself."
DRY_RUN = (
    "Start nothing; print every setting with its source, then every refusal. Exit status 2 where "
    "there is a refusal, else 0."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, whose value stays a text, and those of the launcher."""
    group = parser.add_argument_group("Settings")
    for name, spec in FIELDS.items():
        kind, default, dest = spec.metadata["kind"], spec.default, DEST + name
        about = f"{ABOUT[name]} Takes {kind.allowed}. Default: {default}."
        if kind is not SWITCH:
            group.add_argument(f"--{name}", dest=dest, metavar="VALUE", help=about)
            continue
        flags = {"true": f"--{name}", "false": f"--no_{name}"}
        for text, flag in flags.items():
            is_default = (text == "true") is default
            shown = argparse.SUPPRESS if is_default else about
            group.add_argument(flag, dest=dest, action="store_const", const=text, help=shown)
    group = parser.add_argument_group("The launcher")
    group.add_argument("--no_attach", dest=f"{DEST}off", action="store_true", help=NO_ATTACH)
    group.add_argument("--dry_run", dest=f"{DEST}dry", action="store_true", help=DRY_RUN)


def own_parser() -> argparse.ArgumentParser:
    """A parser of our flags alone, for help."""
    usage = "accel-scaler launch [flags] script.py [arguments of the script]"
    parser = argparse.ArgumentParser("accel-scaler launch", usage, DESCRIPTION)
    add_flags(parser)
    return parser
