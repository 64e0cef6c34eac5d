"""Settings: everything a user can set, checked where it is set."""

from __future__ import annotations

import dataclasses
import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError

__all__ = [
    "ScalerConfig",
]

ENV_PREFIX = "ACCEL_SCALER_"
SECTION = "accel_scaler"
ATTACH = "attach"
"""Beside the fields, in the environment and in a section: read by ``accel-scaler launch`` alone."""
SMALLEST_FLOAT32 = 2.0**-149
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
LARGEST_FILE = 1 << 18
"""Bytes of a config file: a few hundred are usual, and YAML is read slowly."""
MOST_VALUES = 1 << 16
"""In a config file, with what its aliases repeat: a few lines can name billions."""


@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """Every setting of the scaler and of the optimizer step, checked on construction.

    Raises:
        ConfigError: naming the field, the value it got, and what is allowed.
    """

    init_scale: float = field(
        default=2.0**16, metadata={"allowed": "a finite number > 0 (float32)"}
    )
    """Scale of the first window (a factor on the loss, no unit)."""
    growth_factor: float = field(default=2.0, metadata={"allowed": "a finite number > 1"})
    """Factor on the scale after ``growth_interval`` windows in a row without overflow."""
    backoff_factor: float = field(default=0.5, metadata={"allowed": "a number in (0, 1)"})
    """Factor on the scale after a window that overflowed."""
    growth_interval: int = field(default=2000, metadata={"allowed": "an integer from 1 to 2**53"})
    """Windows in a row without overflow that make the scale grow."""
    enabled: bool = field(default=True, metadata={"allowed": "true or false"})
    """False: no scaling; ``step`` calls the optimizer, everything else does nothing."""
    min_scale: float | None = field(
        default=None, metadata={"allowed": "a finite number > 0 (float32), or none"}
    )
    """The scale never falls below this. None: torch's behaviour, no floor."""
    max_scale: float | None = field(
        default=None, metadata={"allowed": "a finite number > 0 (float32), or none"}
    )
    """The scale never grows above this. None: torch's behaviour, float32's range."""
    hysteresis: int = field(default=1, metadata={"allowed": "an integer from 1 to 2**53"})
    """Overflows in a row before the scale backs off (each one still skips its step)."""
    max_consecutive_skips: int | None = field(
        default=None, metadata={"allowed": "an integer from 1 to 2**53, or none"}
    )
    """Skipped windows in a row that are allowed; one more raises, naming the tensors."""
    step_mode: Literal["sync", "overlap", "delayed"] = field(
        default="sync", metadata={"allowed": "'sync', 'overlap' or 'delayed'"}
    )
    """When parameters are updated: ``sync``, inside ``optimizer.step()``; ``overlap``, on the
    optimizer thread, each parameter awaited where it is next used; ``delayed``, on the optimizer
    thread, the update published at the next boundary (one step stale)."""
    delay_warmup_steps: int = field(default=0, metadata={"allowed": "an integer from 0 to 2**53"})
    """``delayed``: the first N steps are not stale (they run as ``overlap``). A resumed run goes on
    counting where the optimizer's state has a ``step``; else it warms up again."""
    offload: Literal["none", "cpu"] = field(default="none", metadata={"allowed": "'none' or 'cpu'"})
    """Where optimizer state lives: ``none``, with the parameters; ``cpu``, in host memory, with
    float32 master weights, updated there."""
    optimizer_threads: int | Literal["auto"] = field(
        default="auto", metadata={"allowed": "an integer from 1 to 2**53, or 'auto'"}
    )
    """Threads of the optimizer's CPU kernels off the training thread, whatever OMP_NUM_THREADS
    says. ``auto``: physical cores / ranks on this host, less one, at least 1."""
    fold_unscale: bool = field(default=False, metadata={"allowed": "true or false"})
    """Let the fused kernel unscale and clip: faster, but ``.grad`` stays scaled until the step,
    and results may differ by one rounding while clipping is active."""
    sharded: bool = field(default=False, metadata={"allowed": "true or false"})
    """Ranks hold different gradients in a way that the parameters do not show (expert or tensor
    parallelism by hand), so they agree on each verdict: one all-reduce a window. DTensors and FSDP
    are seen without it."""
    telemetry: str | None = field(
        default=None, metadata={"allowed": "the path of a file to append to, or none"}
    )
    """JSON-lines file with one record a window, written by rank 0; with ``{rank}`` in the path each
    rank writes its own. It is appended to, never overwritten. ``accel-scaler report`` reads it."""
    underflow_interval: int = field(default=100, metadata={"allowed": "an integer from 1 to 2**53"})
    """With ``telemetry``: windows between two counts of zero and subnormal float16 gradients."""
    find_overflow: bool = field(default=False, metadata={"allowed": "true or false"})
    """For debugging: watch every module's activations and gradients, and say of each overflow in
    which module it began. Slow; computes the same numbers."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not _CHECKS[spec.name](value):
                raise ConfigError(_complaint(spec, shown(value)))
        check_bounds(self.init_scale, self.min_scale, self.max_scale)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "the settings") -> ScalerConfig:
        """Build from plain values; ``where`` is named in errors about unknown fields."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in names]
        if unknown:
            raise ConfigError(
                f"{where}: unknown field {shown(unknown[0])}; the fields are {', '.join(names)}."
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ScalerConfig:
        """Read ``ACCEL_SCALER_<FIELD>`` variables; unset ones keep their defaults."""
        environ = os.environ if environ is None else environ
        specs = {ENV_PREFIX + spec.name.upper(): spec for spec in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key in sorted(environ):
            if not key.startswith(ENV_PREFIX) or key == ENV_PREFIX + ATTACH.upper():
                continue
            if key not in specs:
                name = key if key.isidentifier() else shown(key)
                raise ConfigError(
                    f"the environment: unknown variable {name}; known are {', '.join(specs)}."
                )
            values[specs[key].name] = _parse(specs[key], environ[key], key)
        return cls.from_mapping(values, "the environment")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> ScalerConfig:
        """Read the top-level ``accel_scaler:`` section of an Accelerate config file.

        A file without the section gives the defaults.

        Raises:
            ConfigError: the file cannot be read, is too large, or a setting is wrong.
        """
        import yaml  # comes with accelerate; needed by those who use a file

        loader: Any = None
        try:
            loader = yaml.SafeLoader(read_text(path))
            node = loader.get_single_node()
            forbid_bomb(node, path)
            document = None if node is None else loader.construct_document(node)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}{yaml_line(error)}: not valid YAML: {flat(error)}") from error
        except UNREADABLE as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: a value that YAML cannot read: {flat(error)}") from error
        finally:
            if loader is not None:
                loader.dispose()
        if document is not None and not isinstance(document, dict):
            raise ConfigError(
                f"{path}: expected a mapping at the top, got {type(document).__name__}."
            )
        section = (document or {}).get(SECTION, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{path}: `{SECTION}:` must be a mapping of fields, got {shown(section)}."
            )
        fields = {key: value for key, value in section.items() if key != ATTACH}
        return cls.from_mapping(fields, f"{path}, section `{SECTION}:`")

    def to_env(self) -> dict[str, str]:
        """The variables that make ``from_env`` give this config again (defaults left out)."""
        return {ENV_PREFIX + name.upper(): _render(value) for name, value in self.changed().items()}

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) != spec.default
        }


