"""Accelerate config files with a section of ours.

Accelerate refuses a file with a key that it does not know, so the section is taken out of the file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, shown

__all__ = ["ConfigFile", "find_config", "read_config", "shipped_configs"]

PACKAGE = Path(__file__).parent
SECTION = "accel_scaler"


@dataclass(frozen=True)
class ConfigFile:
    """A config file in two parts."""

    path: Path
    section: dict[Any, Any]
    """Our fields, not checked. Those of YAML are texts, as in the environment: ``off`` is one."""
    rest: str | None
    """The file without the section; None: the file has no section."""


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
            f"--config_file: got {name!r}, which is no file, expected the path of an Accelerate "
            f"config file or one of {', '.join(shipped)}."
        )
    return shipped[name]


def read_config(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a file; it is JSON where the name ends in ``.json``, as for Accelerate, else YAML.

    Raises:
        ConfigError: the file cannot be read, or it or the section is not a mapping.
    """
    path = Path(path)
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        document = (json.loads(text) if is_json else yaml.safe_load(text)) or {}
        texts = document if is_json else yaml.load(text, yaml.BaseLoader)
    except Exception as error:  # PyYAML's constructors raise errors of many classes
        kind, problem = "JSON" if is_json else "YAML", " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as {kind}: {problem}") from error
    if isinstance(document, dict) and SECTION not in document:
        return ConfigFile(path, {}, None)
    section = texts[SECTION] if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: got {shown(section or document)}, expected a mapping, with a mapping of "
            f"settings as `{SECTION}:`."
        )
    rest = {key: value for key, value in document.items() if key != SECTION}
    return ConfigFile(path, section, json.dumps(rest) if is_json else yaml.safe_dump(rest))
