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
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

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
    """Learning rate of every group of the optimizers that ended in this window, in order; None:
    it is on a device, where reading it would wait."""
    time: float = 0.0
    """When the window ended: seconds since the start of the recording."""
    loss: float | None = None
    """The loss whose gradient was taken: the sum of the losses of the window, each divided by
    ``gradient_accumulation_steps`` if Accelerate does that. So it is the mean over micro-batches in
    a loop, also where the end of the data cut the window short, and what a Trainer logs for one
    step; of several losses in one window (a GAN's) the sum. Before scaling, on this rank alone.
    None where one is no single real number. Only with ``telemetry``; on a device, where no
    norm was read in the check, once the next window is on record."""
    loss_nonfinite: int = 0
    """How many of its losses were inf or NaN; counted after an overflow only."""
    names: tuple[str, ...] = ()
    """Parameter names, in the order of ``norms``; ``nonfinite`` and ``underflow`` give indices into
    it. The file has them in a line of their own."""
    norms: tuple[float, ...] | None = None
    """Unscaled norm of each parameter's gradient, before clipping; NaN for a parameter without.
    Only with ``telemetry``; kept for the last windows. Six digits in the file."""
    nonfinite: tuple[tuple[int, int], ...] = ()
    """``(index in names, non-finite elements)`` of every parameter that overflowed. Only with
    ``telemetry``; kept for the last windows."""
    underflow: tuple[tuple[int, float, float], ...] = ()
    """``(index in names, share of zeros, share of subnormals)`` of each scaled gradient, as float16
    numbers: of float16 gradients, and of the float32 ones of fp16 training. Only with
    ``telemetry``, once every ``underflow_interval`` windows; kept for the last windows."""
    largest_gradient: float | None = None
    """The largest magnitude of an element of the gradients in ``underflow``, scaled, before
    clipping; float16 ends at 65504. Of parameters alone: gradients of activations may be
    larger. On this rank, after micro-batches were added up and ranks averaged; above 65504 where
    float32 added them up. None where it was not measured, and where clips left no way to compute
    it (of single elements; of parameters that overlap)."""
    zero_share: float | None = None
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
    """Of updates that came a step late: the norm of their previews' error divided by the norm of
    the updates, on this rank. None where there was no preview, or nothing moved. Only with
    ``telemetry``."""

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

    time: float = 0.0
    error: str | None = None
    """What ended the run early."""


class BrokenLineError(Exception):
    """This line cannot be used; the message says why."""


class CutLineError(BrokenLineError):
    """The line is not JSON: cut off in the middle, or something else altogether."""


# Writing.

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

REQUIRED = ("growth_tracker", "found_inf", "max_norm", "clip_coefficient", "lr", "time")
"""Keys of every window line, besides the fields without a default."""

UNWRITTEN = ("overflowed", "names", "norms")
DEFAULTS = {
    each.name: MISSING if each.name in REQUIRED else each.default
    for each in fields(Record)
    if each.name not in UNWRITTEN
}
"""Of the fields in a line; a field that has its default is left out."""


def _finite(value: Any) -> Any:
    """``value``, with texts for the numbers that JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return list(map(_finite, value))
    return value


def encode_window(record: Record) -> str:
    """The line of a window."""
    line: dict[str, Any] = {"kind": "window"}
    for name, default in DEFAULTS.items():
        value = getattr(record, name)
        if default is MISSING or value != default:
            line["step" if name == "index" else name] = _finite(value)
    text = _to_json(line)
    return text if record.norms is None else f'{text[:-1]},"norms":[{_six_digits(record.norms)}]}}'


def _six_digits(values: tuple[float, ...]) -> str:
    """A list of numbers as JSON has it; json's own encoder takes four times as long."""
    if math.isfinite(sum(values)):
        return ",".join(["%.6g"] * len(values)) % values
    return ",".join(f"{v:.6g}" if math.isfinite(v) else f'"{v}"' for v in values)


def encode_line(kind: str, **values: Any) -> str:
    """Any other line: ``start``, ``names`` or ``end``."""
    return _to_json({"kind": kind, **values})


# Reading: a ``ValueError``, ``TypeError`` or the like says that the line is broken.


