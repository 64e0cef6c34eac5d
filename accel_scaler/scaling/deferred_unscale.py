"""What passes from a boundary to whatever updates the parameters of one optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["DeferredUnscale"]


@dataclass(slots=True)
class DeferredUnscale:
    """What is still to be done to finite gradients before the update. Scalars, float32, shape ().

    At most one of the two is set.
    """

    multiply: Tensor | None = None
    """Unscale and clip, as one product."""
    divide: Tensor | None = None
    """The same, left to torch's fused kernel (its ``grad_scale``)."""

    @property
    def factor(self) -> Tensor | float:
        """What the gradients are still to be multiplied by."""
        if self.multiply is not None:
            return self.multiply
        return 1.0 if self.divide is None else 1.0 / self.divide

    def __bool__(self) -> bool:
        return self.multiply is not None or self.divide is not None
