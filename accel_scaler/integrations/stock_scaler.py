"""The scaler that ``attach`` replaces: its settings and its state; and other scalers, refused."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from accelerate import Accelerator

from ..config import ScalerConfig
from ..errors import ConfigError, UnsupportedError, shown
from ..scaling import GradScaler

_SCALED_ELSEWHERE = {
    "DEEPSPEED": "DeepSpeed's engine scales the loss; set `fp16: {initial_scale_power, "
    "loss_scale_window, hysteresis, min_loss_scale}` in its config",
    "MEGATRON_LM": "Megatron-LM's optimizer scales the loss; set --initial-loss-scale, "
    "--loss-scale-window, --hysteresis and --min-loss-scale there",
    "XLA": "on an XLA device torch_xla scales with its own GradScaler; TPUs have bfloat16, which "
    "needs none",
    "fp8": "the fp8 backend (TransformerEngine, MS-AMP or torchao) scales tensor by tensor; use "
    "mixed_precision='fp16' for this package",
}


def scaled_elsewhere(kind: str) -> str | None:
    """The library that scales instead of this package, and its settings; None: there is none.
    ``kind``: the name of a ``DistributedType``, or of a precision."""
    return _SCALED_ELSEWHERE.get(kind)


def refuse_other_scalers(accelerator: Accelerator) -> None:
    """Raise ``UnsupportedError`` where something else scales, with its name."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    # The kind first: under DeepSpeed Accelerate reads the precision from DeepSpeed's own config.
    if who := scaled_elsewhere(kind) or scaled_elsewhere(accelerator.mixed_precision):
        raise UnsupportedError(f"attach: {who}.")


SCALE_SETTINGS = (
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"),
    *("max_scale", "hysteresis", "heal", "on_overflow"),
)
"""Settings of the loss scale and of overflows, which only float16 has."""


def refuse_unscaled(config: ScalerConfig, precision: str) -> None:
    """Raise ``ConfigError`` for a setting that means nothing in this precision."""
    found = [name for name in SCALE_SETTINGS if name in config.changed()]
    if precision != "fp16" and found:
        raise ConfigError(
            f"{found[0]}={shown(getattr(config, found[0]))}: got mixed_precision={precision!r}, "
            f"which has no loss scale; leave out {', '.join(found)}, or use 'fp16'."
        )
    if precision == "fp16" and config.enabled and not config.skip_nonfinite:
        raise ConfigError(
            "skip_nonfinite=False: got mixed_precision='fp16', where a step that overflows is "
            "skipped to find the scale; expected True, or another precision."
        )


def scaler_settings(
    accelerator: Any, config: ScalerConfig, stock: Any, named: Collection[str]
) -> dict[str, Any]:
    """Arguments of :class:`GradScaler`: the fields of ``config`` that are ``named`` or not at their
    defaults, else the settings of the replaced scaler."""
    own = inspect.signature(GradScaler).parameters
    wanted = config.changed() | {name: getattr(config, name) for name in named}
    changed = {name: value for name, value in wanted.items() if name in own}
    if accelerator.mixed_precision != "fp16":
        return changed
    handler = accelerator.scaler_handler
    values: dict[str, Any] = {} if handler is None else handler.to_kwargs()
    return values | ({} if stock is None else {"enabled": stock.is_enabled()}) | changed
