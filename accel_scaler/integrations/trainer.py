"""What a Trainer needs beyond its accelerator: to stay attached when that is made again."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from transformers import Trainer, TrainerCallback

from ..config import Asked, ScalerConfig
from ..errors import StepError
from ..overflow import refuse_unmatched
from ..scaling import is_sharded
from .attaching import attach, detach, scaled_class
from .attachment import Attachment, attachment_of

logger = logging.getLogger("accel_scaler")


class ScaledTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose accelerators are attached, the later ones of a search too."""

    _scaler_config: ScalerConfig
    _stock_class: type

    @property
    def _attachment(self) -> Attachment | None:
        return attachment_of(getattr(self, "accelerator", None))

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, then ``attach``; the telemetry of the one before ends here."""
        if self._attachment is not None:
            self._attachment.recorder.close()
        super().create_accelerator_and_postprocess()
        attach(self.accelerator, self._scaler_config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; however it ends, the parameters are the newest afterwards."""
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            try:
                self._finish()
            except StepError:  # must not hide what ended the training
                logger.exception("the last optimizer step failed")
            raise
        self._finish()
        return result

    def _finish(self) -> None:
        """The parameters are the newest, and the telemetry file is complete."""
        if self._attachment is not None:
            try:
                self._attachment.synchronize()
            finally:
                self._attachment.recorder.flush()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; to the training's own values adds the scaler's."""
        if "loss" in logs:
            for name, value in self.accelerator.scaler_history.progress().items():
                logs.setdefault(f"scaler_{name}", value)
        super().log(logs, *args, **kwargs)


class ShowScale(TrainerCallback):  # type: ignore[misc]
    """Scale and skips, at the end of the Trainer's own progress bar.

    Args:
        trainer: held weakly, as callbacks outlive nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the Trainer's own callbacks, which move the bar on."""
        trainer: Any = self._trainer()
        if trainer is None:
            return
        for callback in trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(trainer.accelerator.scaler_history.progress(), refresh=False)


class FinishForReaders(TrainerCallback):  # type: ignore[misc]
    """After each step, before other callbacks may look: where TRL sends its parameters to a
    sampler, or mixes them into a reference model, and nothing can wait, they are the newest.

    Args:
        trainer: held weakly, as callbacks outlive nothing.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Other readers wait where they read."""
        trainer: Any = self._trainer()
        attachment = None if trainer is None else attachment_of(trainer.accelerator)
        if attachment is not None and _reads_unseen(trainer):
            attachment.synchronize()


def _reads_unseen(trainer: Any) -> bool:
    if hasattr(trainer, "weight_transfer"):  # AsyncGRPOTrainer, on a thread of its own
        return True
    sends = getattr(trainer, "use_vllm", False) or getattr(trainer.args, "sync_ref_model", False)
    return bool(sends) and is_sharded(trainer.model_wrapped.parameters())


def attach_trainer(trainer: Any, asked: Asked) -> Any:
    """:func:`accel_scaler.attach` for a Trainer or a subclass.

    Raises:
        ConfigError: a glob in ``fp32_modules`` matches in its model nothing.
    """
    if trainer.accelerator.mixed_precision == "fp16" and trainer.model_init is None:
        refuse_unmatched([trainer.model], asked.resolved().fp32_modules)
    attached = attachment_of(attach(trainer.accelerator, asked.config, **asked.settings))
    if attached is not None:
        # What the environment said now holds for later accelerators too.
        trainer._scaler_config = attached.config
        if not isinstance(trainer, ScaledTrainer):
            trainer._stock_class = type(trainer)
            trainer.__class__ = scaled_class(type(trainer), ScaledTrainer)
            trainer.add_callback(ShowScale(trainer))
            trainer.add_callback(FinishForReaders(trainer))
    return trainer


def detach_trainer(trainer: Any) -> Any:
    """:func:`accel_scaler.detach` for a Trainer."""
    failed: StepError | None = None
    try:
        detach(trainer.accelerator)
    except StepError as error:  # detached all the same
        failed = error
    if isinstance(trainer, ScaledTrainer):
        trainer.__class__ = trainer._stock_class
        trainer.remove_callback(ShowScale)
        trainer.remove_callback(FinishForReaders)
        del trainer._scaler_config, trainer._stock_class
    if failed is not None:
        raise failed
    return trainer
