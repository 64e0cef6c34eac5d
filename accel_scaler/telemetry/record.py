"""The schema of telemetry: what a record holds, and the lines of a file.

A file is JSON lines, one a window. The kinds of line, in order: ``start`` (settings and versions),
``names`` (of parameters; again when they change), ``window``, ``end``. Each start begins a new
session in the same file, so a resumed run is appended to the one before. A reader ignores kinds
and keys that it does not know; a change that older readers would misread raises ``FORMAT``.

A ``window`` line has the fields of :class:`Record` under their names, ``index`` as ``step``.
Numbers that are not finite are the texts ``"inf"``, ``"-inf"`` and ``"nan"``, since JSON has none.
Times are seconds since the ``start`` line, those named ``_us`` microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timezone
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..console import plain

Amount = Annotated[float, "finite, 0 or more"]

FORMAT = 1
"""Version of the file format."""


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
    """The window overflowed, so at least one optimizer was not stepped."""
    grad_norm: float | None
    """Total gradient norm, unscaled, before clipping; None where no norm was taken."""
    overflowed: tuple[str, ...] = ()
    """Names of the first few tensors with non-finite gradients. Not in the file, which has
    ``nonfinite``."""
    found_inf: bool = False
    """Some gradient was not finite, on this rank or, where they must agree, another."""
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
    Only with ``telemetry``; on a device, where no norm was read, known with the next window."""
    loss_nonfinite: int = 0
    """How many of its losses were inf or NaN; counted after an overflow only."""
    names: tuple[str, ...] = ()
    """Parameter names, in the order of ``norms``. The file has them in a line of their own."""
    norms: tuple[float, ...] | None = None
    """Unscaled norm of each parameter's gradient, before clipping; NaN for a parameter without.
    Only with ``telemetry``; kept for the last windows. Six digits in the file."""
    nonfinite: tuple[tuple[int, int], ...] = ()
    """``(index in names, non-finite elements)`` of every parameter that overflowed. Only with
    ``telemetry``; kept for the last windows."""
    underflow: tuple[tuple[int, float, float], ...] = ()
    """``(index in names, share of zeros, share of subnormals)`` of each scaled gradient as float16
    numbers. Only with ``telemetry``, every ``underflow_interval`` windows; of the last ones."""
    largest_gradient: Amount | None = None
    """The largest magnitude among these elements, scaled, before clipping; float16 ends at 65504.
    On this rank, after micro-batches were added up and ranks averaged, so it may be above. None
    where it was not measured, or cannot be computed after a clip of single elements."""
    zero_share: Amount | None = None
    """The share of zeros among all these elements."""
    first: dict[str, Any] | None = None
    """Where the overflow began. Only with ``find_overflow``."""
    healed: tuple[str, ...] = ()
    """Modules that run in float32 from the next window on, found by ``heal``."""
    optimizer_us: int | None = None
    """Microseconds that its update took, wherever it ran. Host time."""
    waited_us: int | None = None
    """Microseconds that the training thread waited for it."""
    preview_error: float | None = None
    """Norm of the previews' error divided by the norm of the late updates, on this rank. None where
    there was no preview or nothing moved. Only with ``telemetry``."""

    @property
    def has_bad_loss(self) -> bool:
        """Whether one of its losses was inf or NaN, as far as they were looked at."""
        return self.loss_nonfinite > 0 or (self.loss is not None and not math.isfinite(self.loss))


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a session: what runs, on what, with which settings."""

    format: int = FORMAT
    facts: dict[str, Any] = field(default_factory=dict)
    """``package``, ``rank``, ``ranks``, ``device`` (its type), ``device_name``, ``precision``,
    ``python``, ``torch``, ``accelerate``, ``transformers`` (where it was imported) and
    ``unix_time``, as far as they are known."""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    """The settings other than their defaults, ``telemetry`` apart."""


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters that windows refer to by index."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    """The position of each in the model's own order; those of no known model come last."""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a session."""

    time: Amount = 0.0
    error: str | None = None
    """What ended the run early."""


class BrokenLineError(Exception):
    """This line cannot be used; the message says why."""


class CutLineError(BrokenLineError):
    """The line is not JSON: cut off in the middle, or something else altogether."""


# Writing.

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

ALWAYS = ("growth_tracker", "found_inf", "max_norm", "clip_coefficient", "lr", "time")
"""Keys of every window line, besides the fields without a default; others are left out where they
have their default."""
DEFAULTS = {
    each.name: MISSING if each.name in ALWAYS else each.default
    for each in fields(Record)
    if each.name not in ("overflowed", "names", "norms")
}


