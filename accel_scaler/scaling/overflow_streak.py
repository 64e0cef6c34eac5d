"""What to try when a run of skips does not end: the likeliest remedies for what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Evidence", "remedies", "scale_path"]

MOST_SCALES = 64
"""Of a run of skips; in between, a long run repeats itself."""

IN_FLOAT32 = (
    "run that layer in float32 (its forward under torch.autocast(device_type, enabled=False), "
    "inputs as .float())"
)

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
    """The module whose forward made inf or NaN of finite input, as ``find_overflow`` saw it."""

    def add(self, scale: float, bad_loss: bool) -> None:
        """One more window of the run overflowed."""
        self.windows += 1
        self.bad_losses += int(bad_loss)
        if len(self.scales) == MOST_SCALES:
            del self.scales[MOST_SCALES // 2]
        self.scales.append(scale)

    def clear(self) -> None:
        """The run has ended."""
        self.windows = self.bad_losses = self.looked = 0
        self.scales.clear()
        self.began.clear()
        self.broken = []
        self.first = self.module = ""


def scale_path(scales: Sequence[float], now: float, most: int = 8) -> str:
    """``65536 -> 32768 -> ... -> 1``: where the scale was, repeats left out."""
    path = [s for i, s in enumerate(scales) if i == 0 or s != scales[i - 1]]
    if not path or path[-1] != now:
        path.append(now)
    texts = [f"{scale:.10g}" for scale in path]
    if len(texts) > most:
        texts = [*texts[: most // 2], "...", *texts[-(most // 2) :]]
    return " -> ".join(texts)


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
            f"parameters are inf or NaN themselves ({', '.join(evidence.broken)}), so no scale "
            "helps: load the last good checkpoint and look at the updates before"
        )
    if evidence.module:
        where = evidence.module
        found.append(f"{where} overflows in its forward, whatever the scale: {IN_FLOAT32}")
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
        found.append(f"it began in {where} in {often} of {evidence.looked} windows: {IN_FLOAT32}")
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
        found.append("find_overflow=True names the module in which it begins, with its ranges")
    found.append("a lower learning rate or a longer warm-up, if it began in the middle of a run")
    found.append("train in float32 from the same checkpoint: if that fails too, it is not fp16")
    return found[:3]
