"""Settings: a dataclass with a check for each field, and the sources that set them.

A setting comes from an argument, a flag of ``accel-scaler launch``, a variable
``ACCEL_SCALER_<FIELD>`` or the section of a config file, in this order of precedence; else it has
its default.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from .config_file import read_config
from .errors import ConfigError, shown

ENV_PREFIX = "ACCEL_SCALER_"
MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
NONE = ("", "none", "null", "~")
"""Texts that stand for None."""
LOOKS_AFTER = 6
"""Overflows in a row after which a run that asks for nothing is watched. The search for a scale
ends before, in most sound runs."""
SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True)
SWITCHES |= dict.fromkeys(("false", "0", "no", "off"), False)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite int or float; a bool is not a number here."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> bool:
    """Whether ``value`` is a number that is finite and above 0 in float32."""
    return is_number(value) and 2.0**-149 <= value <= MAX_FLOAT32


def is_norm(value: Any) -> bool:
    """Whether ``value`` is positive, or a text such as ``"4x"`` of 1 or more."""
    factor = re.fullmatch(r"(\d+(\.\d+)?)x", value) if isinstance(value, str) else None
    return is_positive(value) if factor is None else float(factor[1]) >= 1.0


class Kind(NamedTuple):
    """The values that a field takes, in words and as a check, and how a text without spaces around
    it becomes one."""

    allowed: str
    check: Callable[[Any], bool]
    convert: Callable[[str], Any] = str


def optional(kind: Kind) -> Kind:
    return Kind(
        f"{kind.allowed}, or none",
        lambda value: value is None or kind.check(value),
        lambda text: None if text.lower() in NONE else kind.convert(text),
    )


COUNT = Kind(
    "an integer from 1 to 2**53",  # the largest one is exact as a float
    lambda value: type(value) is int and 1 <= value <= 2**53,
    int,
)
SCALE = Kind("a finite number > 0 (float32)", is_positive, float)
GROWTH = Kind("a finite number > 1", lambda value: is_number(value) and value > 1, float)
BACKOFF = Kind("a number in (0, 1)", lambda value: is_number(value) and 0 < value < 1, float)
SWITCH = Kind(
    "true or false",
    lambda value: isinstance(value, bool),
    lambda text: SWITCHES.get(text.lower(), text),
)
NORM = Kind("a number > 0, or a factor of at least 1 on the median, such as '4x'", is_norm, float)
BYTES = {unit: 1024**n for n, unit in enumerate(("", "K", "M", "G", "T"))}
COUNTS = {unit: 1000**n for n, unit in enumerate(("", "K", "M", "B", "T"))}


def amount_of(value: Any, units: dict[str, int], after: str = "") -> int | None:
    """What a number or a text says in ``units``, each followed by the pattern ``after``; None where
    it is none."""
    if type(value) is int:
        return value if 0 <= value < 2**53 else None
    form = rf"([0-9]{{1,16}}(?:\.[0-9]+)?) ?([{''.join(units)}]?){after}"
    found = re.fullmatch(form, value) if type(value) is str else None
    return None if found is None else round(float(found[1]) * units[found[2]])


def size_of(value: Any) -> int | None:
    """Bytes of a number or of a text such as ``"6GiB"``; None where it is none."""
    return amount_of(value, BYTES, "i?B?")


SIZE = Kind(
    "'auto', 0, bytes, or a size such as '6GiB'",
    lambda value: value == "auto" or size_of(value) is not None,
)
PATH = Kind(
    "a path",
    lambda value: isinstance(value, (str, os.PathLike)) and str(value).strip().lower() not in NONE,
)
GLOBS = Kind(
    "a list of globs on module names, without commas and spaces",
    lambda value: (
        isinstance(value, (list, tuple))
        and all(isinstance(each, str) and re.fullmatch(r"[^\s,]+", each) for each in value)
    ),
    lambda text: tuple(filter(None, map(str.strip, text.split(",")))),
)


def setting(default: Any, kind: Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


def choice(default: str, literal: Any) -> Any:
    """A field that takes the texts of a ``Literal``."""
    *others, last = texts = get_args(literal)
    allowed = f"{', '.join(map(repr, others))} or {last!r}"
    return setting(default, Kind(allowed, lambda value: value in texts))


StepMode = Literal["sync", "overlap"]
Offload = Literal["none", "cpu"]
Masters = Literal["auto", "fp32", "none"]
OnOverflow = Literal["skip", "retry"]
Search = Literal["auto", "replay", "always", "off"]


@dataclass(frozen=True, kw_only=True)
class ScalerConfig:
    """Every setting of the scaler and of the optimizer step, checked on construction.

    A text is read as a flag's: ``"1024"``, ``"true"``, ``"*.wo, h.3"``.

    Raises:
        ConfigError: names the field, the value and the allowed values.

    Attributes:
        init_scale: Scale of the first step (a factor on the loss, no unit).
        growth_factor: Factor on the scale after growth_interval steps without overflow.
        backoff_factor: Factor on the scale after a step that overflowed.
        growth_interval: Steps in a row without overflow after which the scale grows.
        enabled: Whether the loss is scaled. False: GradScaler only calls optimizer.step().
        min_scale: Lower bound of the scale. None: no bound, as in torch.
        max_scale: Upper bound of the scale. None: the largest of float32, as in torch.
        hysteresis: Overflows in a row before the scale backs off; each one skips its step.
        sharded: Ranks hold different gradients by sharding of your own (DTensors and FSDP are
            detected): they agree on each skip by one all-reduce per step.
        step_mode: When parameters are updated. sync: inside optimizer.step(). overlap: on a CPU on
            a second thread, and each parameter's next use waits for it; on a device as sync.
        offload: Where the optimizer's state rests. none: with the parameters. cpu: in host memory,
            with the float32 copies (masters) of 16-bit parameters; it is copied to the device to be
            stepped there, beside forward and backward.
        offload_budget: With offload: how much of the device's memory its state may use. auto: what
            the run leaves below its own peak, for a moment. A size such as 6GiB: so much of it
            stays there, and the peak is so much higher. 0: a few blocks at a time, in the step.
        master_weights: How float16 and bfloat16 parameters are updated. fp32: through float32
            copies (masters), saved with the optimizer. none: in place, each update rounded
            (bfloat16 only). auto: fp32 for float16, in an fp16 run or with offload for bfloat16,
            too.
        skip_nonfinite: Whether a step with inf or NaN in its gradients is skipped. False: it is
            taken, as by stock in bf16 and fp32; refused in fp16, where such steps are how the scale
            is found.
        skip_norm_above: Skip an optimizer step whose gradient norm (unscaled, before clipping) is
            above this number; '4x': above 4 times the median of the norms of the last 128 steps.
        max_consecutive_skips: How many optimizer steps in a row may be skipped; one more raises.
        on_overflow: What happens to a step whose gradients overflow. skip: it is lost. retry: its
            forwards and backwards run again at lower scales, and the optimizer steps.
        find_overflow: How to find the module in which an overflow began. replay: run the skipped
            step again, then restore parameters, buffers and random state, nothing else. always:
            watch every module in every step (slow). off: name parameters only. auto: replay with
            heal or retry; else watch after six overflows in a row, or after the first with
            telemetry or max_consecutive_skips.
        heal: Run in float32 the smallest module that overflows at every scale; save its name.
        fp32_modules: Modules that run in float32 under autocast: globs on the names of
            model.named_modules(), such as '*.wo' or 'transformer.h.3.mlp', separated by commas in a
            text. A glob without a match is an error.
        telemetry: JSON-lines file with one record per optimizer step, appended by rank 0; with
            {rank} in the path each rank writes its own. accel-scaler report reads it.
        log_values: Whether the Trainer's log and accelerator.log get the scaler's values.
    """

    init_scale: float = setting(2.0**16, SCALE)
    growth_factor: float = setting(2.0, GROWTH)
    backoff_factor: float = setting(0.5, BACKOFF)
    growth_interval: int = setting(2000, COUNT)
    enabled: bool = setting(True, SWITCH)
    min_scale: float | None = setting(None, optional(SCALE))
    max_scale: float | None = setting(None, optional(SCALE))
    hysteresis: int = setting(1, COUNT)
    sharded: bool = setting(False, SWITCH)
    step_mode: StepMode = choice("sync", StepMode)
    offload: Offload = choice("none", Offload)
    offload_budget: int | str = setting("auto", SIZE)
    master_weights: Masters = choice("auto", Masters)
    skip_nonfinite: bool = setting(True, SWITCH)
    skip_norm_above: float | str | None = setting(None, optional(NORM))
    max_consecutive_skips: int | None = setting(None, optional(COUNT))
    on_overflow: OnOverflow = choice("skip", OnOverflow)
    find_overflow: Search = choice("auto", Search)
    heal: bool = setting(False, SWITCH)
    fp32_modules: Sequence[str] = setting((), GLOBS)
    telemetry: os.PathLike[str] | str | None = setting(None, optional(PATH))
    log_values: bool = setting(True, SWITCH)

    def __new__(cls, **fields: Any) -> ScalerConfig:
        for name in fields.keys() - FIELDS.keys():
            checked(name, fields[name])  # says what to write instead
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        low, scale, high = self.min_scale or 0.0, self.init_scale, self.max_scale or MAX_FLOAT32
        if not low <= scale <= high:
            raise ConfigError(
                f"got min_scale={self.min_scale!r}, init_scale={scale!r} and "
                f"max_scale={self.max_scale!r}, expected them in ascending order."
            )
        if self.master_weights == "none" and self.offload == "cpu":
            raise ConfigError(
                "master_weights='none' updates parameters in place, offload='cpu' updates 16-bit "
                "ones through float32 copies (masters); drop one of the two."
            )
        if self.heal and self.find_overflow == "off":
            raise ConfigError("heal=True runs a step again, which find_overflow='off' forbids.")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ScalerConfig:
        """Read ``ACCEL_SCALER_<FIELD>`` variables, by default of this process. Raises
        ``ConfigError`` for an unknown field, or a value that its field does not take."""
        return merge(environment(os.environ if environ is None else environ))[0]

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> ScalerConfig:
        """Read the ``accel_scaler:`` section of an Accelerate config file; without one: defaults.
        Raises as :meth:`from_env`, and for a file that cannot be read."""
        return merge((str(path), read_config(path)[0]))[0]

    def to_env(self, named: Iterable[str] = ()) -> dict[str, str]:
        """The variables from which ``from_env`` makes this config: of fields that differ from their
        defaults, and of those ``named``."""
        values = {name: getattr(self, name) for name in named} | self.changed()
        return {ENV_PREFIX + name.upper(): _text(value) for name, value in values.items()}

    @property
    def budget_bytes(self) -> int | None:
        """``offload_budget`` in bytes; None: ``"auto"``."""
        return size_of(self.offload_budget)

    @property
    def finds_overflow(self) -> Literal["watch", "replay", "always", "off"]:
        """``find_overflow``, with ``"auto"`` resolved."""
        if self.find_overflow != "auto":
            return self.find_overflow
        if self.heal or self.on_overflow == "retry":
            return "replay"
        return "watch"

    @property
    def finds_after(self) -> int:
        """The overflow in a row from which on it is looked for."""
        is_wanted = self.telemetry is not None or self.max_consecutive_skips is not None
        return 1 if is_wanted or self.finds_overflow != "watch" else LOOKS_AFTER

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order: also a mapping for ``attach``."""
        return {n: v for n, spec in FIELDS.items() if (v := getattr(self, n)) != spec.default}


