"""Settings: one table of everything a user can set, and who may set it.

A setting comes from an argument, a flag of ``accel-scaler launch``, a variable
``ACCEL_SCALER_<FIELD>`` or the section of a config file; whichever it is, the same row of the
table reads and checks it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_type_hints

from .config_file import SECTION, ConfigFile, read_config
from .errors import ConfigError, refuse_retired, shown

__all__ = ["ScalerConfig"]

C = TypeVar("C", bound=type)

ENV_PREFIX = "ACCEL_SCALER_"
SMALLEST_FLOAT32 = 2.0**-149
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


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


@dataclass(frozen=True)
class Kind:
    """What a setting may be, and how a text says it."""

    allowed: str
    """In words, for errors and help."""
    check: Callable[[Any], bool]
    convert: Callable[[str], Any] = str
    words: Mapping[str, Any] = field(default_factory=dict)
    """Texts that stand for a value; capital letters and spaces around do not matter."""
    choices: tuple[str, ...] = ()
    """The texts among the values, where they are few."""

    def parse(self, text: str) -> Any:
        """The value that a text stands for; the text itself, for ``check`` to refuse, if none."""
        word = text.strip().lower()
        if word in self.words:
            return self.words[word]
        try:
            return self.convert(text)
        except ValueError:
            return text


def _or_none(kind: Kind) -> Kind:
    return Kind(
        f"{kind.allowed}, or none",
        lambda value: value is None or kind.check(value),
        kind.convert,
        dict.fromkeys(("", "none", "null")),
    )


def _one_of(*choices: str) -> Kind:
    allowed = " or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])])
    return Kind(allowed, lambda value: value in choices, str.strip, choices=choices)


SWITCH = Kind(
    "true or false",
    lambda value: isinstance(value, bool),
    words=dict.fromkeys(("true", "1", "yes", "on"), True)
    | dict.fromkeys(("false", "0", "no", "off"), False),
)
SCALE = Kind("a finite number > 0 (float32)", is_positive, float)
COUNT = Kind("an integer from 1 to 2**53", is_count, int)


def is_path(value: object) -> bool:
    """A text or a ``PathLike`` of one; what the environment takes for None is no path."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return text.strip().lower() not in ("", "none", "null")


PATH = Kind("a path", is_path)

GLOBS = Kind(
    "a list of globs on module names, without commas and spaces",
    lambda value: (
        isinstance(value, (list, tuple))
        and all(isinstance(each, str) and re.fullmatch(r"[^\s,]+", each) for each in value)
    ),
    lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
)


SCALING, STEPPING, OVERFLOWS = "The scale", "The optimizer step", "Overflows"
TELEMETRY, LAUNCHING = "Telemetry", "The launcher"
GROUPS = (SCALING, STEPPING, OVERFLOWS, TELEMETRY, LAUNCHING)
"""In the order in which help shows them."""


def setting(group: str, default: Any, kind: Kind, about: str) -> Any:
    """A row of the table: a dataclass field with all that is known of it.

    Args:
        group: one of ``GROUPS``, under which help shows it.
        about: what it does; one or more sentences.
    """
    return field(default=default, metadata={"group": group, "kind": kind, "about": about})


def described(cls: C) -> C:
    """A dataclass of rows: its docstring and its signature show them, and it asks who gives it a
    name that is in none of them whether another was meant."""
    specs: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    made = cls.__init__  # type: ignore[misc]
    made.__annotations__ = {**get_type_hints(cls), "return": None}

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **values: Any) -> None:  # noqa: N807
        for name in values:
            _expect_known(name, specs, type(self).__name__)
        made(self, *args, **values)

    cls.__init__ = __init__  # type: ignore[misc]
    rows = (
        f"{name} ({spec.type}): {spec.metadata['about']} Takes {spec.metadata['kind'].allowed}. "
        f"Default: {spec.default!r}."
        for name, spec in specs.items()
    )
    wrap = textwrap.TextWrapper(92, " " * 4, " " * 8, break_on_hyphens=False)
    text = inspect.cleandoc(cls.__doc__ or "")  # from Python 3.13 on it has no indentation
    cls.__doc__ = f"{text}\n\nAttributes:\n" + "\n".join(map(wrap.fill, rows)) + "\n"
    return cls


