"""The schema of telemetry: what a record holds, and each field's way into a line and out of it.

JSON lines, one a window. The kinds of line, in order: ``start`` (settings and versions), ``names``
(of parameters; again when they change), ``window``, ``end``. Each start begins a new run in the
same file, so a resumed run goes on behind the one before. A reader ignores kinds and keys that it
does not know; a change that older readers would misread raises ``FORMAT``.

In a ``window`` line ``norms`` is the base64 text of little-endian float32, one for each name:
``numpy.frombuffer(base64.b64decode(line["norms"]), "<f4")``; to write thousands of decimal numbers
a window would cost more than the step. Numbers that are not finite are the texts ``"inf"``,
``"-inf"`` and ``"nan"``, since JSON has none. Times are seconds since the ``start`` line, those
named ``_us`` microseconds.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from ..config import ScalerConfig
from ..console import plain

FORMAT = 1
"""Version of the file format."""


@dataclass(frozen=True, slots=True)
class Record:
    """One accumulation window, as it stood when it closed. Scalars are Python numbers."""

    index: int
    """Number of the window, from 0."""
    scale: float
    """The scale that produced its gradients."""
    next_scale: float
    """The scale of the window after it."""
    skipped: bool
    """An optimizer of this window was not stepped, because its gradients overflowed."""
    grad_norm: float | None
    """Total gradient norm, unscaled, before clipping; None where no norm was taken."""
    overflowed: tuple[str, ...] = ()
    """Names of tensors seen with non-finite gradients (the search stops at the first few). Not in
    the file, which has ``nonfinite``."""
    found_inf: bool = False
    """Some gradient was not finite, on this rank or, where they must agree, another."""
    growth_tracker: int = 0
    """Windows without overflow since the last change of scale, after this one."""
    max_norm: float | None = None
    """What the total norm was clipped to; None where it was not."""
    clip_coefficient: float | None = None
    """What clipping multiplied the gradients by, at most 1; None where there was no clipping."""
    lr: tuple[float | None, ...] = ()
    """Learning rate of every group of the optimizers that ended in this window, in order."""
    loss_nonfinite: int = 0
    """How many of its losses were inf or NaN; looked at after an overflow only."""
    names: tuple[str, ...] = ()
    """What ``norms``, ``nonfinite`` and ``underflow`` count: parameter names, in their order."""
    norms: bytes | None = None
    """Unscaled norm of each parameter's gradient, before clipping: float32, the machine's order
    of bytes. Only with ``telemetry``; kept for the last windows."""
    nonfinite: tuple[tuple[int, int], ...] = ()
    """``(index in names, non-finite elements)`` of every offender. Only with ``telemetry``; kept
    for the last windows."""
    underflow: tuple[tuple[int, float, float], ...] = ()
    """``(index in names, share of zeros, share of subnormals)`` of each scaled gradient, as float16
    numbers: of float16 gradients, and of the float32 ones of fp16 training. Only with
    ``telemetry``, once every ``underflow_interval`` windows; kept for the last windows."""
    first: dict[str, Any] | None = None
    """Where the overflow began. Only with ``find_overflow``."""
    time: float = 0.0
    """When it ended: seconds since the start of the recording."""
    optimizer_s: float | None = None
    """How long its update took, wherever it ran. Host time."""
    waited_s: float | None = None
    """How long the training thread waited for it."""
    delay_compensation: tuple[str, ...] = ()
    """What the model was shown of each update of this window that came a step late: ``"preview"``
    or ``"none"``. Only with ``step_mode="delayed"``."""
    preview_error: float | None = None
    """The norm of what it was off by against the norm of these updates, on this rank: 1 as if
    nothing was shown. None where nothing was, or nothing moved. Only with ``telemetry``."""
    healed: tuple[str, ...] = ()
    """Modules that run in float32 from the next window on, found by ``heal``."""
    largest_gradient: float | None = None
    """The largest magnitude of an element of the gradients that ``underflow`` counts, scaled,
    before clipping; float16 ends at 65504. Of parameters alone: gradients of activations may be
    larger. On this rank, after micro-batches were added up and ranks averaged; above 65504 where
    float32 added them up. None where it was not measured, and where clips left no way to tell
    (of single elements; of parameters that overlap)."""
    zero_share: float | None = None
    """The share of zeros among all these elements (sparse gradients left out)."""
    loss: float | None = None
    """The loss whose gradient was taken: the sum of the losses of the window, each divided by
    ``gradient_accumulation_steps`` if Accelerate does that. So it is the mean over micro-batches in
    a loop, also where the end of the data cut the window short, and what a Trainer logs for one
    step; of several losses in one window (a GAN's) the sum. Before scaling, on this rank alone.
    None where one is no single real number. Only with ``telemetry``; on a device, where no
    norm was read in the check, once the next window is on record."""

    @property
    def has_bad_loss(self) -> bool:
        """One of its losses was inf or NaN, as far as anybody looked."""
        return self.loss_nonfinite > 0 or (self.loss is not None and not math.isfinite(self.loss))

    @property
    def hidden_s(self) -> float | None:
        """How long its update ran beside the training thread's own work."""
        return None if self.optimizer_s is None else self.optimizer_s - (self.waited_s or 0.0)


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a run: what runs, on what, with which settings."""

    format: int = FORMAT
    facts: dict[str, Any] = field(default_factory=dict)
    """``package``, ``rank``, ``ranks``, ``device`` (its type), ``device_name``, ``precision``,
    ``python``, ``torch``, ``accelerate``, ``transformers`` (where it was imported) and
    ``unix_time``, as far as they are there."""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    """Which of them were other than their defaults, ``telemetry`` apart."""


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters that windows speak of by number."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    """Where each stands in the model's own order; those of no known model come last."""
    elements: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a run."""

    time: float = 0.0
    windows: int = 0
    skips: int = 0
    error: str | None = None
    """What ended the run early."""
    lost: int = 0
    """Windows that could not be written."""


class BrokenLineError(Exception):
    """This line cannot be used; the message says why."""


class CutLineError(BrokenLineError):
    """It is not JSON: cut off in the middle, or something else altogether."""


# Values, as they are read: a ``ValueError`` or ``TypeError`` says that the line is broken.


def _text(value: object) -> str:
    """One line, nothing in it that steers a terminal."""
    text = str(value)
    return text if text.isprintable() else plain(text).replace("\n", "\ufffd")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 2**53:
        raise ValueError("expected an integer from 0")
    return value


def _amount(value: Any) -> float:
    if not 0.0 <= (amount := float(value)) < math.inf:
        raise ValueError(f"expected a number >= 0, got {amount}")
    return amount


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _moment(value: Any) -> float:
    return datetime.fromtimestamp(value, timezone.utc).timestamp()


def _setting(value: Any) -> Any:
    """A plain value as it is, of anything else its text."""
    value = list(value) if isinstance(value, tuple) else value  # as JSON has it
    number = isinstance(value, (int, float)) and not abs(value) > 2**53
    return value if value is None or number else _text(value)


def _seconds(value: Any) -> float:
    return _count(value) / 1e6


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``read``, or None for null."""
    return lambda value: None if value is None else read(value)


def _tuples(*reads: Callable[[Any], Any]) -> Callable[[Any], tuple[tuple[Any, ...], ...]]:
    """A list of lists with a value for each of ``reads``."""
    return lambda value: tuple(
        tuple(read(each) for read, each in zip(reads, entry, strict=True)) for entry in value
    )


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError("expected a list of texts")
    return tuple(map(_text, value))


def _pair(value: Any) -> tuple[float, float]:
    low, high = value
    return float(low), float(high)


def _first(value: Any) -> dict[str, Any]:
    """As the overflow finder wrote it; texts are there in any case."""
    found: dict[str, Any] = {
        key: _text(value.get(key) or "") for key in ("where", "module", "class", "text")
    }
    found["micro_batch"] = _maybe(_count)(value.get("micro_batch"))
    return found | {key: _maybe(_pair)(value.get(key)) for key in ("input", "output")}


def _norms(value: str) -> bytes:
    return _swapped(base64.b64decode(value, validate=True))


# And as they are written.


def _finite_or_text(value: float | None) -> float | str | None:
    """``value``, or its name where JSON has no number for it."""
    return value if value is None or math.isfinite(value) else str(value)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _swapped(floats: bytes) -> bytes:
    """Between little-endian and the machine's order."""
    if sys.byteorder == "little":
        return floats
    values = array("f", floats)
    values.byteswap()
    return values.tobytes()


# The fields of a window, both ways.

ALWAYS = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a window line, and what of a ``Record`` it is."""

    key: str
    attribute: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    absent: object = ALWAYS
    """The value for which the key is left out."""


FIELDS = (
    Field("step", "index", _count),
    Field("time", "time", _amount, lambda time: round(time, 6)),
    Field("scale", "scale", _amount),
    Field("next_scale", "next_scale", _amount),
    Field("growth_tracker", "growth_tracker", _count),
    Field("found_inf", "found_inf", bool),
    Field("skipped", "skipped", bool),
    Field("grad_norm", "grad_norm", _number, _finite_or_text),
    Field("max_norm", "max_norm", _number, _finite_or_text),
    Field("clip_coefficient", "clip_coefficient", _number, _finite_or_text),
    Field(
        "lr",
        "lr",
        lambda rates: tuple(map(_number, rates)),
        lambda rates: list(map(_finite_or_text, rates)),
    ),
    Field("nonfinite", "nonfinite", _tuples(_count, _count), absent=()),
    Field("loss_nonfinite", "loss_nonfinite", _count, absent=0),
    Field("first", "first", _maybe(_first), absent=None),
    Field(
        "underflow",
        "underflow",
        _tuples(_count, float, float),
        lambda shares: [(i, round(zero, 6), round(low, 6)) for i, zero, low in shares],
        absent=(),
    ),
    Field("optimizer_us", "optimizer_s", _seconds, _microseconds, absent=None),
    Field("waited_us", "waited_s", _seconds, _microseconds, absent=None),
    Field("hidden_us", "hidden_s", _seconds, _microseconds, absent=None),
    Field("delay_compensation", "delay_compensation", _texts, list, absent=()),
    Field("preview_error", "preview_error", _number, _finite_or_text, absent=None),
    Field("healed", "healed", _texts, list, absent=()),
    Field("largest_gradient", "largest_gradient", _maybe(_amount), absent=None),
    Field(
        "zero_share",
        "zero_share",
        _maybe(_amount),
        lambda share: round(share, 6),
        absent=None,
    ),
    Field("loss", "loss", _number, _finite_or_text, absent=None),
)
"""In the order of the line; ``norms`` come last."""

READ = {each.key: (each.attribute, each.read) for each in FIELDS if each.attribute != "hidden_s"}
READ["norms"] = ("norms", _norms)

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_window(record: Record) -> str:
    """The line of a window."""
    line: dict[str, Any] = {"kind": "window"}
    for each in FIELDS:
        value = getattr(record, each.attribute)
        if each.absent is ALWAYS or value != each.absent:
            line[each.key] = each.write(value)
    text = _to_json(line)
    if record.norms is None:
        return text
    # base64 needs no escapes: json would look for them in every letter.
    norms = base64.b64encode(_swapped(record.norms)).decode("ascii")
    return f'{text[:-1]},"norms":"{norms}"}}'


def _decode_window(line: dict[str, Any], names: Names | None) -> Record:
    values = {}
    for key, value in line.items():
        if key in READ:
            attribute, read = READ[key]
            values[attribute] = read(value)
    record = Record(**values, names=names.names if names else ())
    count = len(record.names)
    if names is None:
        return record
    if record.norms is not None and len(record.norms) != 4 * count:
        raise ValueError(f"norms that are not those of {count} names")
    for index, *_ in (*record.nonfinite, *record.underflow):
        if index >= count:
            raise ValueError(f"a parameter that is none of {count}")
    return record


def encode_start(unix_time: float, facts: Mapping[str, Any]) -> str:
    """The line at the start of a run; ``facts`` as in :class:`Start`, ``settings``, ``changed``."""
    return _to_json({"kind": "start", "format": FORMAT, "unix_time": unix_time, **facts})


def _changed(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that are other than this version's defaults; what it does not know is left out."""
    defaults = {each.name: _setting(each.default) for each in fields(ScalerConfig)}
    return tuple(
        name
        for name, value in settings.items()
        if name in defaults and name != "telemetry" and _setting(value) != defaults[name]
    )


FACTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("package", "device", "device_name", "precision"), _text),
    **dict.fromkeys(("python", "torch", "accelerate", "transformers"), _text),
    **dict.fromkeys(("rank", "ranks"), _count),
    "unix_time": _moment,
}


