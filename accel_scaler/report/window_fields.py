"""The optional fields of a window: norms, what overflowed and where it began, the clock."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..telemetry.decoding import BrokenLineError, items, pair, share, show, span, text_of, whole
from .run_summary import First, Run, Session

__all__ = ["Extra", "Names"]

WHERE = ("forward", "backward", "parameter", "loss")


@dataclass(slots=True)
class Names:
    """A names line: one entry a parameter in each list."""

    names: list[str]
    places: list[int]
    elements: list[int]


class Extra:
    """The optional fields of a window: checked at construction, counted by ``commit``."""

    def __init__(self, run: Run, names: Names | None, value: dict[str, Any]) -> None:
        self.run = run
        self.names = names.names if names else None
        self.places = names.places if names else []
        self.elements = names.elements if names else []
        get = value.get
        self.losses = whole(get("loss_nonfinite", 0))
        self.times = [whole(get(key, 0)) for key in ("optimizer_us", "waited_us", "hidden_us")]
        self.timed = "optimizer_us" in value
        self.spans = [span(s) for s in items(get("spans", []))]
        self.first = _first(get("first"))
        self.norms: array[float] | None = None
        self.nonfinite: list[tuple[int, int]] = []
        self.underflow: list[tuple[int, float, float]] | None = None
        named = [key for key in ("norms", "nonfinite", "underflow") if key in value]
        if named and self.names is None:
            self.run.nameless += 1  # their names line was lost: the rest of the window is sound
        elif self.names is not None:
            self._named(self.names, named, value)

    def _named(self, names: list[str], keys: Sequence[str], value: dict[str, Any]) -> None:
        if "nonfinite" in keys:
            self.nonfinite = [self._count(entry) for entry in items(value["nonfinite"])]
            if len({index for index, _ in self.nonfinite}) != len(self.nonfinite):
                raise BrokenLineError("a parameter twice in nonfinite")
        if "underflow" in keys:
            self.underflow = []
            for entry in items(value["underflow"]):
                if type(entry) is not list or len(entry) != 3:
                    raise BrokenLineError(f"expected [index, share, share], got {show(entry)}")
                index = whole(entry[0], 0, len(names) - 1)
                self.underflow.append((index, share(entry[1]), share(entry[2])))
        if "norms" in keys:
            text = value["norms"]
            if type(text) is not str or len(text) != 4 * ((4 * len(names) + 2) // 3):
                raise BrokenLineError(f"norms that are not those of {len(names)} names")
            if self.run.heat.wants():
                self.norms = _floats(text, len(names))

    def _count(self, entry: object) -> tuple[int, int]:
        if type(entry) is not list or len(entry) != 2:
            raise BrokenLineError(f"expected [index, count], got {show(entry)}")
        index = whole(entry[0], 0, len(self.places) - 1)
        return index, whole(entry[1], 1, self.elements[index] or 2**53)

    def commit(self, x: int, end: float, session: Session) -> str | None:
        """Count it all; returns where the overflow began, None where that is not known."""
        run, names = self.run, self.names or []
        if self.losses:
            run.loss_windows += 1
            run.loss_last_x = x
            if run.loss_windows == 1:
                run.loss_first_x = x
        if self.norms is not None:
            run.heat.add(x, names, self.norms)
        if self.underflow is not None:
            run.underflow = [(names[i], zero, tiny) for i, zero, tiny in self.underflow]
            run.underflow_x = x
        if self.timed:
            timing = run.timing
            timing.updates += 1
            timing.optimizer_us += self.times[0]
            timing.waited_us += self.times[1]
            timing.hidden_us += self.times[2]
        if self.spans:
            run.timing.add(x, self.spans, end, session.windows == 1)
        return self._blame(x, names)

    def _blame(self, x: int, names: list[str]) -> str | None:
        """Where it began: what was seen first, else the loss, else the last layer of all."""
        last = max(self.nonfinite, key=lambda e: self.places[e[0]], default=None)
        began = None if last is None else names[last[0]]
        culprit = began
        if self.losses:
            culprit, began = "the loss", None
        if self.first is not None:
            self.first.x = x
            self.run.saw_first(self.first)
            module = self.first.module
            # A parameter of that module, the latest of them, or the parameter itself.
            began = next(
                (
                    names[i]
                    for i, _ in sorted(self.nonfinite, key=lambda e: -self.places[e[0]])
                    if names[i] == module or names[i].startswith(module + ".")
                ),
                None,
            )
            culprit = "the loss" if self.first.where == "loss" else began or module or None
        for index, count in self.nonfinite:
            name = names[index]
            self.run.offended(
                x, name, self.places[index], count, self.elements[index], name == began
            )
        if culprit is not None:
            self.run.blamed(culprit)
        return culprit


def _first(value: object) -> First | None:
    if value is None:
        return None
    if type(value) is not dict:
        raise BrokenLineError(f"expected an object in first, got {show(value)}")
    if (where := value.get("where")) not in WHERE:
        raise BrokenLineError(f"a first overflow in {show(where)}")
    batch = value.get("micro_batch")
    return First(
        x=0,
        where=where,
        module=text_of(value.get("module") or ""),
        class_name=text_of(value.get("class") or "", 60),
        micro_batch=None if batch is None else whole(batch),
        input=pair(value.get("input")),
        output=pair(value.get("output")),
        text=text_of(value.get("text") or "", 400),
    )


def _floats(text: str, count: int) -> array[float]:
    """Little-endian float32 out of base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise BrokenLineError("norms that are not base64") from None
    if len(data) != 4 * count:
        raise BrokenLineError(f"norms of {len(data)} bytes for {count} names")
    norms = array("f", data)
    if sys.byteorder == "big":
        norms.byteswap()
    if any(norm < 0 for norm in norms):
        raise BrokenLineError("a norm below 0")
    return norms
