"""What a Trainer needs beyond its accelerator: to stay attached when that is made again."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from ..config import Asked, ScalerConfig
from ..errors import StepError
from ..precision import refuse_unmatched
from ..scaling import is_sharded
from ..telemetry import TrackedWindow
from .attaching import attach, detach, scaled_class
from .attachment import Attachment, attachment_of
from .trackers import Sink, as_values, takes_histograms, write_histograms

logger = logging.getLogger("accel_scaler")

INTEGRATIONS: dict[Any, str] = {
    callback: name for name, callback in INTEGRATION_TO_CALLBACK.items()
}
"""The Trainer's reporting callbacks, and what ``report_to`` calls them."""


class ScaledTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose accelerators are attached, the later ones of a search too."""

    _scaler_config: ScalerConfig
    _stock_class: type
    _scaler_logged_at: int | None = None
    """The step at which the scaler's values were logged last, with the training's own."""

    @property
    def _attachment(self) -> Attachment | None:
        return attachment_of(getattr(self, "accelerator", None))

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, then ``attach``; the telemetry of the one before ends here."""
        if self._attachment is not None:
            self._attachment.recorder.close()
        super().create_accelerator_and_postprocess()
        attach(self.accelerator, self._scaler_config)
        Reporting.begin(self)

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
        attachment = self._attachment
        if "loss" in logs:
            for name, value in self.accelerator.scaler_history.progress().items():
                logs.setdefault(f"scaler_{name}", value)
            if attachment is not None and (alert := attachment.trackers.take_pending()):
                logs.setdefault("scaler_alert", alert)
            self._scaler_logged_at = self.state.global_step
        if "train_runtime" in logs and attachment is not None and attachment.trackers.follows:
            self._finish()  # its callbacks are ended next
        super().log(logs, *args, **kwargs)


class Reporting:
    """Tells a Trainer's reporting callbacks of windows: as the Trainer would log them, at its
    global step, but not on the screen.

    Args:
        trainer: held weakly.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    @classmethod
    def begin(cls, trainer: Any) -> None:
        """With the accelerator that the Trainer has now."""
        attached = attachment_of(trainer.accelerator)
        if attached is not None:
            attached.trackers.others = cls(trainer)

    def __call__(self) -> list[Sink]:
        """Those that ``report_to`` names, and others of their kinds."""
        trainer: Any = self._trainer()
        sinks = []
        for callback in () if trainer is None else trainer.callback_handler.callbacks:
            kinds = (each for each in type(callback).__mro__ if each in INTEGRATIONS)
            kind: Any = next(kinds, None)
            if kind is not None and kind.on_log is not TrainerCallback.on_log:
                name, writer = INTEGRATIONS[kind], getattr(callback, "tb_writer", None)
                deliver = partial(self._deliver, name, callback)
                sinks.append(Sink(name, takes_histograms(name, writer), deliver))
        return sinks

    def _deliver(self, name: str, callback: Any, window: TrackedWindow) -> None:
        trainer: Any = self._trainer()
        logs = as_values(name, window, "scaler_gradients/")
        if trainer._scaler_logged_at != trainer.state.global_step:
            logs |= {key.replace("/", "_", 1): value for key, value in window.values.items()}
        if logs:
            state, control = trainer.state, trainer.control
            callback.on_log(trainer.args, state, control, logs=logs, model=trainer.model)
        write_histograms(getattr(callback, "tb_writer", None), window, trainer.state.global_step)


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
        Reporting.begin(trainer)
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
        trainer.__dict__.pop("_scaler_logged_at", None)
    if failed is not None:
        raise failed
    return trainer
