"""The place where an overflow began, as the window holds it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

Pair = tuple[float, float]


@dataclass(frozen=True)
class Origin:
    """The place where an overflow began.

    ``input`` and ``output`` are the smallest and the largest element, ``(lo, hi)``: both NaN where
    there was a NaN, None where nothing was seen. In a forward the elements are in the module's
    input and output; in a backward in the gradients with respect to these; for a parameter in the
    module's input and in the gradient with respect to its output. ``output`` of a loss is the loss.
    """

    where: str
    """``"forward"``, ``"loss"``, ``"backward"`` or ``"parameter"``."""
    module: str
    """The module's name in the model; ``""`` for the model itself, and for code outside of it."""
    cls: str
    """The module's class; a loss's dtype; ``"loss"`` for code between model and loss."""
    micro_batch: int
    """Number of the backward in its window, from 0."""
    input: Pair | None
    output: Pair | None
    text: str
    """One sentence: the place, a comma, the micro-batch and the elements seen."""

    @property
    def short(self) -> str:
        """The place alone, the first part of ``text``."""
        return self.text.partition(",")[0]

    @property
    def is_of_data(self) -> bool:
        """Whether the overflow is in a forward whose input was not finite already."""
        given = self.input or ()
        return self.where == "forward" and not all(map(math.isfinite, given))

    def as_json(self) -> dict[str, Any]:
        """The form in a telemetry file: strict JSON, where inf is ``"inf"``."""
        fields = asdict(self)
        fields["class"] = fields.pop("cls")
        return fields | {"input": _as_json(self.input), "output": _as_json(self.output)}


def _as_json(pair: Pair | None) -> list[float | str] | None:
    return None if pair is None else [x if math.isfinite(x) else str(x) for x in pair]
