"""What a Trainer needs beyond its accelerator: to stay attached when that is made again."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer

from .attach import (
    ScaledAccelerator,
    ScaledOptimizer,
    attach,
    detach,
    scaled_class,
    stock_class,
)
from .config import ScalerConfig, StepError

__all__ = ["attach_trainer", "detach_trainer"]

logger = logging.getLogger("accel_scaler")


class ScaledTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose accelerators are attached, the later ones of a search too."""

    _scaler_config: ScalerConfig

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, then ``attach``."""
        super().create_accelerator_and_postprocess()
        attach(self.accelerator, self._scaler_config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; however it ends, the parameters are the newest afterwards."""
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            try:
                self._synchronize()
            except StepError:  # must not hide what ended the training
                logger.exception("the last optimizer step failed")
            raise
        self._synchronize()
        return result

    def _synchronize(self) -> None:
        for optimizer in self.accelerator._optimizers:
            if isinstance(optimizer, ScaledOptimizer):
                optimizer.synchronize()


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
    try:
        detach(trainer.accelerator)
    except StepError:  # detached all the same
        _make_plain(trainer)
        raise
    _make_plain(trainer)
    return trainer


def _make_plain(trainer: Any) -> None:
    if isinstance(trainer, ScaledTrainer):
        trainer.__class__ = stock_class(type(trainer), ScaledTrainer)
        del trainer._scaler_config