@described
@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """Every setting of the scaler and of the optimizer step, checked on construction.

    Raises:
        ConfigError: naming the field, the value it got, and what is allowed.
    """

    init_scale: float = setting(
        SCALING, 2.0**16, SCALE, "Scale of the first window (a factor on the loss, no unit)."
    )
    growth_factor: float = setting(
        SCALING,
        2.0,
        Kind("a finite number > 1", lambda value: is_number(value) and value > 1, float),
        "Factor on the scale after growth_interval windows in a row without overflow.",
    )
    backoff_factor: float = setting(
        SCALING,
        0.5,
        Kind("a number in (0, 1)", lambda value: is_number(value) and 0 < value < 1, float),
        "Factor on the scale after a window that overflowed.",
    )
    growth_interval: int = setting(
        SCALING, 2000, COUNT, "Windows in a row without overflow that make the scale grow."
    )
    enabled: bool = setting(
        SCALING,
        True,
        SWITCH,
        "False: no scaling; step calls the optimizer, everything else does nothing.",
    )
    min_scale: float | None = setting(
        SCALING,
        None,
        _or_none(SCALE),
        "The scale never falls below this. None: torch's behaviour, no floor.",
    )
    max_scale: float | None = setting(
        SCALING,
        None,
        _or_none(SCALE),
        "The scale never grows above this. None: torch's behaviour, float32's range.",
    )
    hysteresis: int = setting(
        SCALING,
        1,
        COUNT,
        "Overflows in a row before the scale backs off (each one still skips its step).",
    )
    max_consecutive_skips: int | None = setting(
        OVERFLOWS,
        None,
        _or_none(COUNT),
        "Skipped windows in a row that are allowed; one more raises, naming the tensors.",
    )
    step_mode: Literal["sync", "overlap", "delayed"] = setting(
        STEPPING,
        "sync",
        _one_of("sync", "overlap", "delayed"),
        "When parameters are updated: sync, inside optimizer.step(); overlap, on the optimizer "
        "thread, each parameter awaited where it is next used; delayed, on the optimizer thread, "
        "the update published one step late (see delay_compensation).",
    )
    delay_warmup_steps: int = setting(
        STEPPING,
        0,
        Kind(
            "an integer from 0 to 2**53",
            lambda value: is_count(value) or (type(value) is int and value == 0),
            int,
        ),
        "delayed: the first N steps are not stale (they run as overlap). A resumed run goes on "
        "counting where the optimizer's state has a step; else it warms up again.",
    )
    delay_compensation: Literal["auto", "preview", "none"] = setting(
        STEPPING,
        "auto",
        _one_of("auto", "preview", "none"),
        "delayed: what the model has of an update until it is published. preview, what it will be "
        "without its gradient, and the gradient's own share of it; none, nothing; auto, a preview "
        "where one was derived for the optimizer, else none.",
    )
    offload: Literal["none", "cpu"] = setting(
        STEPPING,
        "none",
        _one_of("none", "cpu"),
        "Where optimizer state lives: none, with the parameters; cpu, in host memory, with "
        "float32 master weights, updated there.",
    )
    master_weights: Literal["auto", "fp32", "none"] = setting(
        STEPPING,
        "auto",
        _one_of("auto", "fp32", "none"),
        "What float16 and bfloat16 parameters are updated through. fp32, float32 masters of them, "
        "saved with the optimizer; none, themselves (bfloat16 alone: 8 bits of each update are "
        "kept); auto, fp32 where the loss is scaled. With offload or delayed all have masters.",
    )
    optimizer_threads: int | Literal["auto"] = setting(
        STEPPING,
        "auto",
        Kind(
            "an integer from 1 to 2**53, or 'auto'",
            lambda value: value == "auto" or is_count(value),
            int,
            {"auto": "auto"},
            ("auto",),
        ),
        "Threads of the optimizer's CPU kernels off the training thread, whatever OMP_NUM_THREADS "
        "says. auto: physical cores / ranks on this host, less one, at least 1.",
    )
    fold_unscale: bool = setting(
        STEPPING,
        False,
        SWITCH,
        "Let the fused kernel unscale, and on a CPU clip: faster, if nobody looks at .grad between "
        "a clip and the step. Results may differ by one rounding while clipping is active.",
    )
    sharded: bool = setting(
        SCALING,
        False,
        SWITCH,
        "Ranks hold different gradients in a way that the parameters do not show (expert or "
        "tensor parallelism by hand), so they agree on each verdict: one all-reduce a window. "
        "DTensors and FSDP are seen without it.",
    )
    telemetry: str | os.PathLike[str] | None = setting(
        TELEMETRY,
        None,
        _or_none(PATH),
        "JSON-lines file with one record a window, written by rank 0; with {rank} in the path "
        "each rank writes its own. It is appended to, never overwritten. accel-scaler report "
        "reads it.",
    )
    underflow_interval: int = setting(
        TELEMETRY,
        100,
        COUNT,
        "With telemetry: windows between two looks at how much of float16's range gradients take: "
        "the largest against 65504, zeros, subnormals.",
    )
    find_overflow: Literal["auto", "replay", "always", "off"] = setting(
        OVERFLOWS,
        "auto",
        _one_of("auto", "replay", "always", "off"),
        "How the module is found in which an overflow began. auto, where telemetry or "
        "max_consecutive_skips is set: after an overflow the next windows are watched until one "
        "overflows, which changes no number; with heal, replay; else off. replay, the forwards and "
        "backwards of the skipped window are run again, at the first skip of a run and one in a "
        "hundred after that; parameters, buffers and random state are put back, nothing else "
        "is. always, every window is watched (slow). off, names of parameters alone.",
    )
    heal: bool = setting(
        OVERFLOWS,
        False,
        SWITCH,
        "Keep the smallest module that overflows at any scale in float32 from then on, and go on. "
        "What was kept is told, printed at the end and saved with the scaler.",
    )
    fp32_modules: tuple[str, ...] = setting(
        OVERFLOWS,
        (),
        GLOBS,
        "Modules that run in float32 under fp16, by name: globs on the names of "
        "model.named_modules(), as '*.wo' or 'transformer.h.3.mlp'; in a text with commas between "
        "them. One that matches nothing is an error.",
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if not spec.metadata["kind"].check(value):
                raise _wrong(spec.name, value, spec)
        object.__setattr__(self, "fp32_modules", tuple(self.fp32_modules))
        if self.telemetry is not None:
            object.__setattr__(self, "telemetry", os.fspath(self.telemetry))
        through = (("step_mode", "delayed"), ("offload", "cpu"))
        for name, value in through if self.master_weights == "none" else ():
            if getattr(self, name) == value:
                raise ConfigError(
                    f"master_weights='none' steps parameters in place, and {name}={value!r} steps "
                    "float32 masters; drop one of the two."
                )
        check_bounds(self.init_scale, self.min_scale, self.max_scale)
        if self.heal and self.find_overflow == "off":
            raise ConfigError(
                "heal=True runs the window that overflowed again, which find_overflow='off' rules "
                "out; leave find_overflow at 'auto'."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "the settings") -> ScalerConfig:
        """Build from plain values; ``where`` is named in errors."""
        for name in values:
            _expect_known(name, cls.__dataclass_fields__, where)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ScalerConfig:
        """Read ``ACCEL_SCALER_<FIELD>`` variables; unset ones keep their defaults.

        Raises:
            ConfigError: a variable of no field, or with a value that its field does not take.
        """
        return resolve(in_environment(os.environ if environ is None else environ)).config

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> ScalerConfig:
        """Read the top-level ``accel_scaler:`` section of an Accelerate config file.

        A file without the section gives the defaults.

        Raises:
            ConfigError: the file cannot be read, or a setting is wrong.
        """
        return resolve(in_section(read_config(path))).config

    def to_env(self) -> dict[str, str]:
        """The variables that make ``from_env`` give this config again (defaults left out)."""
        return {variable_of(name): _text(value) for name, value in self.changed().items()}

    @property
    def finds_overflow(self) -> Literal["watch", "replay", "always", "off"]:
        """``find_overflow``, with ``"auto"`` made up."""
        if self.find_overflow != "auto":
            return self.find_overflow
        if self.heal:
            return "replay"
        asks = self.telemetry is not None or self.max_consecutive_skips is not None
        return "watch" if asks else "off"

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in dataclasses.fields(self)
            if getattr(self, spec.name) != spec.default
        }


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """What ``accel-scaler launch`` reads beside :class:`ScalerConfig`, which overlooks it."""

    attach: bool = setting(
        LAUNCHING,
        True,
        SWITCH,
        "Attach every Accelerator and Trainer of the script. False: only where it calls attach.",
    )