def _text(value: object) -> str:
    """One line without control characters."""
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


def _setting(value: Any) -> Any:
    """A plain value as it is, the text of anything else."""
    is_number = isinstance(value, (int, float)) and not abs(value) > 2**53
    return value if value is None or is_number else _text(value)


def _tuple_of(*reads: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A list with a value for each of ``reads``."""
    return lambda values: tuple(r(value) for r, value in zip(reads, values, strict=True))


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read_list(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise ValueError("expected a list")
        return tuple(map(read, values))

    return read_list


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``read``, or None for null."""
    return lambda value: None if value is None else read(value)


def _first(value: Any) -> dict[str, Any]:
    """As the overflow finder wrote it, with every key."""
    found: dict[str, Any] = {
        key: _text(value.get(key) or "") for key in ("where", "module", "class", "text")
    }
    found["micro_batch"] = _maybe(_count)(value.get("micro_batch"))
    pair = _maybe(_tuple_of(float, float))
    return found | {key: pair(value.get(key)) for key in ("input", "output")}


def _norms(value: Any) -> tuple[float, ...] | None:
    """None for the base64 text of an earlier version."""
    return None if isinstance(value, str) else tuple(map(float, value))


READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("step", "growth_tracker", "loss_nonfinite"), _count),
    **dict.fromkeys(("time", "scale", "next_scale"), _amount),
    **dict.fromkeys(("found_inf", "skipped"), bool),
    **dict.fromkeys(
        ("grad_norm", "max_norm", "clip_coefficient", "loss", "preview_error"), _maybe(float)
    ),
    **dict.fromkeys(("largest_gradient", "zero_share"), _maybe(_amount)),
    **dict.fromkeys(("optimizer_us", "waited_us"), _maybe(_count)),
    "healed": _list_of(_text),
    "lr": _list_of(_maybe(float)),
    "nonfinite": _list_of(_tuple_of(_count, _count)),
    "underflow": _list_of(_tuple_of(_count, float, float)),
    "norms": _norms,
    "first": _maybe(_first),
}
"""The keys of a window line, but ``kind``."""

FACTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("package", "device", "device_name", "precision"), _text),
    **dict.fromkeys(("python", "torch", "accelerate", "transformers"), _text),
    **dict.fromkeys(("rank", "ranks"), _count),
    "unix_time": lambda moment: datetime.fromtimestamp(moment, timezone.utc).timestamp(),
}


def _decode_window(line: dict[str, Any], names: Names | None) -> Record:
    values = {key: read(line[key]) for key, read in READ.items() if key in line}
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


def _decode_start(line: dict[str, Any], names: Names | None) -> Start:
    version = _count(line["format"])
    if version > FORMAT:
        return Start(version)  # its other keys are not known
    facts = {key: read(line[key]) for key, read in FACTS.items() if line.get(key) is not None}
    settings = {_text(key): _setting(each) for key, each in line.get("settings", {}).items()}
    return Start(version, facts, settings, _list_of(_text)(line.get("changed", [])))


def _decode_names(line: dict[str, Any], names: Names | None) -> Names:
    found = Names(
        _list_of(_text)(line["names"]),
        _list_of(_count)(line["places"]),
    )
    if len(found.names) != len(found.places):
        raise ValueError(f"{len(found.names)} names and {len(found.places)} places")
    return found


def _decode_end(line: dict[str, Any], names: Names | None) -> End:
    return End(_amount(line.get("time", 0.0)), _maybe(_text)(line.get("error")))


KINDS: dict[str, Callable[[dict[str, Any], Names | None], Any]] = {
    "start": _decode_start,
    "names": _decode_names,
    "window": _decode_window,
    "end": _decode_end,
}


def decode(line: bytes, names: Names | None = None) -> Start | Names | Record | End | None:
    """One line of a file; None: of a kind that this version does not know.

    Args:
        names: of the last names line, which windows refer to; None: that line was lost, so that
            nobody knows the parameters of ``norms``, ``nonfinite`` and ``underflow``.

    Raises:
        CutLineError: the line is not JSON.
        BrokenLineError: the line is not as the format says.
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
