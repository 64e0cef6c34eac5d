"""Accelerate config files with a section of ours, and those that come with the package.

Accelerate refuses a file with a key that it does not know, so the section is taken out of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, shown

PACKAGE = Path(__file__).parent
SECTION = "accel_scaler"


def read_config(path: str | os.PathLike[str]) -> tuple[dict[Any, Any], str | None]:
    """Our section of a file in YAML, or in JSON, which YAML includes; and the file without it.

    The values of the section are texts, as in the environment: ``off`` is one. Without a section it
    is empty, and the rest None.

    Raises:
        ConfigError: the file cannot be read, or it or the section is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document, texts = yaml.safe_load(text) or {}, yaml.load(text, yaml.BaseLoader)
    except Exception as error:  # PyYAML's constructors raise errors of many classes
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {problem}") from error
    if isinstance(document, dict) and SECTION not in document:
        return {}, None
    section = texts[SECTION] or {} if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: got {shown(section or document)}, expected a mapping, with a mapping of "
            f"settings as `{SECTION}:`."
        )
    del document[SECTION]
    return section, yaml.safe_dump(document, sort_keys=False)


def as_section(settings: Mapping[str, Any]) -> str:
    """The lines of our section with these settings, for a file in YAML."""
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
    return yaml.safe_dump({SECTION: plain}, sort_keys=False, width=math.inf)


def shipped_configs() -> dict[str, Path]:
    """The config files in the package, or beside it in a checkout, by name."""
    folders = (PACKAGE / "accelerate_configs", PACKAGE.parent / "accelerate_configs")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that ``--config_file name`` means: one on disk, else one that is shipped. Raises
    ``ConfigError`` if there is neither, with the shipped names."""
    shipped = shipped_configs()
    if os.path.isfile(name):
        return Path(name)
    if name not in shipped:
        raise ConfigError(
            f"--config_file: got {name!r}, and there is no such file; expected the path of an "
            f"Accelerate config file or one of {', '.join(shipped)}."
        )
    return shipped[name]
