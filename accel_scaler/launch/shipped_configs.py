"""The Accelerate config files that come with the package."""

from __future__ import annotations

import os
from pathlib import Path

from ..config_file import PACKAGE
from ..errors import ConfigError


def shipped_configs() -> dict[str, Path]:
    """The config files in the package, or beside it in a checkout, by name."""
    folders = (PACKAGE / "accelerate_configs", PACKAGE.parent / "accelerate_configs")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that ``--config_file name`` means: one on disk, else one that is shipped.

    Raises:
        ConfigError: there is neither; the message lists the shipped names.
    """
    shipped = shipped_configs()
    if os.path.isfile(name):
        return Path(name)
    if name not in shipped:
        raise ConfigError(
            f"--config_file: got {name!r}, and there is no such file; expected the path of an "
            f"Accelerate config file or one of {', '.join(shipped)}."
        )
    return shipped[name]
