"""The ``accel_scaler:`` section of an Accelerate config file: its fields, their lines, the rest.

Accelerate refuses a file with a key that it does not know, so the section is taken out and the rest
handed over.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, shown

__all__ = ["SECTION", "ConfigFile", "find_config", "read_config", "shipped_configs"]

PACKAGE = Path(__file__).parent
SECTION = "accel_scaler"
YAML_BOOL = "tag:yaml.org,2002:bool"


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A config file, read: the section's fields and the text that is left without it."""

    path: Path
    values: dict[Any, Any]
    """The section's fields as the file has them, not checked."""
    lines: dict[str, int]
    """The line of each field, from 1; JSON has none."""
    rest: str | None
    """The file without the section, in the same format; None: it has no section."""


def shipped_configs() -> dict[str, Path]:
    """The config files that come with the package, by name without the ending."""
    folder = PACKAGE / "accelerate_configs"
    if not folder.is_dir() and (PACKAGE.parent / "pyproject.toml").is_file():
        folder = PACKAGE.parent / "accelerate_configs"  # a checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that ``--config_file name`` means: one on disk, else one that is shipped.

    Raises:
        ConfigError: neither; the message lists the names that are shipped.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_configs()
    bare = path.stem if path.suffix == ".yaml" else name
    if path.parent == Path() and bare in shipped:
        return shipped[bare]
    got = "is not a file" if path.exists() else "does not exist"
    raise ConfigError(
        f"--config_file: {name!r} {got}, and is no shipped one. Give the path of an Accelerate "
        f"config file, or one of {', '.join(shipped)}."
    )


def read_config(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a YAML file, or JSON where the name ends in .json, as Accelerate tells them apart.

    Raises:
        ConfigError: naming the file and what is wrong, where the reader knows it with the line: not
            readable, a key twice, no mapping, a section that is none.
    """
    path = Path(path)
    is_json = path.suffix == ".json"
    lines: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        if is_json:
            document = json.loads(text, object_pairs_hook=_without_doubles)
        else:
            document, lines = _read_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    except Exception as error:  # PyYAML's constructors raise whatever they meet
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = " ".join(str(getattr(error, "problem", None) or error or type(error)).split())
        kind = "JSON" if is_json else "YAML"
        raise ConfigError(f"{path}{line}: not valid {kind}: {problem}.") from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: got {shown(document)}, expected a mapping of Accelerate's settings; "
            "`accelerate config --config_file FILE` writes one."
        )
    for key in document:
        if isinstance(key, str) and key != SECTION and key.lower() == SECTION:
            raise ConfigError(f"{path}: unknown section `{key}:`. Did you mean {SECTION}:?")
    if SECTION not in document:
        return ConfigFile(path, {}, {}, None)
    section = document.pop(SECTION)
    if not isinstance(section, dict):
        raise ConfigError(
            f"{path}: `{SECTION}:` must be a mapping of fields, such as `step_mode: overlap`; got "
            f"{shown(section)}."
        )
    write = json.dumps if is_json else yaml.safe_dump
    return ConfigFile(path, section, lines, write(document))


class _Loader(yaml.SafeLoader):
    """PyYAML's, which takes the last of two equal keys without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        texts = [(key.tag, key.value) for key in keys]
        for place, key in enumerate(keys):
            if texts[place] in texts[:place]:
                raise yaml.MarkedYAMLError(problem=_twice(key.value), problem_mark=key.start_mark)
        return node


def _read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """The document, and the line of each field of the section."""
    loader = _Loader(text)
    try:
        top: Any = loader.get_single_node()
        document: Any = None if top is None else loader.construct_document(top)
    finally:
        loader.dispose()
    sections = [
        value for key, value in (top.value if isinstance(document, dict) else ())
        if key.value == SECTION and isinstance(value, yaml.MappingNode)
    ]  # fmt: skip
    fields = {key.value: (key, value) for section in sections for key, value in section.value}
    for name, (_, value) in fields.items():
        if value.tag == YAML_BOOL and value.value.lower() in ("on", "off"):
            document[SECTION][name] = value.value  # find_overflow: off, without quotes
    return document, {name: key.start_mark.line + 1 for name, (key, _) in fields.items()}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(_twice(key))
        document[key] = value
    return document


def _twice(key: str) -> str:
    return f"{shown(key)} stands twice in a mapping; keep one"
