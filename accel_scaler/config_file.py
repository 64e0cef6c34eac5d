"""The ``accel_scaler:`` section of an Accelerate config file: its fields, their lines, the rest.

Accelerate refuses a file with a key that it does not know, so the section is taken out and the rest
handed over. Python's loaders keep neither line numbers nor duplicate keys; this module does.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .config import SECTION, UNREADABLE, flat, forbid_bomb, read_text, shown, yaml_line
from .errors import ConfigError

__all__ = ["ConfigFile", "find_config", "read_config", "shipped_configs"]

PACKAGE = Path(__file__).parent

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|\n')


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A config file, read: the section's fields and the text that is left without it."""

    path: Path
    values: dict[str, Any]
    """The section's fields as the file has them, not checked."""
    lines: dict[str, int]
    """The line of each field, from 1."""
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


def read_config(path: Path) -> ConfigFile:
    """Read a YAML file, or JSON where the name ends in .json, as Accelerate tells them apart.

    Raises:
        ConfigError: naming the file, the line and what is wrong: not readable, no mapping, a
            section that is none, a field twice.
    """
    text = read_text(path)
    read = _read_json if path.name.endswith(".json") else _read_yaml
    found, rest = read(text, path)
    if found is None:
        return ConfigFile(path, {}, {}, None)
    lines: dict[str, int] = {}
    for key, _, line in found:
        if key in lines:
            raise ConfigError(
                f"{path}, line {line}: {shown(key)} stands twice in `{SECTION}:` (also in line "
                f"{lines[key]}); keep one."
            )
        lines[key] = line
    return ConfigFile(path, {key: value for key, value, _ in found}, lines, rest)


Fields = list[tuple[str, Any, int]]


def _read_yaml(text: str, path: Path) -> tuple[Fields | None, str]:
    """The section's fields, None without one; and the file without it."""
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        top = loader.get_single_node()
        forbid_bomb(top, path)
        _expect_mapping(isinstance(top, yaml.MappingNode), path, _word(top))
        sections = [pair for pair in top.value if _is_section(pair[0])]
        top.value = [pair for pair in top.value if not _is_section(pair[0])]
        rest = yaml.serialize(top, Dumper=yaml.SafeDumper)
        # Constructing merges `<<` into the nodes, the section's too where it is an alias.
        written = [key for _, section in sections for key in _keys(section)]
        loader.construct_document(top)  # unreadable values are said here, with the right path
        _expect_one([key.start_mark.line + 1 for key, _ in sections], path)
        if not sections:
            return None, rest
        section, line = sections[0][1], sections[0][0].start_mark.line + 1
        if not isinstance(section, yaml.MappingNode):
            raise _not_a_mapping(path, line, loader.construct_document(section))
        return _yaml_fields(loader, section, written, path), rest
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{yaml_line(error)}: not valid YAML: {flat(error)}") from error
    except ConfigError:
        raise
    except UNREADABLE as error:
        raise ConfigError(f"{path}: a value that YAML cannot read: {flat(error)}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _keys(node: Any) -> list[Any]:
    return [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []


def _yaml_fields(loader: Any, section: Any, written: list[Any], path: Path) -> Fields:
    loader.flatten_mapping(section)  # `<<: *base`; fields written out come last and win
    merged: dict[Any, tuple[Any, int]] = {}
    fields: Fields = []
    for key_node, value_node in section.value:
        key = loader.construct_document(key_node)
        value, line = loader.construct_document(value_node), key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}, line {line}: {shown(key)} in `{SECTION}:` is no field's name."
            )
        if any(key_node is node for node in written):
            merged.pop(key, None)
            fields.append((key, value, line))
        else:
            merged[key] = (value, line)
    return [(key, *found) for key, found in merged.items()] + fields


def _read_json(text: str, path: Path) -> tuple[Fields | None, str]:
    """The section's fields, None without one; and the file without it."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {flat(error)}") from error
    _expect_mapping(isinstance(document, dict), path, type(document).__name__)
    keys = list(_json_keys(text))
    top = [line for parents, key, line in keys if not parents and key == SECTION]
    _expect_one(top, path)
    if not top:
        return None, text
    section = document.pop(SECTION)
    if not isinstance(section, dict):
        raise _not_a_mapping(path, top[0], section)
    fields = [(key, section[key], line) for parents, key, line in keys if parents == (SECTION,)]
    return fields, json.dumps(document, indent=2) + "\n"


def _json_keys(text: str) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """``(names of the mappings around it, key, line)`` of every key in valid JSON."""
    line, last, last_line = 1, "", 1
    around: list[str] = []  # the name of each open bracket; of a list's elements, ""
    named = [""]
    for token in _JSON_TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token[0] == '"':
            last, last_line = token, line
        elif token == ":":
            named[-1] = json.loads(last)
            yield tuple(around[1:]), named[-1], last_line
        elif token in "{[":
            around.append(named[-1])
            named.append("")
        elif token in "}]":
            around.pop()
            named.pop()
        else:
            named[-1] = ""


def _is_section(key: Any) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == SECTION


def _expect_mapping(good: bool, path: Path, got: str) -> None:
    if not good:
        raise ConfigError(
            f"{path}: got {got}, expected a mapping of Accelerate's settings; "
            "`accelerate config --config_file FILE` writes one."
        )


def _expect_one(lines: list[int], path: Path) -> None:
    if len(lines) > 1:
        raise ConfigError(
            f"{path}, line {lines[1]}: a second `{SECTION}:` section (the first is in line "
            f"{lines[0]}); put all fields into one."
        )


def _not_a_mapping(path: Path, line: int, got: object) -> ConfigError:
    return ConfigError(
        f"{path}, line {line}: `{SECTION}:` must be a mapping of fields, such as "
        f"`step_mode: overlap`; got {_short(got)}."
    )


def _word(node: Any) -> str:
    return "an empty file" if node is None else f"a {node.id}"


def _short(value: object) -> str:
    text = shown(value)
    return text if len(text) <= 60 else text[:57] + "..."
