"""``accel-scaler config``: asks for a few settings, as ``accelerate config`` asks for its own."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..config import FIELDS, KINDS, ScalerConfig, checked
from ..config_file import write_section
from ..console import say, written
from ..errors import ConfigError

ASKED = ("step_mode", "offload", "skip_norm_above", "max_consecutive_skips", "telemetry")
"""What most runs decide; each means something in every precision."""


def main(argv: Sequence[str]) -> int:
    """Ask, and write the answers into the section of the config file. Raises ``ConfigError`` for a
    file that cannot be used, and answers that contradict each other; nothing was written then."""
    parser = argparse.ArgumentParser(
        "accel-scaler config",
        description="Ask for a few settings, and write them into the section `accel_scaler:` of an "
        "Accelerate config file. All else in it stays as it is.",
    )
    about = "the file to write to (default: the one that accelerate config writes)"
    parser.add_argument("--config_file", metavar="PATH", help=about)
    path = parser.parse_args(argv).config_file

    from accelerate.commands.config import default_config_file
    from accelerate.commands.config.config_utils import _ask_field

    path = path or default_config_file
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file. First: accelerate config --config_file {path}")
    config, answers = ScalerConfig.from_yaml(path), {}
    try:
        for name in ASKED:
            say("\n" + textwrap.fill(FIELDS[name].metadata["help"], 90))
            answers[name] = _ask_field(
                f"{name} [{written(getattr(config, name))}]: ",
                partial(checked, name),
                getattr(config, name),
                f"Expected {KINDS[name].allowed}.",
            )
    except EOFError:
        raise ConfigError(
            f"config: the input ended before {name!r}; nothing was written."
        ) from None
    replace(config, **answers)  # refuses those that contradict each other
    write_section(path, answers)
    say(f"\nWritten. To use it: accel-scaler launch --config_file {path} train.py")
    say("`accelerate launch` refuses a file with this section.")
    return 0