def _decode_start(line: dict[str, Any], names: Names | None) -> Start:
    version = _count(line["format"])
    if version > FORMAT:
        return Start(version)  # what else stands in it is not known
    facts = {key: read(line[key]) for key, read in FACTS.items() if line.get(key) is not None}
    settings = {_text(key): _setting(each) for key, each in line.get("settings", {}).items()}
    told = line.get("changed")
    changed = _changed(settings) if told is None else _texts(told)
    return Start(version, facts, settings, changed)


def encode_names(names: Names) -> str:
    """The line before the windows that count these parameters."""
    head = {"kind": "names", "names": names.names, "places": names.places}
    return _to_json({**head, "elements": names.elements})


def _decode_names(line: dict[str, Any], names: Names | None) -> Names:
    found = Names(
        tuple(map(_text, line["names"])),
        tuple(map(_count, line["places"])),
        tuple(map(_count, line["elements"])),
    )
    if not len(found.names) == len(found.places) == len(found.elements):
        raise ValueError(f"{len(found.names)} names, and other numbers of places or elements")
    return found


def encode_end(end: End) -> str:
    """The line at the end of a run."""
    line = {"kind": "end", "time": round(end.time, 6), "windows": end.windows}
    line |= {"skips": end.skips, "error": end.error}
    return _to_json(line | ({"lost": end.lost} if end.lost else {}))


