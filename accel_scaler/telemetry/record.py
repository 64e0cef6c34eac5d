"""The schema of telemetry: the fields of a record, and the lines of a file.

A file is JSON lines of these kinds, in order: ``start`` (settings and versions), ``names`` (of the
parameters with norms; again when they change), ``window``, ``end``; a ``noted`` line
(numbers that belong to no window, or a mistake) may stand anywhere. A resumed run appends another
session, from its own ``start`` on. A reader ignores unknown kinds and keys; ``FORMAT`` rises with a
change that older readers would misread.

A ``window`` line has the fields of :class:`Record` under their names, ``index`` as ``step``.
Numbers that are not finite are the texts ``"inf"``, ``"-inf"`` and ``"nan"``, since JSON has none.
Times are seconds since the ``start`` line, or microseconds where the name ends in ``_us``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

FORMAT = 2
"""Version of the file format; no other one is read."""


@dataclass(frozen=True, slots=True)
class Record:
    """One accumulation window as it closed, in Python numbers."""

    index: int
    """The number of the window, from 0."""
    scale: float
    """The scale that produced its gradients."""
    next_scale: float
    """The scale of the window after it."""
    skipped: bool
    """The window overflowed or was a spike, so at least one optimizer was not stepped."""
    grad_norm: float | None
    """Total gradient norm, unscaled, before clipping; None where no norm was taken. With
    ``sharded=True`` it is that of this rank's part."""
    overflowed: tuple[str, ...] = ()
    """Names of the first few tensors with non-finite gradients."""
    found_inf: bool = False
    """Some gradient was not finite, on this rank or, where they must agree, another."""
    spike: bool = False
    """A gradient norm was above ``skip_norm_above``."""
    growth_tracker: int = 0
    """Windows without overflow since the last change of scale, this one included."""
    max_norm: float | None = None
    """The limit of the clip by norm; None without a clip."""
    clip_coefficient: float | None = None
    """The factor of the clip, at most 1; None without a clip."""
    lr: tuple[float | None, ...] = ()
    """Learning rate of each group of the window's optimizers; None: the rate is on a device."""
    time: float = 0.0
    """When the window ended: seconds since the start of the recording."""
    loss: float | None = None
    """The unscaled loss on this rank: the sum over the window of the losses, each divided by the
    accumulation steps, so the mean over micro-batches. None where a loss is no single real number.
    From a device only with ``telemetry``, and known with the next window."""
    loss_nonfinite: int = 0
    """How many losses were inf or NaN, counted after an overflow only; over all ranks where they
    overflowed together."""
    names: tuple[str, ...] = ()
    """Names of the parameters that have ``norms``; in the file, a line of their own."""
    norms: tuple[float, ...] | None = None
    """Unscaled norm of each parameter's gradient, before clipping; NaN without a gradient. Only
    in the file, with six digits."""
    first: dict[str, Any] | None = None
    """The beginning of the overflow, if it was found; see ``find_overflow``."""
    healed: tuple[str, ...] = ()
    """Modules that ``heal`` has put in float32 from the next window on."""
    retries: int = 0
    """How often the window ran again (``on_overflow="retry"``, ``heal``). Unless it was ``skipped``
    the last run, at ``scale``, had finite gradients."""
    first_scale: float | None = None
    """The scale of the first run; None for a window that ran once."""
    retry_us: int | None = None
    """Host time of the runs after the first, in microseconds."""
    optimizer_us: int | None = None
    """Host time of the update, on whichever thread it ran, in microseconds."""
    waited_us: int | None = None
    """Microseconds for which the training thread waited for the update."""

    @property
    def has_bad_loss(self) -> bool:
        """Whether a loss was inf or NaN, as far as the losses were looked at."""
        return self.loss_nonfinite > 0 or (self.loss is not None and not math.isfinite(self.loss))


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a session: what runs, on what, with which settings."""

    format: int = FORMAT
    facts: dict[str, Any] = field(default_factory=dict)
    """All else that the line says."""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    """The settings other than their defaults, ``telemetry`` apart."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a session."""

    time: float = 0.0
    error: str | None = None
    """The exception that ended the run early."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Numbers of the model, of an evaluation, or of the process at its end; or a mistake."""

    values: dict[str, float]
    mistake: str = ""
    """A mistake of the script in the words of the log."""