FIELDS: dict[str, dataclasses.Field[Any]] = ScalerConfig.__dataclass_fields__
KINDS: dict[str, Kind] = {name: spec.metadata["kind"] for name, spec in FIELDS.items()}

_, _, _rows = inspect.cleandoc(ScalerConfig.__doc__ or "").partition("Attributes:\n")
ABOUT = {
    name: " ".join(text.split())
    for name, text in re.findall(r"^    (\w+): ((?:.|\n {8})+)", _rows, re.MULTILINE)
}
"""The help of each field, from the docstring."""

Source = tuple[str, Mapping[str, Any]]
"""A name of a source for messages, and its values by field; texts are converted."""


def merge(*sources: Source) -> tuple[ScalerConfig, dict[str, str]]:
    """The config of these sources, of which a later one takes precedence, and the source of each
    field that has one. Every value is checked, used or not; a refusal names its source."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, given in sources:
        for name, value in given.items():
            try:
                values[name], origin[name] = checked(name, value), source
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
    try:
        return ScalerConfig(**values), origin
    except ConfigError as error:  # fields that contradict each other
        where = [f"{name}: {origin[name]}" for name in origin if f"{name}=" in str(error)]
        raise ConfigError(f"{error} ({'; '.join(where)})") from None


def environment(environ: Mapping[str, str]) -> Source:
    """The settings of the ``ACCEL_SCALER_<FIELD>`` variables."""
    texts = {key: environ[key] for key in sorted(environ) if key.startswith(ENV_PREFIX)}
    return "environment", {key[len(ENV_PREFIX) :].lower(): texts[key] for key in texts}


def checked(name: Any, value: Any) -> Any:
    """``value`` as a config holds it: a text is read, a list a tuple, a path a text. Raises
    ``ConfigError`` for a name of no field, or a value that the field does not take."""
    refuse_retired(str(name))
    if name not in FIELDS:
        fields = f"The fields are {', '.join(FIELDS)}."
        raise ConfigError(f"unknown field {shown(name)}. {suggestion(str(name), FIELDS, fields)}")
    kind = KINDS[name]
    if isinstance(value, str):
        value = value.strip()
        with suppress(ValueError):  # what cannot be converted is refused as it is
            value = kind.convert(value)
    refuse_retired(f"{name}={value!r}")
    if not kind.check(value):
        raise ConfigError(f"{name}: got {shown(value)}, expected {kind.allowed}.")
    value = tuple(value) if isinstance(value, list) else value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


RETIRED = {
    "delay_warmup_steps": "step_mode 'delayed' is gone, so drop it",
    "delay_compensation": "step_mode 'delayed' is gone, so drop it",
    "growth_headroom": "drop it, with retry a scale that has grown too much costs no batch",
    "fold_unscale": "drop it, gradients are unscaled in one pass without it",
    "optimizer_threads": "drop it, the optimizer thread takes physical cores / ranks, less one",
    "mode": "write step_mode",
    "underflow_interval": "drop it, the largest gradient is not recorded any more",
    "step_mode='delayed'": "use offload='cpu' where state does not fit, else 'sync'",
    "step_mode='auto'": "use 'sync', or on a CPU with a core to spare 'overlap'",
}
"""Settings, and values of settings, of earlier releases, and what to use instead."""


def refuse_retired(written: str) -> None:
    """Raise ``ConfigError`` for a setting, or a value of one, that was retired."""
    if written in RETIRED:
        raise ConfigError(f"{written} is retired: {RETIRED[written]}.")


def suggestion(written: str, known: Iterable[str], otherwise: str) -> str:
    """A question with the nearest known name, ``otherwise`` if none is near."""
    near = difflib.get_close_matches(written[:80].lower(), known, n=1)
    return f"Did you mean {near[0]}?" if near else otherwise


def help_of(name: str) -> str:
    """The meaning of a field, and the values that it takes."""
    return f"{ABOUT[name]} Takes {KINDS[name].allowed}."


def _text(value: Any) -> str:
    """The text that the field's kind parses to ``value``."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
