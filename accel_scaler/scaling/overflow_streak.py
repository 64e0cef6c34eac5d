"""Skipped windows in a row: what was seen in them, when that is said, what to try, the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor
from torch.optim import Optimizer

from ..errors import BROKEN, OverflowStreakError, listed
from .gradients import MOST_NAMED, SMALLEST_NORMAL, has_nonfinite_gradient, nonfinite
from .losses import Losses
from .parameter_names import MOST_NAMES, ParameterNames

logger = logging.getLogger("accel_scaler")

TOLD_AT = 30
"""Skips in a row at which a run without a limit is told of, and again at ten times as many. The
first search for a scale takes 16 from the usual 65536 down to 1."""

HIGHEST = 2.0**126
"""Of a scale from here on float32 has no room for the usual growth, soon or at once."""

MOST_WARNINGS = 20
"""Of such runs, in one process."""

MOST_SCALES = 64
"""Of a run of skips; in between, a long run repeats itself."""

USUAL_SCALE = 1.0
"""Below this a loss scale makes gradients smaller than they are."""


@dataclass(slots=True)
class Evidence:
    """What was seen during the present run of skips."""

    windows: int = 0
    bad_losses: int = 0
    """Windows in which a loss was inf or NaN."""
    scales: list[float] = field(default_factory=list)
    """The scale of each window, the first ones and the last."""
    min_scale: float | None = None
    looked: int = 0
    """Windows in which somebody looked where the overflow began."""
    began: dict[str, int] = field(default_factory=dict)
    """In how many of those it began in this tensor: the last one that a forward meets."""
    broken: list[str] = field(default_factory=list)
    """Some parameters that are not finite themselves."""
    first: str = ""
    """The sentence of ``find_overflow`` about the last one."""
    module: str = ""
    """Name of the module whose forward made inf or NaN of finite input, so that no scale helps."""

    def add(self, scale: float, bad_loss: bool) -> None:
        """One more window of the run overflowed."""
        self.windows += 1
        self.bad_losses += int(bad_loss)
        if len(self.scales) == MOST_SCALES:
            del self.scales[MOST_SCALES // 2]
        self.scales.append(scale)


def scale_path(scales: Sequence[float], now: float, most: int = 8) -> str:
    """``65536 -> 32768 -> ... -> 1``: where the scale was, repeats left out."""
    path = [s for i, s in enumerate(scales) if i == 0 or s != scales[i - 1]]
    if not path or path[-1] != now:
        path.append(now)
    texts = [f"{scale:.10g}" for scale in path]
    if len(texts) > most:
        texts = [*texts[: most // 2], "...", *texts[-(most // 2) :]]
    return " -> ".join(texts)


def in_float32(module: str) -> str:
    """How a module comes to run in float32; the model itself has no name."""
    if not module:
        return "compute that part in float32 (torch.autocast(device_type, enabled=False))"
    return f"keep it in float32 with fp32_modules={[module]}, or let heal=True find what is needed"


def remedies(evidence: Evidence, scale: float, has_limit: bool = True) -> list[str]:
    """Three things to try, the likeliest first.

    Args:
        evidence: of the run of skips.
        scale: the present one.
        has_limit: ``max_consecutive_skips`` is set.
    """
    windows, found = max(evidence.windows, 1), []
    bad = evidence.bad_losses
    if evidence.broken:
        found.append(
            f"{BROKEN} ({', '.join(evidence.broken)}), so no scale "
            "helps: load the last good checkpoint and look at the updates before"
        )
    if evidence.module:
        found.append(
            f"{evidence.module} overflows in its forward, whatever the scale: "
            f"{in_float32(evidence.module)}"
        )
    if bad:
        found.append(
            f"the loss was inf or NaN in {bad} of these {windows} windows, before any scaling: "
            "look at the data of these batches (empty, NaN, labels out of range) and at the loss"
        )
    at_floor = evidence.min_scale is not None and scale <= evidence.min_scale
    if at_floor and not bad:
        found.append(
            f"the scale stood at min_scale={evidence.min_scale:g}: if gradients of this size are "
            "right for the model, lower min_scale; if not, they would overflow at any scale"
        )
    where, often = max(evidence.began.items(), key=lambda item: item[1], default=("", 0))
    if where and often * 2 > evidence.looked and not bad:
        module = where.rpartition(".")[0]
        found.append(
            f"it began in {where} in {often} of {evidence.looked} windows: {in_float32(module)}"
        )
    if not at_floor and scale >= USUAL_SCALE and bad < windows:
        found.append(
            f"the scale was still falling: start with init_scale={scale:.10g}"
            + (", or raise max_consecutive_skips" if has_limit else "")
        )
    if scale < USUAL_SCALE and not bad:
        found.append(
            "the scale is below 1, so activations overflow in the forward, whatever the scale: "
            "float32 for the layer, or bfloat16 if the device has it"
        )
    if not evidence.first:
        found.append("find_overflow='replay' names the module in which it begins, with its ranges")
    found.append("a lower learning rate or a longer warm-up, if it began in the middle of a run")
    found.append("train in float32 from the same checkpoint: if that fails too, it is not fp16")
    return found[:3]


class OverflowStreak:
    """Skipped windows in a row: which tensors overflowed, when that is said, when it is too much.

    Args:
        limit: skipped windows in a row that are allowed; None: any number.
        min_scale: the scale's floor, for the advice at the end of a run.
        names: of parameters.
    """

    def __init__(self, limit: int | None, min_scale: float | None, names: ParameterNames) -> None:
        self.limit, self.names = limit, names
        self.seen: dict[str, int] = {}
        """Tensors with non-finite gradients in the present run, and how often."""
        self.evidence = Evidence(min_scale=min_scale)
        self.warns_at: float = TOLD_AT if limit is None else max(1, limit // 3)
        """Skips in a row at which a warning is given."""
        self._warnings = 0
        self._told_dead = self._told_statistics = self._told_highest = False

    def window_closed(self, scale: float, overflowed: bool, losses: Losses) -> None:
        """A window with this scale is over: evidence, if it belongs to a run of overflows."""
        if overflowed:
            self.evidence.add(scale, losses.bad() > 0)
        elif scale >= HIGHEST and not self._told_highest:
            self._told_highest = True
            logger.warning(
                f"the loss scale is {scale:g}, about the largest that float32 holds, and its "
                "window did not overflow: every gradient is zero or nearly so. Training goes on at "
                "that scale. Does the loss depend on the parameters? If so set max_scale "
                "(65536, say). (Said once.)"
            )

    def note_skip(
        self, params: Sequence[Tensor], optimizer: Optimizer | None, consecutive_skips: int
    ) -> None:
        """Look for the offenders, if this overflow is the one that warns or ends the run.

        Reads every gradient, so only where somebody is about to be told their names.

        Args:
            optimizer: that of ``params``, if they have one.
        """
        self.search(params, optimizer, consecutive_skips)
        is_last = self.limit is not None and consecutive_skips >= self.limit
        if is_last or consecutive_skips + 1 == self.warns_at:
            self.count(self.names.of(filter(has_nonfinite_gradient, params), optimizer))

    def search(
        self, params: Sequence[Tensor], optimizer: Optimizer | None, consecutive_skips: int
    ) -> None:
        """In the second half of a run: where does it begin, and are the parameters finite?

        A run without a limit: where it is told of. A backward meets the last parameters first
        and carries inf on to those before them.
        """
        tells = self.limit is None and consecutive_skips + 1 == self.warns_at
        if not tells and (self.limit is None or 2 * consecutive_skips < self.limit):
            return
        place = {key: number for number, key in enumerate(self.names.by_id())}
        params = sorted(params, key=lambda p: -place.get(id(p), len(place)))
        began = next(filter(has_nonfinite_gradient, params), None)
        evidence = self.evidence
        if began is not None:
            evidence.looked += 1
            (name,) = self.names.of([began], optimizer)
            evidence.began[name] = evidence.began.get(name, 0) + 1
        if tells or consecutive_skips >= (self.limit or 0):
            broken = islice((p for p in params if nonfinite(p.detach())), MOST_NAMED)
            evidence.broken = self.names.of(broken, optimizer)

    def tell_broken_statistics(self, losses: Losses) -> None:
        """After a skip whose loss was inf or NaN: a batch norm has kept what it saw. Said once."""
        if self._told_statistics or not losses.bad():
            return
        broken = [
            name or type(part).__name__
            for module in self.names.modules
            for name, part in module.named_modules()
            if isinstance(getattr(part, "running_var", None), Tensor)
            and (nonfinite(part.running_mean) or nonfinite(part.running_var))
        ]
        if broken:
            self._told_statistics = True
            logger.warning(
                "the skipped step changed no parameter, but its forward left inf or NaN in the "
                f"running statistics of {listed(broken[:MOST_NAMES], len(broken))}, so evaluation "
                "gives NaN from here on. Load the last checkpoint, or call reset_running_stats() "
                "there and go on training. (Said once.)"
            )

    def count(self, names: Iterable[str]) -> None:
        """Remember offenders that a check came across anyway."""
        for name in names:
            self.seen[name] = self.seen.get(name, 0) + 1

    def check(self, consecutive_skips: int, get_scale: Callable[[], float]) -> None:
        """End the run: raise once more than ``limit`` windows in a row were skipped.

        At a third of that, say so, once. Without a limit say it at ``TOLD_AT`` in a row and at
        ten times as many, and once where the scale has become too small to be divided by.
        """
        if consecutive_skips == 0:
            self._forget()
            return
        if self.warns_at <= consecutive_skips and self._warnings < MOST_WARNINGS:
            self._warn(consecutive_skips, get_scale())
        if self.limit is None:
            if consecutive_skips >= TOLD_AT and not self._told_dead:
                self._tell_dead(get_scale())
            return
        if consecutive_skips <= self.limit:
            return
        said = (
            f"{consecutive_skips} windows in a row overflowed, max_consecutive_skips="
            f"{self.limit} allows {self.limit}. {self._told_so_far(get_scale())}"
        )
        self._forget()
        raise OverflowStreakError(said)

    def _warn(self, skips: int, scale: float) -> None:
        """Once, where there is a limit; without one again after ten times as many skips."""
        self._warnings = MOST_WARNINGS if self.limit is not None else self._warnings + 1
        self.warns_at = 10 * skips
        end = " and were skipped; max_consecutive_skips is not set, so nothing ends this run"
        if self.limit is not None:
            end = f"; max_consecutive_skips={self.limit} ends the run after {self.limit}"
        is_last = self._warnings == MOST_WARNINGS
        again = "Not said again." if is_last else f"Said again after {self.warns_at}."
        said = f"{skips} windows in a row overflowed{end}. {self._told_so_far(scale)}"
        logger.warning(f"{said} ({again})")

    def _tell_dead(self, scale: float) -> None:
        """Below float32's normal numbers 1 / scale is out of range, or soon will be."""
        if scale >= SMALLEST_NORMAL:
            return
        self._told_dead = True
        logger.error(
            f"the loss scale fell to {scale:g}, too small to divide gradients by: every further "
            "window is skipped, whatever its gradients. Parameters are as before the run of "
            "skips. End the run, load the last checkpoint, set min_scale (1.0, say). (Said once.)"
        )

    def _told_so_far(self, scale: float) -> str:
        """What was seen in this run of skips, and what to try."""
        evidence = self.evidence
        advice = remedies(evidence, scale, self.limit is not None)
        return (
            f"Non-finite gradients in: {self._worst()}. "
            f"Scale: {scale_path(evidence.scales, scale)}. "
            f"{evidence.first}Parameters are as before the run. Likeliest remedies: "
            + "; ".join(f"({number}) {text}" for number, text in enumerate(advice, 1))
            + "."
        )

    def _worst(self) -> str:
        worst = sorted(self.seen, key=lambda name: -self.seen[name])
        return listed(worst[:MOST_NAMES], len(worst)) or "unknown tensors"

    def _forget(self) -> None:
        if self.limit is None:
            self.warns_at = TOLD_AT
        self.seen.clear()
        self.evidence = Evidence(min_scale=self.evidence.min_scale)