# What PyYAML's constructors raise besides YAMLError, for text such as `!!bool 7` or `2024-13-01`.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def read_text(path: str | os.PathLike[str]) -> str:
    """A config file's text, of at most ``LARGEST_FILE`` bytes.

    Raises:
        ConfigError: it cannot be read as UTF-8, or is larger.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(
                f"{path}: expected a config file of at most {LARGEST_FILE >> 10} KiB, got a larger "
                "one; is it one?"
            )
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def yaml_line(error: Exception) -> str:
    """Where PyYAML's error knows it."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def flat(error: BaseException) -> str:
    """What a reader says, on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    problem = getattr(error, "problem", None)
    return " ".join(str(problem or error).split()) or type(error).__name__


def forbid_bomb(node: Any, path: object) -> None:
    """Refuse a YAML node that its aliases blow up, or that contains itself.

    Raises:
        ConfigError: saying so.
    """
    counts: dict[int, int] = {}

    def count(node: Any) -> int:
        key = id(node)
        if key not in counts:
            counts[key] = MOST_VALUES + 1  # met again before it is counted: it contains itself
            parts = node.value if isinstance(node.value, list) else ()
            flat = (each for part in parts for each in (part if type(part) is tuple else (part,)))
            counts[key] = 1 + sum(map(count, flat))
        return counts[key]

    if node is not None and count(node) > MOST_VALUES:
        raise ConfigError(
            f"{path}: expected at most {MOST_VALUES} values, got more (aliases repeat what they "
            "name, and one may contain itself); write out what is needed."
        )


class _Repr(reprlib.Repr):
    """Of what a file or a caller gave: all of it where it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 3, 8, 8, 8, 8
        self.maxstring = self.maxother = 400

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits, which it has read as hex."""
        return repr(x) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"


shown = _Repr().repr
"""``repr``, of bounded length whatever the value is."""


def is_number(value: object) -> bool:
    """A finite int or float; a bool is not a number here."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def is_count(value: object) -> bool:
    """An integer from 1 to 2**53: counters are exact as floats, too, and fit into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**53


def is_positive(value: Any) -> bool:
    """A number above 0 that stays so, and finite, in float32."""
    return is_number(value) and SMALLEST_FLOAT32 <= value <= LARGEST_FLOAT32


def is_path(value: object) -> bool:
    """Text that a file may be named, and that the environment does not take for None."""
    return isinstance(value, str) and value.strip().lower() not in _NONE_WORDS and "\0" not in value


def check_bounds(scale: float, low: float | None, high: float | None) -> None:
    """Raise ``ConfigError`` unless ``low <= scale <= high`` (None: no bound)."""
    if low is not None and high is not None and low > high:
        raise ConfigError(f"min_scale={low!r} is above max_scale={high!r}; swap or drop one.")
    if low is not None and scale < low:
        raise ConfigError(
            f"init_scale={scale!r} is below min_scale={low!r}; raise it or drop the floor."
        )
    if high is not None and scale > high:
        raise ConfigError(
            f"init_scale={scale!r} is above max_scale={high!r}; set init_scale={high!r} as well."
        )


_CHECKS: dict[str, Any] = {
    "init_scale": is_positive,
    "growth_factor": lambda v: is_number(v) and v > 1,
    "backoff_factor": lambda v: is_number(v) and 0 < v < 1,
    "growth_interval": is_count,
    "enabled": lambda v: isinstance(v, bool),
    "min_scale": lambda v: v is None or is_positive(v),
    "max_scale": lambda v: v is None or is_positive(v),
    "hysteresis": is_count,
    "max_consecutive_skips": lambda v: v is None or is_count(v),
    "step_mode": lambda v: v in ("sync", "overlap", "delayed"),
    "delay_warmup_steps": lambda v: is_count(v) or (type(v) is int and v == 0),
    "offload": lambda v: v in ("none", "cpu"),
    "optimizer_threads": lambda v: v == "auto" or is_count(v),
    "fold_unscale": lambda v: isinstance(v, bool),
    "sharded": lambda v: isinstance(v, bool),
    "telemetry": lambda v: v is None or is_path(v),
    "underflow_interval": is_count,
    "find_overflow": lambda v: isinstance(v, bool),
}

_NONE_WORDS = ("", "none", "null")
_WORDS = {"true": True, "1": True, "yes": True, "on": True}
_WORDS |= {"false": False, "0": False, "no": False, "off": False}


def _complaint(spec: dataclasses.Field[Any], got: str) -> str:
    return f"{spec.name}: got {got}, expected {spec.metadata['allowed']}."


def _parse(spec: dataclasses.Field[Any], text: str, key: str) -> Any:
    """A variable's text as its field's type; a text that does not parse is an error."""
    kind = str(spec.type)
    word = text.strip().lower()
    if "None" in kind and word in _NONE_WORDS:
        return None
    if "auto" in kind and word == "auto":
        return word
    if kind == "bool" and word in _WORDS:
        return _WORDS[word]
    if kind.startswith("str"):
        return text
    if kind.startswith("Literal"):
        return text.strip()
    try:
        if kind.startswith("int"):
            return int(word)
        if kind.startswith("float"):
            return float(word)
    except ValueError:
        pass
    raise ConfigError(f"{key}: got {shown(text)}, expected {spec.metadata['allowed']}.")


def _render(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