FIELDS: dict[str, dataclasses.Field[Any]] = {
    spec.name: spec
    for spec in (*dataclasses.fields(LauncherConfig), *dataclasses.fields(ScalerConfig))
}
"""The table: ``metadata`` holds each one's ``group``, ``kind`` and ``about``."""


@dataclass(frozen=True)
class Settings:
    """Every setting, and who set it."""

    config: ScalerConfig
    attach: bool
    sources: dict[str, str]
    """Of each field that someone set: the flag, the variable, or the file and line. The rest
    stands at its default."""


Found = tuple[str, Any, str]
"""A field, its value, and who says so."""


def resolve(*found: Iterable[Found]) -> Settings:
    """Merge settings of several sources; a later one outranks those before it.

    Raises:
        ConfigError: two fields contradict each other; it says where both come from.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source in itertools.chain(*found):
        values[name], sources[name] = value, source
    attach = values.pop("attach", True)
    try:
        return Settings(ScalerConfig(**values), attach, sources)
    except ConfigError as error:
        named = [f"{name}: {sources[name]}" for name in sources if f"{name}=" in str(error)]
        raise ConfigError(f"{error} ({'; '.join(named)})") from None


@dataclass(frozen=True)
class Asked:
    """What a call asks for: a config, which is every setting, or some settings by name; arguments
    outrank the environment.

    Args:
        config: a :class:`ScalerConfig`, a mapping of fields, or None.
        settings: fields by keyword; they replace those of ``config``.
        where: the call, for errors.

    Raises:
        ConfigError: another ``config``, an unknown field, a value that its field does not take.
    """

    config: ScalerConfig | Mapping[str, Any] | None
    settings: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        config = self.config
        if config is not None and not isinstance(config, (ScalerConfig, Mapping)):
            raise ConfigError(
                f"{self.where}: got {shown(config)} as config, expected a ScalerConfig or a "
                "mapping of its fields; single ones are keywords: step_mode='overlap'."
            )
        for name, value in self.single.items():
            spec = _expect_known(name, ScalerConfig.__dataclass_fields__, self.where)
            if not spec.metadata["kind"].check(value):
                raise _wrong(f"{self.where}: {name}", value, spec)

    @property
    def single(self) -> dict[str, Any]:
        """The fields that are asked for by name."""
        named = self.config if isinstance(self.config, Mapping) else {}
        return {**named, **self.settings}

    @property
    def is_nothing(self) -> bool:
        """All is left to the environment."""
        return not isinstance(self.config, ScalerConfig) and not self.single

    def changes(self, config: ScalerConfig) -> ScalerConfig:
        """What ``config`` becomes by it: equal, where it is what is asked for."""
        base = self.config if isinstance(self.config, ScalerConfig) else config
        return dataclasses.replace(base, **self.single)

    def resolved(self) -> ScalerConfig:
        """Every setting. A ``ScalerConfig`` says all of them; else the environment says those
        that are not asked for by name."""
        if isinstance(self.config, ScalerConfig):
            return self.changes(self.config)
        named = ((name, value, self.where) for name, value in self.single.items())
        return resolve(in_environment(os.environ), named).config


def in_section(file: ConfigFile) -> Iterator[Found]:
    """The settings of a config file's section; each is checked, used or not.

    Raises:
        ConfigError: naming the file, the line and the field.
    """
    for name, value in file.values.items():
        line = file.lines.get(str(name))
        source = f"{file.path}, line {line}" if line else f"{file.path}"
        spec = _expect_known(name, FIELDS, f"{source}, section `{SECTION}:`")
        yield spec.name, _read(spec, value, f"{source}: {name}"), source


def in_environment(environ: Mapping[str, str]) -> Iterator[Found]:
    """The settings of the ``ACCEL_SCALER_<FIELD>`` variables; others are ignored.

    Raises:
        ConfigError: naming the variable.
    """
    for key in sorted(environ):
        if key.upper().startswith(ENV_PREFIX):
            name = key[len(ENV_PREFIX) :].lower()
            spec = _expect_known(name, FIELDS, "the environment", key, variable_of)
            if key != key.upper():
                raise ConfigError(
                    f"the environment: unknown variable {key}. Did you mean {key.upper()}?"
                )
            yield spec.name, _read(spec, environ[key], key), key


def in_flags(flags: Mapping[str, str]) -> Iterator[Found]:
    """The settings of a command line, ``{field: text}``.

    Raises:
        ConfigError: naming the flag.
    """
    for name, text in flags.items():
        is_off = FIELDS[name].metadata["kind"] is SWITCH and text == "false"
        flag = f"--no_{name}" if is_off else f"--{name}"
        yield name, _read(FIELDS[name], text, flag), flag


def _read(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """A value from outside; a text is parsed (YAML, too, takes ``1e4`` for one)."""
    read = spec.metadata["kind"].parse(value) if isinstance(value, str) else value
    if not spec.metadata["kind"].check(read):
        raise _wrong(where, value, spec)
    return read


def _text(value: Any) -> str:
    """What a field's kind parses to ``value`` again."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def variable_of(name: str) -> str:
    """The environment's name of a field."""
    return ENV_PREFIX + name.upper()