class BrokenLineError(Exception):
    """A line that cannot be used; the message says why."""


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

ALWAYS = ("growth_tracker", "found_inf", "max_norm", "clip_coefficient", "lr", "time")
"""Fields that a window line has even at their default, where it leaves the others out."""
DEFAULTS = {each.name: each.default for each in fields(Record)}
del DEFAULTS["names"], DEFAULTS["norms"]
TEXTS = ("overflowed", "healed")
"""Fields that hold texts."""


def _finite(value: Any) -> Any:
    """``value``, with texts for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(map(_finite, value)) if isinstance(value, tuple) else value


def encode_window(record: Record) -> str:
    line: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = getattr(record, name)
        if name in ALWAYS or value != default:
            line["step" if name == "index" else name] = _finite(value)
    text = encode_line("window", **line)
    if record.norms is None:
        return text
    # json's own encoder takes four times as long for thousands of numbers.
    norms = ",".join(map("{:.6g}".format, record.norms))
    norms = re.sub("-?(inf|nan)", r'"\g<0>"', norms) if "n" in norms else norms
    return f'{text[:-1]},"norms":[{norms}]}}'


def encode_noted(step: int, values: Mapping[str, float], mistake: str = "") -> str:
    """``step``: the index of the last window before the line."""
    more = {"mistake": mistake} if mistake else {}
    numbers = {k: _finite(v) for k, v in values.items()}
    return encode_line("noted", step=step, values=numbers, **more)


def encode_line(kind: str, **values: Any) -> str:
    """A line of any kind: the kind, then the values."""
    return _to_json({"kind": kind, **values})


def _number(value: Any) -> Any:
    """What :func:`_finite` was given."""
    if isinstance(value, list):
        return tuple(map(_number, value))
    return float(value) if isinstance(value, str) else value


def _read_window(line: dict[str, Any]) -> Record:
    values = {name: line[name] for name in DEFAULTS if name in line}
    values = {k: tuple(v) if k in TEXTS else _number(v) for k, v in values.items() if k != "first"}
    if (first := line.get("first")) is not None:
        first |= {each: _number(first[each]) for each in ("input", "output")}
    return Record(index=line["step"], first=first, **values)


def _read_start(line: dict[str, Any]) -> Start:
    facts = dict(line)
    if (version := facts.pop("format")) != FORMAT:
        return Start(version)  # the other keys may mean something else there
    del facts["kind"]
    settings, changed = facts.pop("settings", {}), tuple(facts.pop("changed", ()))
    return Start(version, facts, settings, changed)


def decode(line: bytes) -> Start | Record | Noted | End | None:
    """One line of a file, without norms of parameters; None for another kind. Raises
    ``BrokenLineError`` for a line that is not JSON or does not follow the format."""
    try:
        value = json.loads(line.decode())
    except (RecursionError, ValueError) as error:  # also of bytes that are no text
        raise BrokenLineError(f"text that is not JSON ({str(error)[:80]})") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise BrokenLineError(f"a {type(value).__name__} without kind")
    try:
        match value["kind"]:
            case "window":
                return _read_window(value)
            case "start":
                return _read_start(value)
            case "noted":
                noted = {name: _number(number) for name, number in value["values"].items()}
                return Noted(noted, value.get("mistake", ""))
            case "end":
                return End(value.get("time", 0.0), value.get("error"))
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenLineError(f"a {value['kind']} line: {str(error)[:120]}") from None
    return None
