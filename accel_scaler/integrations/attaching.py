"""``attach`` and ``detach``, for an accelerator or a Trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from accelerate import Accelerator

from ..config import ScalerConfig
from ..errors import ConfigError, OrderError, UnsupportedError, shown
from .accelerator import ScaledAccelerator
from .attachment import Attachment, attachment_of, requested, resolved

T = TypeVar("T")

_scaled_classes: dict[type, type] = {}


def attach(target: T, config: ScalerConfig | Mapping[str, Any] | None = None, **settings: Any) -> T:
    """Check each optimizer step of ``target``, in fp16 with a :class:`GradScaler`; returns it.

    >>> attach(accelerator)                        # settings of the environment, else defaults
    >>> attach(accelerator, step_mode="overlap")   # this setting, and the environment's
    >>> attach(accelerator, {"step_mode": "overlap", "min_scale": 1.0})    # the same for several
    >>> attach(accelerator, ScalerConfig(step_mode="overlap"))             # these settings alone

    Args:
        target: an ``accelerate.Accelerator``, before or after ``prepare``, or a
            ``transformers.Trainer``. A second call without settings, or with the settings in force,
            does nothing.
        config: a :class:`ScalerConfig`, beside which the environment is not read, or a mapping of
            some of its fields. A setting of the scale that no source sets (in a ScalerConfig: a
            field at its default) comes from the replaced scaler (``GradScalerKwargs``), as does
            the state.
        **settings: fields of :class:`ScalerConfig`; they take precedence over ``config``, which
            takes precedence over ``ACCEL_SCALER_<FIELD>`` in the environment.

    Raises:
        UnsupportedError: DeepSpeed, Megatron-LM, XLA or fp8 (they scale themselves), a model
            compiled before it could be autocast, an optimizer that another thread cannot step.
        ConfigError: a wrong setting, one of the scale without fp16, a telemetry file that cannot be
            written, another kind of target.
        OrderError: ``target`` is attached with other settings.
    """
    base, fields = requested(config, settings)
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.attach_trainer(target, base, fields))
    if not isinstance(target, Accelerator):
        raise ConfigError(
            f"attach: got a {type(target).__name__}, expected an accelerate.Accelerator or a "
            "transformers.Trainer."
        )
    accelerator: Any = target
    attached = attachment_of(accelerator)
    if attached is not None:
        if base is None and not fields:
            return target
        in_force = (attached.config, attached.requested_config)
        if any(replace(base or own, **fields) == own for own in in_force):
            attached.is_default = False
            return target
        if not attached.is_default:
            now, wanted = attached.config, replace(base or attached.config, **fields)
            differing = [
                f"{name}={shown(getattr(now, name))}, not {shown(getattr(wanted, name))}"
                for name in ScalerConfig.__dataclass_fields__
                if getattr(now, name) != getattr(wanted, name)
            ]
            raise OrderError(
                f"attach: already attached with {', '.join(differing)}; call detach(accelerator) "
                "first."
            )
        detach(accelerator)
    Attachment(accelerator, *resolved(base, fields)).install(accelerator)
    accelerator.__class__ = scaled_class(type(accelerator), ScaledAccelerator)
    return target


def attach_default(target: Any) -> Attachment:
    """:func:`attach`, for which a later ``attach(target, config)`` may give other settings."""
    attached = attachment_of(attach(target))
    assert attached is not None
    attached.is_default = True
    return attached


def detach(target: T) -> T:
    """Undo :func:`attach`: stock classes, the stock scaler with the present scale. Idempotent.

    Waits for the step in flight.

    Raises:
        OrderError: a window is open; nothing was undone.
        UnsupportedError: a subclass of :class:`ScaledAccelerator`; nothing was undone.
        StepError: the step in flight failed; everything was undone.
    """
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.detach_trainer(target))
    attached = attachment_of(target)
    if attached is not None:
        if type(target) is not scaled_class(attached.stock_class, ScaledAccelerator):
            name = type(target).__name__
            raise UnsupportedError(
                f"detach: got a {name}, a subclass of ScaledAccelerator, whose methods would be "
                f"lost; derive {name} from accelerate.Accelerator, and attach(accelerator)."
            )
        attached.remove(target)
    return target


def scaled_class(cls: Any, scaled: Any) -> Any:
    """``scaled``, or for a subclass of its base a class with both bases."""
    if cls in scaled.__bases__:
        return scaled
    if cls not in _scaled_classes:
        _scaled_classes[cls] = type(f"Scaled{cls.__name__}", (scaled, cls), {})
    return _scaled_classes[cls]


def _trainer_module(target: object) -> Any:
    """``trainer.py`` if ``target`` is a Trainer, without an import of transformers."""
    transformers = sys.modules.get("transformers.trainer")
    if transformers is None or not isinstance(target, transformers.Trainer):
        return None
    from . import trainer

    return trainer