def _finite(value: Any) -> Any:
    """``value``, with texts for the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return list(map(_finite, value))
    return value


def encode_window(record: Record) -> str:
    """The line of a window."""
    line: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = getattr(record, name)
        if default is MISSING or value != default:
            line["step" if name == "index" else name] = _finite(value)
    text = encode_line("window", **line)
    if record.norms is None:
        return text
    # json's own encoder takes four times as long for thousands of numbers.
    norms = ",".join(f"{v:.6g}" if math.isfinite(v) else f'"{v}"' for v in record.norms)
    return f'{text[:-1]},"norms":[{norms}]}}'


def encode_line(kind: str, **values: Any) -> str:
    """Any line: its kind, then these values."""
    return _to_json({"kind": kind, **values})


# Reading: a ``ValueError``, ``TypeError`` or the like means that the line is broken.


def _text(value: object) -> str:
    """One line without control characters."""
    text = str(value)
    return text if text.isprintable() else plain(text).replace("\n", "\ufffd")


def _converted(value: Any, kind: Any) -> Any:
    """``value``, from JSON, as the type of a field."""
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


def _read(line: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line by their types; keys that are not in ``kinds`` are not known."""
    return {key: _converted(line[key], kind) for key, kind in kinds.items() if key in line}


WINDOW: dict[str, Any] = get_type_hints(Record, include_extras=True)
WINDOW["step"] = WINDOW.pop("index")
del WINDOW["names"], WINDOW["overflowed"], WINDOW["first"]
FIRST = dict.fromkeys(("where", "module", "class", "text"), str)
FIRST_NUMBERS: dict[str, Any] = {"micro_batch": int | None}
FIRST_NUMBERS |= dict.fromkeys(("input", "output"), tuple[float, float] | None)
FACTS: dict[str, Any] = {
    **dict.fromkeys(("package", "device", "device_name", "precision"), str),
    **dict.fromkeys(("python", "torch", "accelerate", "transformers"), str),
    **{"rank": int, "ranks": int, "unix_time": float},
}


def _read_first(found: Mapping[str, Any]) -> dict[str, Any]:
    """As the overflow finder wrote it, with every key."""
    texts = {key: _text(found.get(key) or "") for key in FIRST}
    return texts | dict.fromkeys(FIRST_NUMBERS) | _read(found, FIRST_NUMBERS)


def _read_window(line: dict[str, Any], names: Names | None) -> Record:
    if isinstance(line.get("norms"), str):  # base64, as earlier versions wrote them
        del line["norms"]
    values = _read(line, WINDOW)
    if line.get("first") is not None:
        values["first"] = _read_first(line["first"])
    record = Record(index=values.pop("step"), names=names.names if names else (), **values)
    count = len(record.names)
    if names is None:
        return record
    if record.norms is not None and len(record.norms) != count:
        raise ValueError(f"{len(record.norms)} norms of {count} names")
    for index, *_ in (*record.nonfinite, *record.underflow):
        if index >= count:
            raise ValueError(f"parameter {index} of {count}")
    return record


def _read_start(line: dict[str, Any]) -> Start:
    version = _converted(line["format"], int)
    if version > FORMAT:
        return Start(version)  # its other keys are not known
    facts = _read({key: value for key, value in line.items() if value is not None}, FACTS)
    datetime.fromtimestamp(facts.get("unix_time", 0.0), timezone.utc)  # else it is no time
    settings = {_text(key): _setting(each) for key, each in line.get("settings", {}).items()}
    return Start(version, facts, settings, _converted(line.get("changed", []), tuple[str, ...]))


def _setting(value: Any) -> Any:
    """A plain value as it is, the text of anything else."""
    is_number = isinstance(value, (int, float)) and not abs(value) > 2**53
    return value if value is None or is_number else _text(value)


def _read_kind(line: dict[str, Any], names: Names | None) -> Start | Names | Record | End | None:
    match line["kind"]:
        case "window":
            return _read_window(line, names)
        case "start":
            return _read_start(line)
        case "names":
            found = Names(**_read(line, get_type_hints(Names)))
            if len(found.names) != len(found.places):
                raise ValueError(f"{len(found.names)} names and {len(found.places)} places")
            return found
        case "end":
            return End(**_read(line, get_type_hints(End, include_extras=True)))
    return None


def decode(line: bytes, names: Names | None = None) -> Start | Names | Record | End | None:
    """One line of a file; None: of a kind that this version does not know.

    Args:
        names: the last names line, which windows refer to; None: that line was lost, so that
            the parameters of ``norms``, ``nonfinite`` and ``underflow`` are not known.

    Raises:
        CutLineError: the line is not JSON.
        BrokenLineError: the line does not follow the format.
    """
    try:
        value = json.loads(line.decode())
    except RecursionError:
        raise CutLineError("JSON nested too deeply") from None
    except ValueError as error:  # also of bytes that are no text
        raise CutLineError(f"text that is not JSON ({_text(str(error)[:80])})") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise BrokenLineError(f"a {type(value).__name__} without kind")
    try:
        return _read_kind(value, names)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BrokenLineError(
            f"a {_text(value['kind'][:20])} line: {_text(str(error)[:120])}"
        ) from None