def nearest(written: object, known: Iterable[str]) -> str | None:
    """What a user may have meant; None: nothing is near."""
    found = difflib.get_close_matches(str(written)[:80].lower(), known, n=1)
    return found[0] if found else None


def _wrong(where: str, value: object, spec: dataclasses.Field[Any]) -> ConfigError:
    kind, meant = spec.metadata["kind"], None
    if isinstance(value, str):  # "async" is not meant to be "sync"
        written = f"{spec.name}={value.strip()!r}"
        refuse_retired(written, written, where)
        first = value.strip()[:1].lower()
        meant = nearest(value, [choice for choice in kind.choices if choice[0] == first])
    ask = "" if meant is None else f" Did you mean {meant!r}?"
    return ConfigError(f"{where}: got {shown(value)}, expected {kind.allowed}.{ask}")


def _expect_known(
    name: object,
    known: Mapping[str, dataclasses.Field[Any]],
    where: str,
    written: object = None,
    spelled: Callable[[str], str] = str,
) -> dataclasses.Field[Any]:
    """The row of a field.

    Args:
        written: the name as it stands there, where that differs.
        spelled: how another name would be written there.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    refuse_retired(name, written or name, where)
    meant = nearest(name, known)
    say = f"The fields are {', '.join(known)}."
    if meant is not None:
        say = f"Did you mean {spelled(meant)}?"
    raise ConfigError(f"{where}: unknown field {shown(written or name)}. {say}")
