"""What a Trainer needs beyond its accelerator: to stay attached when that is made again."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from .attach import ScaledAccelerator, attach, detach, scaled_class, stock_class
from .config import ScalerConfig

__all__ = ["attach_trainer", "detach_trainer"]


class ScaledTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose accelerators are attached, the later ones of a search too."""

    _scaler_config: ScalerConfig

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, then ``attach``."""
        super().create_accelerator_and_postprocess()
        attach(self.accelerator, self._scaler_config)


def attach_trainer(trainer: Any, config: ScalerConfig | None) -> Any:
    """:func:`accel_scaler.attach` for a Trainer or a subclass."""
    attach(trainer.accelerator, config)
    if isinstance(trainer.accelerator, ScaledAccelerator) and not isinstance(
        trainer, ScaledTrainer
    ):
        # What the environment said now holds for later accelerators too.
        trainer._scaler_config = trainer.accelerator._scaler_config
        trainer.__class__ = scaled_class(type(trainer), ScaledTrainer)
    return trainer


def detach_trainer(trainer: Any) -> Any:
    """:func:`accel_scaler.detach` for a Trainer."""
    detach(trainer.accelerator)
    if isinstance(trainer, ScaledTrainer):
        trainer.__class__ = stock_class(type(trainer), ScaledTrainer)
        del trainer._scaler_config
    return trainer
