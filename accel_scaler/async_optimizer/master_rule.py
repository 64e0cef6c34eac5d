"""Which parameters are stepped through float32 masters: the settings' one rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ScalerConfig
from ..scaling import LOW_PRECISION


@dataclass(frozen=True, slots=True)
class MasterRule:
    """Of all that is trained, what has a master."""

    every: bool
    """All of it, whatever its dtype."""
    dtypes: frozenset[torch.dtype]
    """Else what is of these."""

    @classmethod
    def of(cls, config: ScalerConfig) -> MasterRule:
        """What the settings say: bfloat16 is stepped in place where no loss is scaled."""
        every = config.step_mode == "delayed" or config.offload != "none"
        if config.master_weights == "none":
            return cls(every, frozenset())
        if config.enabled or config.master_weights == "fp32":
            return cls(every, LOW_PRECISION)
        return cls(every, frozenset({torch.float16}))

    @property
    def rounded(self) -> frozenset[torch.dtype]:
        """Dtypes that hold less than their masters."""
        return LOW_PRECISION if self.every else self.dtypes

    def takes(self, p: Tensor) -> bool:
        """Whether ``p`` has a master while it is trained."""
        return self.every or p.dtype in self.dtypes
