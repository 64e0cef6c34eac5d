"""What became of a run, from its records in order: the same live and from the file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from .record import End, Names, Record, Start

LARGEST = 65504.0
"""The largest float16 number."""
SMALLEST_SCALE = 1.0
"""At a scale of 1 or less an overflow is not caused by scaling."""
SETTLED = 20
"""Windows in a row without a back-off after which the scale has settled."""
MAX_HALVINGS = 2
"""Skips in a row that differences between batches explain."""
STUCK = 20
"""Skips in a row at the end of a run that no longer trains. The search for a scale takes 16
from the usual 65536 to 1."""
FAILING = 5
"""The same for windows with inf or NaN in the forward, which no scale repairs."""
MANY_SKIPPED = 0.1
"""A run trained in part if more than this share of its windows was skipped in the middle."""
DEEP_FALL = 6.0
"""Halvings of the scale without growth between them: more than an ordinary fall."""
REPEATED = 3
"""Skips of a fall, or overflows of one layer, from which on they are reported."""
MAX_FIRSTS = 50

LEVEL = 5
"""Number of losses whose median is the level of the loss."""
RAN_AWAY = 10.0
"""Factor on the largest of the first losses, above which the loss ran away."""
SMALL_LOSS = 0.1
"""Least magnitude of a first loss: those of policy gradients are near 0."""

WITHOUT_SCALE = ("no", "bf16", "fp8")
"""Precisions whose loss is not scaled."""
THE_LOSS = "the loss"
"""The origin of an overflow that began in the loss."""

Kind = Literal["untrained", "stuck", "diverged", "partly", "trained"]
"""``untrained``: no parameter can have moved. ``stuck``: it skipped every window at the end.
``diverged``: the loss ran away, or is inf or NaN now. ``partly``: many windows were skipped in the
middle of training."""

SkipKind = Literal["forward", "search", "growth", "other"]


def headroom(largest: float) -> float:
    """How often ``largest``, the largest scaled gradient, can be doubled before float16 overflows.

    Negative where it was computed or added up in float32; inf for 0.

    >>> headroom(65504 / 8)
    3.0
    """
    if largest == math.inf:
        return -math.inf
    return math.log2(LARGEST / largest) if largest > 0 else math.inf


@dataclass(slots=True)
class Span:
    """Windows of one kind: the first, the last, and how many."""

    first_x: int = -1
    last_x: int = -1
    count: int = 0

    def include(self, x: int) -> None:
        """Count window ``x``, which follows the last one."""
        self.first_x = self.first_x if self.count else x
        self.last_x = x
        self.count += 1


@dataclass(slots=True)
class Fall:
    """Windows that overflowed with no growth of the scale between them."""

    first_x: int
    last_x: int
    high: float
    low: float
    kinds: Counter[str] = field(default_factory=Counter)
    """Skips by their kind."""
    origins: Counter[str] = field(default_factory=Counter)
    """Skips by where the overflow began."""

    @property
    def skips(self) -> int:
        """The number of skipped windows."""
        return self.kinds.total()

    @property
    def is_search(self) -> bool:
        """Whether the scale was only settling, at the beginning of a session."""
        return 2 * self.kinds["search"] > self.skips

    @property
    def halvings(self) -> float:
        """log2 of the ratio of the scales; inf when the scale reached 0."""
        if self.low >= self.high:
            return 0.0
        return math.log2(self.high) - math.log2(self.low) if self.low > 0 else math.inf

    @property
    def is_real(self) -> bool:
        """Whether it is neither a search nor a single skip nor the price of growth."""
        is_ordinary = self.skips == self.kinds["growth"] and self.halvings < DEEP_FALL
        has_size = self.halvings >= 2 or self.skips >= REPEATED
        return has_size and not self.is_search and not is_ordinary


@dataclass(slots=True)
class Session:
    """A ``start`` line and the windows that follow it."""

    start: Start
    first_x: int
    windows: int = 0
    last_step: int = -1
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None


class Diagnosis:
    """Adds up the records of a run. Bounded; holds no tensors.

    ``x`` counts windows over all sessions.

    Each skip is counted in ``kinds`` by the first of these kinds that fits:

    ``forward``: the loss was inf or NaN, or the overflow began in the forward. The scale multiplies
    the loss afterwards, so that no other scale helps; such a skip says nothing about the scale.

    ``search``: the scale settles. A session begins with an untried scale: the skips before its
    first good window are of the search, and two more after it, since batches differ. The search is
    over once the scale has grown, has not backed off for 20 windows in a row, or was 1 or less; a
    session that goes on from a checkpoint (its growth tracker says so) has settled before. After a
    heal, which puts the scale back, it is searched for again.

    ``growth``: at a scale above one that the run grew from, at most two in a row. The scale goes as
    high as it can, and batches differ: nothing is lost there.

    ``other``: all others.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.places: dict[str, int] = {}
        """The position of each parameter in its model."""
        self.windows = self.skips = self.last_x = 0
        self.kinds: Counter[SkipKind] = Counter()
        self.is_scaled = False
        """The run has a loss scale."""
        self.first_scale = self.last_scale = 0.0
        self.lowest: tuple[float, int] | None = None
        """The lowest scale that a window had or left behind, and the window's x."""
        self.has_moved = False
        """A window has stepped with a learning rate that was not 0, or is not known."""
        self.firsts: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_FIRSTS)
        """``(x, Record.first)`` of the last overflows."""
        self.origins: Counter[str] = Counter()
        """Overflows by where they began."""
        self.bad_losses = Span()
        """Windows with a loss of inf or NaN, except those that healed the cause."""
        self.bad_at_end = 0
        """Windows up to the last one that were not finite: the loss, or the norm of a step."""
        self.stepped_bad = Span()
        """Windows that stepped though their norm was not finite."""
        self.highest: tuple[float, int] | None = None
        """The largest finite norm, and the window's x."""
        self.healed: dict[str, int] = {}
        """Modules that ``heal`` put in float32, in order, and the x of the window."""
        self.streak = 0
        """Skipped windows in a row, up to the last one."""
        self.streak_origins: Counter[str] = Counter()
        """``origins`` of these windows."""
        self._fall: Fall | None = None
        """The present one."""
        self._worst_fall: Fall | None = None
        self._begin()

    def _begin(self) -> None:
        self._close_fall()
        self.streak = self.bad_at_end = 0
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=LEVEL)
        self._losses = 0
        self._search()

    def _search(self) -> None:
        """Begin a search for the scale."""
        self._is_settling, self._went_well = True, False
        self._late_skips = self._steady = 0
        """Skips of the search after a good window; windows since the last back-off."""
        self._good_scale = math.inf
        """The lowest scale that the run grew from."""

    def begin(self, start: Start) -> None:
        """Start a session."""
        last = self.sessions[-1] if self.sessions else None
        if last is not None and last.ended and last.error is None and not last.windows:
            # The launcher attached, then the script: nothing was trained with these settings.
            del self.sessions[-1]
        self.sessions.append(Session(start, self.last_x + 1 if self.windows else 0))

    def end(self, end: End) -> None:
        """End the session."""
        session = self.sessions[-1]
        session.seconds = max(session.seconds, end.time)
        session.ended, session.error = True, end.error

    def add(self, record: Record) -> None:
        """Add the next window of the session."""
        session = self.sessions[-1]
        x = session.first_x + record.index
        if not session.windows:
            self._begin()
            self.is_scaled |= session.start.facts.get("precision") not in WITHOUT_SCALE
            if record.growth_tracker > 1:  # it goes on from a checkpoint
                self._is_settling = False
        session.windows += 1
        session.last_step = record.index
        session.seconds = max(session.seconds, record.time)
        self.windows += 1
        self.skips += record.skipped
        self.last_x = x
        self.has_moved |= not record.skipped and (not record.lr or any(r != 0 for r in record.lr))
        for name in record.healed:
            self.healed.setdefault(name, x)
        if record.first is not None:
            self.firsts.append((x, record.first))
        self._add_loss(x, record)
        self._add_norm(x, record)
        self._add_scale(x, record)

    def _add_loss(self, x: int, record: Record) -> None:
        if record.has_bad_loss and not record.healed:
            self.bad_losses.include(x)
        elif record.loss is not None and math.isfinite(record.loss):
            if len(self._first_losses) < LEVEL:
                self._first_losses.append(record.loss)
            self._last_losses.append(record.loss)
            self._losses += 1

    def _add_norm(self, x: int, record: Record) -> None:
        norm = record.grad_norm
        is_bad = norm is not None and not math.isfinite(norm) and not record.skipped
        if norm is not None and math.isfinite(norm) and norm > (self.highest or (-1.0, 0))[0]:
            self.highest = (norm, x)
        if is_bad:
            self.stepped_bad.include(x)
        failed = (is_bad or failed_in_forward(record)) and not record.healed
        self.bad_at_end = self.bad_at_end + 1 if failed else 0

    def _add_scale(self, x: int, record: Record) -> None:
        scale, after = record.scale, record.next_scale
        if self.windows == 1:
            self.first_scale = scale
        self.last_scale = after
        if self.lowest is None or min(scale, after) < self.lowest[0]:
            self.lowest = (min(scale, after), x)
        was_settling = self._is_settling
        if self._steady >= SETTLED:
            self._is_settling = False
        kind = self._kind_of(record) if record.skipped else None
        if was_settling and not self._is_settling and self._fall and self._fall.is_search:
            self._close_fall()
        origin = self.origin_of(record) if record.found_inf else None
        origins = [] if origin is None else [origin]
        self.origins.update(origins)
        if kind is None:
            self.streak, self._went_well = 0, True
            self.streak_origins.clear()
        else:
            self.streak_origins.update(origins)
            self.kinds[kind] += 1
            fall = self._fall = self._fall or Fall(x, x, scale, scale)
            fall.last_x = x
            fall.kinds[kind] += 1
            fall.origins.update(origins)
        if self._fall is not None:
            self._fall.low = min(self._fall.low, after)
        self._steady = 0 if after < scale and kind != "forward" else self._steady + 1
        if after > scale and not record.skipped:
            self._is_settling, self._good_scale = False, min(self._good_scale, scale)
        if record.healed:  # the scale goes back to where it was, and may be too high once more
            self.streak = 0
            self._search()
        if after > scale or record.healed:
            self._close_fall()

    def _kind_of(self, record: Record) -> SkipKind:
        self.streak += 1
        if failed_in_forward(record):
            return "forward"
        if self._is_settling and self._went_well:
            self._late_skips += 1
        if record.scale <= SMALLEST_SCALE or self._late_skips > MAX_HALVINGS:
            self._is_settling = False
        if self._is_settling:
            return "search"
        is_growth = record.scale > self._good_scale and self.streak <= MAX_HALVINGS
        return "growth" if is_growth else "other"

    def note_names(self, names: Names) -> None:
        """The order of the parameters in their model."""
        self.places.update(zip(names.names, names.places, strict=True))

    def origin_of(self, record: Record) -> str | None:
        """Where its overflow began, if that is known: what the finder saw, else the loss, else the
        last parameter of the model, whose gradient the backward computes first."""
        found = [record.names[i] for i, _ in record.nonfinite] if record.names else []
        found.sort(key=lambda name: -self.places.get(name, record.names.index(name)))
        first, names = record.first, found or list(record.overflowed)
        if first is None:
            return THE_LOSS if record.loss_nonfinite else next(iter(names), None)
        if first["where"] == "loss":
            return THE_LOSS
        module = first["module"]
        inside = (n for n in names if n == module or n.startswith(module + "."))
        return next(inside, module) or None

    def _close_fall(self) -> None:
        self._worst_fall, self._fall = self.worst_fall(), None

    def worst_fall(self) -> Fall | None:
        """The deepest fall that is neither the search nor the price of growth."""
        falls = [f for f in (self._worst_fall, self._fall) if f is not None and f.is_real]
        falls = falls if self.is_scaled else []
        return max(falls, key=lambda f: (f.halvings, f.skips), default=None)

    def is_deep(self, fall: Fall) -> bool:
        """Whether it is more than an ordinary fall."""
        return fall.halvings >= DEEP_FALL or (self.lowest or (math.inf,))[0] <= SMALLEST_SCALE

    # What it comes to.

    def setting(self, name: str) -> float | None:
        """A numeric setting of the last session that has it."""
        for session in reversed(self.sessions):
            value = session.start.settings.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return None

    def rise(self) -> tuple[float, float] | None:
        """Medians of the first losses of the session and of the last, where the loss ran away: the
        last are above ten times the largest of the first. Fewer than four losses say nothing."""
        size = min(LEVEL, self._losses // 2)
        if size < 2:
            return None
        first, last = self._first_losses[:size], list(self._last_losses)[-size:]
        now = median(last)
        ran_away = now > RAN_AWAY * max(SMALL_LOSS, *map(abs, first))
        return (median(first), now) if ran_away else None

    @property
    def is_held(self) -> bool:
        """Whether the scale stands at ``max_scale``."""
        ceiling = self.setting("max_scale")
        return ceiling is not None and self.last_scale >= ceiling

    @property
    def error(self) -> str | None:
        """What ended the last session."""
        return self.sessions[-1].error if self.sessions else None

    @property
    def is_stuck(self) -> bool:
        """Whether too many windows were skipped at the end, or the skips ended the run."""
        failing = min(self.streak, self.bad_at_end) >= FAILING
        ended = self.error is not None and self.error.startswith("OverflowStreakError")
        return self.streak >= STUCK or failing or (self.streak > 0 and ended)

    @property
    def kind(self) -> Kind:
        """What became of the run, in one word."""
        if self.skips == self.windows or not self.has_moved:
            return "untrained"
        if self.is_stuck:
            return "stuck"
        if self.rise() is not None or (self.bad_at_end and not self.streak):
            return "diverged"
        lost = self.kinds["other"] + self.kinds["forward"]
        return "partly" if lost > MANY_SKIPPED * self.windows and not self.healed else "trained"

    def place(self, x: int) -> str:
        """``step 410``, or ``step 12 of session 2`` where there are several."""
        index = max(0, bisect_right([s.first_x for s in self.sessions], x) - 1)
        step = x - self.sessions[index].first_x
        return f"step {step}" + (f" of session {index + 1}" if len(self.sessions) > 1 else "")


def failed_in_forward(record: Record) -> bool:
    """Whether inf or NaN was there before the scale multiplied the loss, as far as is known."""
    first = record.first or {"where": ""}
    made = first.get("output") or ()
    return (
        record.has_bad_loss
        or first["where"] == "forward"
        or (first["where"] == "loss" and not all(math.isfinite(float(each)) for each in made))
    )
