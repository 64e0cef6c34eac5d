"""The flags of ``accel-scaler launch``, one or two for each setting, and its help.

Knows neither torch nor Accelerate, so that help comes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..config import FIELDS, GROUPS, LAUNCHING, SWITCH, nearest
from ..errors import ConfigError, refuse_retired

__all__ = ["DEST", "HELP_ALL", "USAGE", "add_flags", "own_parser", "unknown_flags"]

DEST = "accel_scaler_"
"""In front of a field, where a parser puts the text of its flag."""

USAGE = "accel-scaler launch [flags] script.py [arguments of the script]"
ABOUT = (
    "Start an unchanged script as `accelerate launch` does, with every Accelerator and Trainer "
    "that it makes attached."
)
HELP_ALL = "Say Accelerate's flags too."
DRY_RUN = (
    "Start nothing: print every setting and where it comes from, and every refusal of a launch. "
    "Exit status 0; 2 where there is a refusal."
)
MORE = """\
All other flags are those of `accelerate launch`, before the script:
--mixed_precision fp16, --num_processes 2, --multi_gpu, ...; --help-all shows
them. --config_file takes the name of a shipped file too, and a file may have a
section `accel_scaler:` with these names. A flag outranks a variable
ACCEL_SCALER_<NAME>, that the section, that the default. Each switch has both
forms, --NAME and --no_NAME.
"""


def add_flags(parser: argparse.ArgumentParser) -> Any:
    """Add a flag for each setting, in groups; values stay texts until sources are merged.

    Returns the group of the launcher's own flags.
    """
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name, spec in FIELDS.items():
        _add_flag(groups[spec.metadata["group"]], name, spec)
    groups[LAUNCHING].add_argument("--dry_run", action="store_true", help=DRY_RUN)
    return groups[LAUNCHING]


def _add_flag(group: Any, name: str, spec: dataclasses.Field[Any]) -> None:
    kind, dest, default = spec.metadata["kind"], DEST + name, spec.default
    is_switch, is_choice = kind is SWITCH, len(kind.choices) > 1
    takes = "" if is_switch or is_choice else f" Takes {kind.allowed}."
    if is_switch:
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    elif default in (None, ()):
        default = "none"
    about = f"{spec.metadata['about']}{takes} Default: {default}.".replace("%", "%%")
    if not is_switch:
        metavar = "|".join(kind.choices) if is_choice else "VALUE"
        group.add_argument(f"--{name}", dest=dest, metavar=metavar, help=about)
        return
    for flag, text in ((f"--{name}", "true"), (f"--no_{name}", "false")):
        # Help shows the one that does something. As Accelerate's own, it takes no value.
        shown = about if (text == "true") is not spec.default else argparse.SUPPRESS
        group.add_argument(flag, dest=dest, action="store_const", const=text, help=shown)


def own_parser() -> argparse.ArgumentParser:
    """For help: the flags of this package alone."""
    parser = argparse.ArgumentParser(
        "accel-scaler launch",
        USAGE,
        textwrap.fill(ABOUT, 78),
        MORE,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=6),
        add_help=False,
    )
    group = add_flags(parser)
    group.add_argument("-h", "--help", action="store_true", help="Say this.")
    group.add_argument("--help-all", action="store_true", help=HELP_ALL)
    return parser


def unknown_flags(written: Iterable[str], known: Iterable[str]) -> ConfigError:
    """What to say of flags in front of the script that nobody knows.

    Args:
        written: as on the command line, with ``=VALUE`` perhaps.
        known: of this package and of Accelerate.

    Raises:
        ConfigError: the first of them is retired.
    """
    first = next(iter(written)).partition("=")[0]
    refuse_retired(first.strip("-").replace("-", "_"), first, "accel-scaler launch")
    meant = nearest(first.replace("-", "_"), {name.replace("-", "_"): name for name in known})
    ask = f"Did you mean {'--' + meant.strip('_')}?" if meant else "--help-all shows all flags."
    return ConfigError(
        f"unknown flag {first}. {ask} The script's own arguments come after the script."
    )
