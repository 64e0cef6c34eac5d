"""The schema of telemetry: what a record holds, and the lines of a file.

A file is JSON lines, one a window. The kinds of line, in order: ``start`` (settings and versions),
``names`` (of parameters in their model's order; again when they change), ``window``, ``end``; and
``noted``, anywhere among them: what belongs to no window. Each start begins a new session in
the same file, so a resumed run is appended to the one before. A reader ignores kinds and keys that
it does not know; a change that older readers would misread raises ``FORMAT``.

A ``window`` line has the fields of :class:`Record` under their names, ``index`` as ``step``.
Numbers that are not finite are the texts ``"inf"``, ``"-inf"`` and ``"nan"``, since JSON has none.
Times are seconds since the ``start`` line, those named ``_us`` microseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..console import plain

Amount = Annotated[float, "finite, 0 or more"]
Names = tuple[str, ...]
"""Of the parameters whose norms a window has."""

FORMAT = 2
"""Version of the file format; no other one is read."""
FIRST_BYTES = b'{"kind":"start"'
"""The first bytes of a file, also of one that was cut off in its first line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One accumulation window, as it stood when it closed. Scalars are Python numbers."""

    index: int
    """Number of the window, from 0."""
    scale: Amount
    """The scale that produced its gradients."""
    next_scale: Amount
    """The scale of the window after it."""
    skipped: bool
    """The window overflowed or was a spike, so at least one optimizer was not stepped."""
    grad_norm: float | None
    """Total gradient norm, unscaled, before clipping; None where no norm was taken."""
    overflowed: tuple[str, ...] = ()
    """Names of the first few tensors with non-finite gradients."""
    found_inf: bool = False
    """Some gradient was not finite, on this rank or, where they must agree, another."""
    spike: bool = False
    """A gradient norm was above ``skip_norm_above``."""
    growth_tracker: int = 0
    """Windows without overflow since the last change of scale, after this one."""
    max_norm: float | None = None
    """What the total norm was clipped to; None where it was not."""
    clip_coefficient: float | None = None
    """What clipping multiplied the gradients by, at most 1; None where there was no clipping."""
    lr: tuple[float | None, ...] = ()
    """Learning rate of each group of the window's optimizers; None: it is on a device."""
    time: Amount = 0.0
    """When the window ended: seconds since the start of the recording."""
    loss: float | None = None
    """The unscaled loss on this rank: the sum of all in the window, each divided by the
    accumulation steps, so the mean over micro-batches. None where a loss is no single real number.
    On a device only with ``telemetry``; where no norm was read, known with the next window."""
    loss_nonfinite: int = 0
    """How many of its losses were inf or NaN; counted after an overflow only. Where ranks have
    overflowed together, of the losses on all of them."""
    names: Names = ()
    """Parameter names, in the order of ``norms``. The file has them in a line of their own."""
    norms: tuple[float, ...] | None = None
    """Unscaled norm of each parameter's gradient, before clipping; NaN for a parameter without.
    Only with ``telemetry``; kept for the last windows. Six digits in the file."""
    largest_gradient: Amount | None = None
    """The largest magnitude in any gradient on this rank, scaled, before clipping. It may be above
    65504, float16's largest number, as micro-batches are added up and ranks averaged in float32.
    Only with ``telemetry``, once in ``underflow_interval`` windows; None after a clip by value."""
    first: dict[str, Any] | None = None
    """Where the overflow began, if it was found; see ``find_overflow``."""
    healed: tuple[str, ...] = ()
    """Modules that run in float32 from the next window on, found by ``heal``."""
    retries: int = 0
    """How often it ran again, with ``on_overflow="retry"`` or ``heal``. Unless it is ``skipped``,
    its gradients were finite after the last run, at ``scale``."""
    first_scale: Amount | None = None
    """The scale at which it first overflowed; None: it did not, or was not run again."""
    retry_us: int | None = None
    """Microseconds that these runs took. Host time."""
    optimizer_us: int | None = None
    """Microseconds that its update took, wherever it ran. Host time."""
    waited_us: int | None = None
    """Microseconds that the training thread waited for it."""

    @property
    def has_bad_loss(self) -> bool:
        """Whether one of its losses was inf or NaN, as far as they were looked at."""
        return self.loss_nonfinite > 0 or (self.loss is not None and not math.isfinite(self.loss))


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a session: what runs, on what, with which settings."""

    format: int = FORMAT
    facts: dict[str, Any] = field(default_factory=dict)
    """Those of ``FACTS`` that are known."""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    """The settings other than their defaults, ``telemetry`` apart."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a session."""

    time: Amount = 0.0
    error: str | None = None
    """What ended the run early."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Numbers of the model, of an evaluation, or of the process at its end; or a mistake."""

    step: int
    """The last window before them."""
    values: dict[str, float]
    mistake: str = ""
    """Of the script, as the log has named it."""


class BrokenLineError(Exception):
    """This line cannot be used; the message says why."""


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

