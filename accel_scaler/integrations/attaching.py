"""``attach`` and ``detach``, for an accelerator or a Trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar, cast

from accelerate import Accelerator

from ..config import Asked, ScalerConfig
from ..errors import ConfigError, OrderError, shown
from .accelerator import ScaledAccelerator
from .attachment import attachment_of, begin

T = TypeVar("T")

_scaled_classes: dict[type, type] = {}


def attach(target: T, config: ScalerConfig | Mapping[str, Any] | None = None, **settings: Any) -> T:
    """Scale ``target``'s fp16 training with :class:`GradScaler`; returns ``target``.

    >>> attach(accelerator)                        # settings of the environment, else defaults
    >>> attach(accelerator, step_mode="overlap")   # this one, and those of the environment
    >>> attach(accelerator, {"step_mode": "overlap", "min_scale": 1.0})    # the same for several
    >>> attach(accelerator, ScalerConfig(step_mode="overlap"))             # these, all of them

    Args:
        target: an ``accelerate.Accelerator``, before or after ``prepare``, or a
            ``transformers.Trainer``. Attaching again changes nothing, unless settings are given
            that are not in force: then detach first.
        config: a :class:`ScalerConfig` is every setting, and the environment is not read. A
            mapping is some of them, by field. Settings that stay at their defaults and are not
            asked for by name are taken from the scaler that is replaced (``GradScalerKwargs``),
            as is its state.
        **settings: fields of :class:`ScalerConfig`; they outrank ``config``, and that
            ``ACCEL_SCALER_<FIELD>`` in the environment, where a launcher puts its flags and the
            section of a config file.

    Raises:
        UnsupportedError: DeepSpeed, Megatron-LM, XLA or fp8 (they scale themselves), a model
            compiled before it could be autocast, an optimizer that another thread cannot step.
        ConfigError: a wrong setting, a file that cannot be written, or a target of another type.
        OrderError: it is attached with other settings.
    """
    asked = Asked(config, settings, "attach")
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.attach_trainer(target, asked))
    if not isinstance(target, Accelerator):
        raise ConfigError(
            f"attach: got a {type(target).__name__}, expected an accelerate.Accelerator or a "
            "transformers.Trainer."
        )
    accelerator: Any = target
    attached = attachment_of(accelerator)
    if attached is not None and not isinstance(accelerator, ScaledAccelerator):
        attached.take_off(accelerator)  # an attach that was interrupted before its end
        attached = None
    if attached is not None:
        if asked.is_nothing:
            return target
        wanted = asked.changes(attached.config)
        if any(asked.changes(own) == own for own in (attached.config, attached.asked_config)):
            attached.is_default = False
            return target
        if not attached.is_default:
            raise OrderError(
                f"attach: already attached with {_differing(attached.config, wanted)}; call "
                "detach(accelerator) first."
            )
        detach(accelerator)
    attached = begin(accelerator, asked)
    if attached is not None and not isinstance(accelerator, ScaledAccelerator):
        attached.stock_class = type(accelerator)
        accelerator.__class__ = scaled_class(type(accelerator), ScaledAccelerator)
    return target


def _differing(now: ScalerConfig, wanted: ScalerConfig) -> str:
    before, after = asdict(now), asdict(wanted)
    return ", ".join(
        f"{name}={shown(value)}, not {shown(after[name])}"
        for name, value in before.items()
        if value != after[name]
    )


def attach_default(target: Any) -> None:
    """:func:`attach`, with settings that are outranked by an ``attach(target, config)`` to come."""
    attached = attachment_of(attach(target))
    if attached is not None:
        attached.is_default = True


def detach(target: T) -> T:
    """Undo :func:`attach`: stock classes, the stock scaler with the present scale. Idempotent.

    Raises:
        OrderError: a window is open; nothing was undone.
        StepError: the step in hand failed; detached all the same.
    """
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.detach_trainer(target))
    attached = attachment_of(target)
    if attached is not None:
        attached.take_off(target)
    return target


def scaled_class(cls: Any, scaled: Any) -> Any:
    """``scaled``, or for a user's own subclass of its base, ``scaled`` on top of that."""
    if cls in scaled.__bases__:
        return scaled
    if cls not in _scaled_classes:
        _scaled_classes[cls] = type(f"Scaled{cls.__name__}", (scaled, cls), {})
    return _scaled_classes[cls]


def _trainer_module(target: object) -> Any:
    """The Trainer layer if ``target`` is a Trainer; never imports transformers by itself."""
    transformers = sys.modules.get("transformers.trainer")
    if transformers is None or not isinstance(target, transformers.Trainer):
        return None
    from . import trainer

    return trainer
