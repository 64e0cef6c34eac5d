"""A Trainer that stays attached when it makes another accelerator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from ..config import ScalerConfig
from ..models import is_replaying
from ..overflow import refuse_unmatched
from .attaching import attach, detach, scaled_class
from .attachment import Attachment, attachment_of, resolved


class ScaledTrainer(Trainer):  # type: ignore[misc]
    """A Trainer with an attached accelerator, also after a hyperparameter search made a new one."""

    _scaler_config: ScalerConfig
    _stock_class: type

    @property
    def _attachment(self) -> Attachment | None:
        return attachment_of(getattr(self, "accelerator", None))

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, then ``attach``; the telemetry of the old accelerator ends here."""
        if self._attachment is not None:
            self._attachment.recorder.close()
        super().create_accelerator_and_postprocess()
        attach(self.accelerator, self._scaler_config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; at its end, also by an exception, the last step is published."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._attachment is not None:
                self._attachment.finish()

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """False: the accelerator clips DTensors of any meshes; the Trainer's own clip would see
        gradients that are still scaled."""
        return False

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; where a window may be made again, this call is recorded for it."""
        explainer = self._attachment and self._attachment.explainer
        if not explainer or explainer.recording is None:
            return super().compute_loss(model, *args, **kwargs)
        return explainer.recording.call(self._own_compute_loss, model, *args, **kwargs)

    def _own_compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).items() if is_replaying() else ()
        # TRL's trainers count tokens and add up metrics here, which is for the first run alone.
        counts = {k: copy.deepcopy(v) for k, v in own if "metrics" in k or isinstance(v, int)}
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            self.__dict__.update(counts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; adds the scaler's values to the values of the training. Telemetry notes
        the values of an evaluation."""
        if self._attachment is not None:
            self._attachment.recorder.note(logs)
        if "loss" in logs and self._scaler_config.log_values:
            for name, value in self.accelerator.scaler_history.progress().items():
                logs.setdefault(f"scaler_{name}", value)
        super().log(logs, *args, **kwargs)


def attach_trainer(trainer: Any, base: ScalerConfig | None, fields: Mapping[str, Any]) -> Any:
    """:func:`accel_scaler.attach` for a Trainer or a subclass. Raises ``ConfigError`` also for a
    glob in ``fp32_modules`` that matches no module of its model."""
    if trainer.model_init is None:
        refuse_unmatched([trainer.model], resolved(base, fields)[0].fp32_modules)
    attached = attachment_of(attach(trainer.accelerator, base, **fields))
    assert attached is not None
    trainer._scaler_config = attached.config  # for later accelerators, too
    if not isinstance(trainer, ScaledTrainer):
        trainer._stock_class = type(trainer)
        trainer.__class__ = scaled_class(type(trainer), ScaledTrainer)
    return trainer


def detach_trainer(trainer: Any) -> Any:
    try:
        detach(trainer.accelerator)
    finally:  # a StepError is raised once everything is undone
        if attachment_of(trainer.accelerator) is None and isinstance(trainer, ScaledTrainer):
            trainer.__class__ = trainer._stock_class
            del trainer._scaler_config, trainer._stock_class
    return trainer
