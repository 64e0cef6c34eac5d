"""A model prepared for fp16 as for training, without a loop and without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch.nn import Module

from ..config import ScalerConfig
from ..errors import UnsupportedError
from ..overflow_finder import without_wrappers
from .attaching import attach
from .attachment import attachment_of


def prepare_alone(
    model: Module, precision: str, on_cpu: bool
) -> tuple[Module, Callable[[], AbstractContextManager[None]]]:
    """``(the model, what a backward runs in)``, as :func:`attach` and ``prepare`` have them.

    Args:
        model: is wrapped in place, and moved to the device.
        precision: ``mixed_precision`` of the accelerator.
        on_cpu: False: on the device that Accelerate chooses.

    Raises:
        UnsupportedError: another accelerator of this process has other settings.
    """
    try:
        accelerator: Any = Accelerator(mixed_precision=precision, cpu=on_cpu, dynamo_backend="no")
    except ValueError as error:
        raise UnsupportedError(
            f"Accelerate cannot begin here: {error} Leave the Accelerator out of what makes the "
            "model."
        ) from None
    if precision == "fp16":
        attach(accelerator, ScalerConfig())
    attachment = attachment_of(accelerator)
    around = nullcontext if attachment is None else attachment.float16
    return without_wrappers(accelerator.unwrap_model(accelerator.prepare_model(model))), around
