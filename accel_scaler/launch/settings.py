"""The settings of a launch: flags over the environment over the file's section over defaults."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..config import _CHECKS, ENV_PREFIX, SECTION, ScalerConfig, _complaint, _parse, shown
from ..config_file import ConfigFile
from ..errors import ConfigError

__all__ = ["FIELDS", "Settings", "descriptions", "resolve"]


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """What the launcher reads beside :class:`ScalerConfig`; the script never sees it."""

    attach: bool = field(default=True, metadata={"allowed": "true or false"})
    """Attach every Accelerator and Trainer of the script. False: only where it calls ``attach``."""


FIELDS: dict[str, dataclasses.Field[Any]] = {
    spec.name: spec
    for spec in (*dataclasses.fields(LauncherConfig), *dataclasses.fields(ScalerConfig))
}


@dataclass(frozen=True)
class Settings:
    """Every setting of a launch, and who set it."""

    config: ScalerConfig
    attach: bool
    sources: dict[str, str]
    """Of each field that someone set: the flag, the variable, or the file and line. The rest
    stands at its default."""


def resolve(
    file: ConfigFile | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> Settings:
    """Merge the settings; each value is checked, used or not.

    Args:
        file: the config file with its section, if there is one.
        environ: the ``ACCEL_SCALER_<FIELD>`` variables are read, others ignored.
        flags: ``{field: text}`` of the command line.

    Raises:
        ConfigError: naming the place (file and line, variable, flag), the value, what is allowed.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source in (*_of_file(file), *_of_environment(environ), *_of_flags(flags)):
        values[name], sources[name] = value, source
    attach = values.pop("attach", True)
    try:
        return Settings(ScalerConfig(**values), attach, sources)
    except ConfigError as error:  # every field is good; two of them contradict each other
        named = [f"{name}: {sources[name]}" for name in sources if f"{name}=" in str(error)]
        raise ConfigError(f"{error} ({'; '.join(named)})") from None


def descriptions() -> dict[str, str]:
    """What each field's docstring says; Python keeps those in the source only."""
    found = {}
    for cls in (LauncherConfig, ScalerConfig):
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = ast.literal_eval(after.value).replace("``", "")
                found[ast.unparse(line.target)] = " ".join(text.split())
    return found


Found = tuple[str, Any, str]


def _of_file(file: ConfigFile | None) -> Iterator[Found]:
    if file is None:
        return
    for name, value in file.values.items():
        source = f"{file.path}, line {file.lines[name]}"
        spec = _known(name, name, f"{source}, section `{SECTION}:`")
        if not _is_allowed(spec, value):
            raise ConfigError(f"{source}: {_complaint(spec, shown(value))}{_hint(spec, value)}")
        yield name, value, source


def _of_environment(environ: Mapping[str, str]) -> Iterator[Found]:
    for key in sorted(environ):
        if key.startswith(ENV_PREFIX):
            name = key.removeprefix(ENV_PREFIX).lower()
            # Only the upper-case name counts, as in ScalerConfig.from_env.
            spec = _known(name if key == key.upper() else key, key, "the environment")
            yield _from_text(spec, environ[key], key)


def _of_flags(flags: Mapping[str, str]) -> Iterator[Found]:
    for name, text in flags.items():
        yield _from_text(FIELDS[name], text, f"--{name}")


def _from_text(spec: dataclasses.Field[Any], text: str, source: str) -> Found:
    value = _parse(spec, text, source)
    if not _is_allowed(spec, value):
        raise ConfigError(f"{source}: got {shown(text)}, expected {spec.metadata['allowed']}.")
    return spec.name, value, source


def _known(name: str, written: str, where: str) -> dataclasses.Field[Any]:
    if name in FIELDS:
        return FIELDS[name]
    near = difflib.get_close_matches(name, FIELDS, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{where}: unknown field {shown(written)}.{meant} The fields are {', '.join(FIELDS)}."
    )


def _is_allowed(spec: dataclasses.Field[Any], value: Any) -> bool:
    if spec.name == "attach":
        return isinstance(value, bool)
    return bool(_CHECKS[spec.name](value))


def _hint(spec: dataclasses.Field[Any], value: Any) -> str:
    """YAML 1.1 takes ``1e4`` and ``none`` for texts: say how to write what was meant."""
    if not isinstance(value, str):
        return ""
    try:
        meant = _parse(spec, value, spec.name)
    except ConfigError:
        return ""
    if not _is_allowed(spec, meant):
        return ""
    return f" The file has a text there; write {yaml.safe_dump(meant).split()[0]}."
