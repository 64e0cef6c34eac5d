"""Every random number generator that a forward may ask, at one moment."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices import is_capturing


@dataclass(frozen=True, slots=True)
class RandomState:
    """Python's, NumPy's (where it is loaded) and torch's, of the host and of one device."""

    python: Any
    numpy: Any
    host: Tensor
    device: Tensor | None
    where: torch.device

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """As they are. Does not synchronise."""
        numpy: Any = sys.modules.get("numpy.random")
        module = _generators_of(device)
        return cls(
            random.getstate(),
            None if numpy is None else numpy.get_state(),
            torch.get_rng_state(),
            None if module is None else module.get_rng_state(device),
            device,
        )

    def put_back(self) -> None:
        """Random numbers go on from there."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            _generators_of(self.where).set_rng_state(self.device, self.where)


def _generators_of(device: torch.device) -> Any:
    """The device's own module, where it has generators that may be asked now."""
    if device.type in ("cpu", "meta") or is_capturing():
        return None
    module = torch.get_device_module(device.type)
    return module if hasattr(module, "get_rng_state") else None
