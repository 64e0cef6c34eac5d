"""Accelerate config files with a section of ours, and those that come with the package.

Accelerate refuses a file with a key that it does not know, so the section is taken out of the file.
"""

from __future__ import annotations

import json
import math
import os
import re
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
    return section, yaml.safe_dump(document)


def write_section(path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Write ``settings`` into our section of a file. In YAML every other line stays as it is; JSON,
    which ``accelerate config default`` writes, is written anew.

    Raises ``ConfigError`` for a file that cannot be written, or edited line by line."""
    text = Path(path).read_bytes().decode()
    added = yaml.safe_dump(dict(settings), sort_keys=False, width=math.inf)
    before = yaml.load(text, yaml.BaseLoader) or {}
    section = (before.get(SECTION) or {}) | yaml.load(added, yaml.BaseLoader)
    is_json = text.lstrip().startswith("{")
    if SECTION not in before and not is_json:
        text += "\n" * (text[-1:] not in ("", "\n")) + f"{SECTION}:\n"

    def edited(match: re.Match[str]) -> str:
        block = match[0]
        indent = re.search(r"\n([ \t]+)[^\s#]", block)
        for line in added.splitlines():
            old = rf"(?m)^([ \t]+){line.partition(':')[0]}:.*?(?=[ \t\r]*$|[ \t]+#.*$)"
            block, count = re.subn(old, r"\g<1>" + line.replace("\\", r"\\"), block)
            block += "" if count else f"\n{indent[1] if indent else '  '}{line}"
        return block

    # Its line, and those below it that are indented; of blank lines and comments those between.
    lines = rf"(?m)^{SECTION}:.*(?:\n(?:[ \t\r]*(?:#.*)?\n)*[ \t]+[^\s#].*)*"
    text = re.sub(lines, edited, text, count=1)
    try:
        if is_json:
            text = json.dumps(json.loads(text) | {SECTION: section}, indent=2) + "\n"
        if yaml.load(text, yaml.BaseLoader) != before | {SECTION: section}:
            raise yaml.YAMLError
        Path(path).write_bytes(text.encode())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or "its section is not in lines of `name: value`"
        flow = yaml.safe_dump({SECTION: section}, default_flow_style=True, width=math.inf)
        raise ConfigError(f"{path}: cannot be edited ({why}). By hand: {flow[1:-2]}") from None


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