def _decode_end(line: dict[str, Any], names: Names | None) -> End:
    counts = {key: _count(line.get(key, 0)) for key in ("windows", "skips", "lost")}
    return End(_amount(line.get("time", 0.0)), error=_maybe(_text)(line.get("error")), **counts)


KINDS: dict[str, Callable[[dict[str, Any], Names | None], Any]] = {
    "start": _decode_start,
    "names": _decode_names,
    "window": _decode_window,
    "end": _decode_end,
}


def decode(line: bytes, names: Names | None = None) -> Start | Names | Record | End | None:
    """One line of a file; None: of a kind that this version does not know.

    Args:
        names: of the last names line, which windows count; None: that line was lost, and nobody
            knows of what ``norms``, ``nonfinite`` and ``underflow`` are.

    Raises:
        CutLineError: it is not JSON.
        BrokenLineError: it is not as the format says.
    """
    try:
        value = json.loads(line.decode())
    except RecursionError:
        raise CutLineError("JSON nested too deeply") from None
    except ValueError as error:  # of bytes that are no text, too
        raise CutLineError(f"text that is not JSON ({_text(str(error)[:80])})") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise BrokenLineError(f"a {type(value).__name__} without kind")
    if (read := KINDS.get(value["kind"])) is None:
        return None
    try:
        found: Start | Names | Record | End = read(value, names)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BrokenLineError(f"a {value['kind']} line: {_text(str(error)[:120])}") from None
    return found