ALWAYS = ("growth_tracker", "found_inf", "max_norm", "clip_coefficient", "lr", "time")
"""Keys of every window line, besides the fields without a default; others are left out where they
have their default."""
DEFAULTS = {each.name: each.default for each in fields(Record)}
del DEFAULTS["names"], DEFAULTS["norms"]


def _finite(value: Any) -> Any:
    """``value``, with texts for the numbers that JSON does not have."""
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
    more = {"mistake": mistake} if mistake else {}
    numbers = {k: _finite(v) for k, v in values.items()}
    return encode_line("noted", step=step, values=numbers, **more)


def encode_line(kind: str, **values: Any) -> str:
    """Any line: its kind, then these values."""
    return _to_json({"kind": kind, **values})


# Reading: a ``ValueError``, ``TypeError`` or the like means that the line is broken.

FACTS: dict[str, Any] = {
    **dict.fromkeys(("package", "device", "device_name", "precision", "set_in"), str),
    **dict.fromkeys(("python", "torch", "accelerate", "transformers", "command"), str),
    **{"rank": int, "ranks": int, "unix_time": float},
}
FIRST: dict[str, Any] = {
    **dict.fromkeys(("where", "module", "class", "text"), str),
    "micro_batch": int,
    **dict.fromkeys(("input", "output"), tuple[float, float]),
}
WINDOW: dict[str, Any] = get_type_hints(Record, include_extras=True) | {"first": FIRST, "step": int}
del WINDOW["index"], WINDOW["names"]
END: dict[str, Any] = get_type_hints(End, include_extras=True)


def _text(value: object) -> str:
    """One line without control characters."""
    return plain(str(value)).replace("\n", "\ufffd")


def _converted(value: Any, kind: Any) -> Any:
    """``value``, from JSON, as the type of a field."""
    if isinstance(kind, dict):
        return _read(value, kind)
    parts = get_args(kind)
    if NoneType in parts:
        return None if value is None else _converted(value, parts[0])
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError("expected a list")
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_converted(v, k) for v, k in zip(value, kinds, strict=True))
    if kind is int and not (type(value) is int and 0 <= value <= 2**53):
        raise ValueError("expected an integer from 0")
    if kind is Amount and not 0.0 <= float(value) < math.inf:
        raise ValueError(f"expected a number >= 0, got {value}")
    return _text(value) if kind is str else float(value) if kind is Amount else kind(value)


def _read(line: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """The values of an object by their types; those of null are left out."""
    known = {key: kind for key, kind in kinds.items() if line.get(key) is not None}
    return {key: _converted(line[key], kind) for key, kind in known.items()}


def _read_window(line: dict[str, Any], names: Names) -> Record:
    values = {"grad_norm": None} | _read(line, WINDOW)
    if "first" in values:  # with every key, as the overflow finder wrote it
        values["first"] = {k: "" if t is str else None for k, t in FIRST.items()} | values["first"]
    if names and "norms" in values and len(values["norms"]) != len(names):
        raise ValueError(f"{len(values['norms'])} norms of {len(names)} names")
    return Record(index=values.pop("step"), names=names, **values)


def _read_start(line: dict[str, Any]) -> Start:
    if (version := _converted(line["format"], int)) != FORMAT:
        return Start(version)  # its other keys may mean something else
    facts, changed = _read(line, FACTS), _converted(line.get("changed", []), tuple[str, ...])
    datetime.fromtimestamp(facts.get("unix_time", 0.0), timezone.utc)  # else it is no time
    settings = {}  # numbers, lists and none as they are, the texts of others
    for key, value in line.get("settings", {}).items():
        is_plain = value is None or (isinstance(value, (int, float)) and not abs(value) > 2**53)
        value = list(map(_text, value)) if isinstance(value, list) else value
        settings[_text(key)] = value if is_plain or isinstance(value, list) else _text(value)
    return Start(version, facts, settings, changed)


def decode(line: bytes, names: Names = ()) -> Start | Names | Record | Noted | End | None:
    """One line of a file; None: of a kind that this version does not know. ``names``: those of the
    last names line; (): that line was lost. Raises ``BrokenLineError`` for a line that is not JSON,
    or does not follow the format."""
    try:
        value = json.loads(line.decode())
    except (RecursionError, ValueError) as error:  # also of bytes that are no text
        raise BrokenLineError(f"text that is not JSON ({_text(str(error)[:80])})") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise BrokenLineError(f"a {type(value).__name__} without kind")
    try:
        match value["kind"]:
            case "window":
                return _read_window(value, names)
            case "start":
                return _read_start(value)
            case "names":
                found: Names = _converted(value["names"], Names)
                return found
            case "noted":
                noted = {_text(name): float(number) for name, number in value["values"].items()}
                mistake = _text(value.get("mistake", ""))
                return Noted(_converted(value["step"], int), noted, mistake)
            case "end":
                return End(**_read(value, END))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = _text(value["kind"][:20])
        raise BrokenLineError(f"a {what} line: {_text(str(error)[:120])}") from None
    return None
