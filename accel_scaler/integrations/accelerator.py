"""The Accelerate layer: ScaledAccelerator, its optimizer wrapper, attach and detach.

``attach`` changes the class of an accelerator (and of the optimizers it prepared), as torch's
``fully_shard`` does with modules: every change is an overridden method, and ``detach`` changes
the class back. No function of another library is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor
from torch.optim import Optimizer

from ..async_optimizer import Worker, threads_of
from ..config import ScalerConfig
from ..errors import ConfigError, OrderError, StepError, UnsupportedError
from ..optimizer_step import Boundary, stepper_of
from ..telemetry import History, make_recorder
from .autocast import add_autocast, add_products, remove_autocast, remove_products
from .checkpoints import loading, saving
from .cpu_float16 import float16_products
from .optimizer import ScaledOptimizer, adopt, become, forbid_sharing, forbid_unsuitable, inner_of
from .stock_scaler import facts_of, forbid_other_scalers, make_scaler

__all__ = ["ScaledAccelerator", "ScaledOptimizer", "attach", "detach"]

T = TypeVar("T")

_SCALED_CLASSES: dict[type, type] = {}

_OWN = ("_boundary", "_stock_scaler", "_scaler_config", "_asked_config", "_worker")
"""What an attached accelerator has beyond a stock one."""


class ScaledAccelerator(Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` whose fp16 training is scaled by :class:`GradScaler`.

    Takes every argument of ``Accelerator``, and ``scaler_config``. Usually made by
    :func:`attach`. Without ``mixed_precision="fp16"`` it is a plain ``Accelerator``.
    """

    _boundary: Boundary | None = None

    def __init__(self, *args: Any, scaler_config: ScalerConfig | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _set_up(self, scaler_config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as what it was before :func:`attach`, with a copy of the scaler; not attached.

        Its optimizers step like stock. Waits for the step in hand.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, ScaledOptimizer):
                optimizer.synchronize()
        of_attach = ("_made_by_attach", "_attached_by_launcher")
        state = {k: v for k, v in self.__dict__.items() if k not in (*_OWN, *of_attach)}
        made = self.__dict__.get("_made_by_attach", False)
        cls = stock_class(type(self), ScaledAccelerator) if made else type(self)
        return _empty, (cls,), state

    @property
    def scaler_history(self) -> History:
        """What the scaler did: one record a window, totals, ``summary()``."""
        return History() if self._boundary is None else self._boundary.history

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, and takes the parameters' names for errors and telemetry."""
        prepared = super().prepare_model(model, *args, **kwargs)
        if self._boundary is not None:
            if self._casts_on_cpu:
                add_products(self, prepared)
            self._boundary.recorder.watch(prepared, self.unwrap_model(prepared))
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As Accelerate's, with this package's optimizer wrapper.

        Raises:
            UnsupportedError: an optimizer that another thread cannot step, with the reason.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self._boundary is not None:
            try:
                adopt(self, prepared)
            except UnsupportedError:
                self._optimizers.remove(prepared)
                raise
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate's: divide by the accumulation steps, scale, backward."""
        if self._boundary is None:
            super().backward(loss, **kwargs)
            return
        for optimizer in self._optimizers:
            if isinstance(optimizer, ScaledOptimizer):
                optimizer.follow_parameters()  # before anything looks at the gradients
        recorder = self._boundary.recorder
        self._boundary.before_backward()
        recorder.before_backward(loss)
        with recorder.span("backward"), self._products():
            super().backward(loss, **kwargs)

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As Accelerate's; on a CPU without float16 instructions its products are fast too."""
        with self._products(), super().autocast(*args, **kwargs):
            yield

    @property
    def _casts_on_cpu(self) -> bool:
        cpu = self.device.type == "cpu"
        return cpu and self._boundary is not None and self.mixed_precision == "fp16"

    def _products(self) -> AbstractContextManager[None]:
        return float16_products() if self._casts_on_cpu else nullcontext()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer`` (default: all prepared), once a window.

        Off the boundary of an accumulation window it does nothing.
        """
        if self._boundary is None:
            super().unscale_gradients(optimizer)
        elif self.sync_gradients:
            chosen = self._optimizers if optimizer is None else optimizer
            self._boundary.unscale(inner_of(chosen))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Unscale, then clip the total norm of ``parameters`` to ``max_norm``.

        On the last micro-batch of a window it clips; before that it changes nothing and
        returns the unscaled norm so far, so it may be called on every micro-batch.

        Returns the total norm before clipping, unscaled, shape (); inf after an overflow.
        Synchronises with the device once.
        """
        if self._boundary is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            if self.scaler is None:  # only telemetry is wanted: as stock, which clips here too
                return super().clip_grad_norm_(parameters, max_norm, norm_type)
            return self._boundary.norm_so_far(parameters, norm_type)
        with self._boundary.recorder.span("clip"):
            if self.distributed_type != DistributedType.FSDP:
                return self._boundary.clip_norm(parameters, max_norm, norm_type)
            if self._boundary.unscale(self._boundary.owners(parameters)):
                return torch.full((), float("inf"), device=self.device)
            norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
            self._boundary.note_norm(parameters, norm, max_norm, norm_type)
            return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Unscale, then clip each element to ``[-clip_value, clip_value]``; at boundaries."""
        if self._boundary is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients and self.scaler is not None:
            return
        if self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(parameters, clip_value)  # refuses
            return
        parameters = [p for p in parameters if p.grad is not None]
        self._boundary.clip_value(parameters, clip_value)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; of a parameter (``LocalSGD`` averages them) the newest values."""
        self._finish_steps_of(tensor)
        return super().reduce(tensor, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; of a parameter the newest values."""
        self._finish_steps_of(tensor)
        return super().gather(tensor)

    def _finish_steps_of(self, tensor: Any) -> None:
        """``p.data`` does not wait for what is still to be written to its memory."""
        if self._boundary is None:
            return
        found: list[Tensor] = []
        recursively_apply(found.append, tensor)
        for inner in inner_of(self._optimizers):
            stepper_of(inner).synchronize_memory(found)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; adds ``scaler/...`` values, of the last window, to what is logged."""
        super().log({**self.scaler_history.metrics(), **values}, *args, **kwargs)

    def end_training(self) -> None:
        """As Accelerate's; the last step and the telemetry file are complete then."""
        if self._boundary is not None:
            for optimizer in self._optimizers:
                if isinstance(optimizer, ScaledOptimizer):
                    optimizer.synchronize()
            self._boundary.recorder.flush()
        super().end_training()

    def free_memory(self, *objects: Any) -> list[Any]:
        """As Accelerate's; the telemetry file is complete then, and no parameter is kept."""
        if self._boundary is not None:
            self._boundary.recorder.flush()
            self._boundary.scaler.release(*inner_of(self._optimizers))
        released: list[Any] = super().free_memory(*objects)
        return released

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a folder whose writer is ended is known as incomplete."""
        if self._boundary is None:
            return super().save_state(output_dir, *args, **kwargs)
        with saving(self, output_dir):
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a window that was open is given up.

        Raises:
            ConfigError: ``save_state`` was ended while it wrote this folder.
        """
        if self._boundary is None:
            return super().load_state(input_dir, *args, **kwargs)
        with loading(self, input_dir):
            result = super().load_state(input_dir, *args, **kwargs)
        self._boundary.scaler.abandon_window()
        return result


def _empty(cls: Any) -> Any:
    """An object for unpickling into."""
    return cls.__new__(cls)


def scaled_class(cls: Any, scaled: Any) -> Any:
    """``scaled``, or for a user's own subclass of its base, ``scaled`` on top of that."""
    if cls in scaled.__bases__:
        return scaled
    if cls not in _SCALED_CLASSES:
        _SCALED_CLASSES[cls] = type(f"Scaled{cls.__name__}", (scaled, cls), {})
    return _SCALED_CLASSES[cls]


def stock_class(cls: Any, scaled: Any) -> Any:
    """The way back from :func:`scaled_class`."""
    return cls.__bases__[0] if cls is scaled else cls.__bases__[1]


def attach(target: T, config: ScalerConfig | None = None) -> T:
    """Scale ``target``'s fp16 training with :class:`GradScaler`; returns ``target``.

    Args:
        target: an ``accelerate.Accelerator``, before or after ``prepare``, or a
            ``transformers.Trainer``. Attaching twice changes nothing, unless ``config`` is
            given and differs: then detach first.
        config: the settings; None reads ``ACCEL_SCALER_*`` from the environment. Settings that
            stay at their defaults are taken from the scaler that is replaced
            (``GradScalerKwargs``), as is its state.

    Raises:
        UnsupportedError: DeepSpeed, Megatron-LM, XLA or fp8 (they scale themselves), a model
            compiled before it could be autocast, an optimizer that another thread cannot step.
        ConfigError: a wrong setting, or a target of another type.
    """
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.attach_trainer(target, config))
    if not isinstance(target, Accelerator):
        raise ConfigError(
            f"attach: got a {type(target).__name__}, expected an accelerate.Accelerator or a "
            "transformers.Trainer."
        )
    accelerator: Any = target
    if isinstance(accelerator, ScaledAccelerator) and accelerator._boundary is not None:
        if config is None or config in (accelerator._scaler_config, accelerator._asked_config):
            return target
        if not accelerator.__dict__.pop("_attached_by_launcher", False):
            raise OrderError(
                "attach: already attached with other settings; call detach(accelerator) first."
            )
        detach(accelerator)  # an argument outranks what the launcher attached with
    before = type(accelerator)
    if not isinstance(accelerator, ScaledAccelerator):
        accelerator.__class__ = scaled_class(before, ScaledAccelerator)
    try:
        if _set_up(accelerator, config):
            accelerator._made_by_attach = type(accelerator) is not before
        else:
            accelerator.__class__ = before
    except BaseException:
        accelerator.__class__ = before
        raise
    return target


def detach(target: T) -> T:
    """Undo :func:`attach`: stock classes, the stock scaler with the present scale. Idempotent.

    Raises:
        OrderError: a window is open; nothing was undone.
        StepError: the step in hand failed; detached all the same.
    """
    trainer = _trainer_module(target)
    if trainer is not None:
        return cast(T, trainer.detach_trainer(target))
    accelerator: Any = target
    boundary = getattr(accelerator, "_boundary", None)
    if not isinstance(accelerator, ScaledAccelerator) or boundary is None:
        return target
    scaler, window = boundary.scaler, boundary.scaler.window
    if scaler.is_enabled() and window.opened_by is not None and not window.closed:
        raise OrderError(
            "detach: a window is open, its gradients are scaled. Detach after optimizer.step(), "
            "or zero the gradients and call accelerator.scaler.abandon_window() first."
        )
    stock = accelerator._stock_scaler
    if stock is not None:
        if boundary.scaler.is_enabled():
            stock.load_state_dict(boundary.scaler.state_dict())
            if boundary.scaler.has_begun and stock._scale is None:
                # Or an attach() after this one would take it for a scaler at its start.
                stock._lazy_init_scale_growth_tracker(accelerator.device)
    elif accelerator.mixed_precision == "fp16":
        accelerator.native_amp = False
        for model in accelerator._models:
            remove_autocast(accelerator, model)
    failed: StepError | None = None
    for optimizer in list(boundary.adopted):  # free_memory() forgets them, we do not
        if type(optimizer) is ScaledOptimizer:
            try:
                if optimizer._hooks is not None:
                    optimizer._hooks.close()
            except StepError as error:
                failed = error
            for name in ("_hooks", "_models"):
                optimizer.__dict__.pop(name, None)
            become(optimizer, AcceleratedOptimizer)
            optimizer.scaler = stock
            stepper_of(optimizer).fold_unscale = False
            optimizer.__dict__.pop("_boundary", None)
    for model in accelerator._models:
        remove_products(accelerator, model)
    accelerator.scaler = stock
    accelerator._worker.stop()
    boundary.recorder.close()
    for name in _OWN:
        accelerator.__dict__.pop(name)
    if accelerator.__dict__.pop("_made_by_attach", False):
        accelerator.__class__ = stock_class(type(accelerator), ScaledAccelerator)
    if failed is not None:
        raise failed
    return target


def _trainer_module(target: object) -> Any:
    """The Trainer layer if ``target`` is a Trainer; never imports transformers by itself."""
    transformers = sys.modules.get("transformers.trainer")
    if transformers is None or not isinstance(target, transformers.Trainer):
        return None
    from . import trainer

    return trainer


def _set_up(accelerator: ScaledAccelerator, config: ScalerConfig | None) -> bool:
    """Put the scaler in place; False: not an fp16 run, so nothing to do (said in a warning)."""
    asked = config = ScalerConfig.from_env() if config is None else config
    forbid_other_scalers(accelerator)
    scales = accelerator.mixed_precision == "fp16"
    if not scales:
        warnings.warn(_nothing_to_scale(accelerator, config), stacklevel=3)
        if config.telemetry is None:
            return False
        config = replace(config, step_mode="sync", offload="none", enabled=False)
    stock = accelerator.scaler
    scaler = make_scaler(accelerator, config, stock)
    scaler.sharded = config.sharded or accelerator.distributed_type == DistributedType.FSDP
    for optimizer in accelerator._optimizers:
        forbid_unsuitable(optimizer, config)
    forbid_sharing(accelerator._optimizers, config)
    boundary = Boundary(
        scaler,
        accelerator.device,
        recorder=make_recorder(scaler, config, facts_of(accelerator)),
    )
    if scales and not accelerator.native_amp:
        # Stock Accelerate leaves fp16 on a CPU without autocast and without a scaler.
        add_autocast(accelerator, list(accelerator._models))
        accelerator.native_amp = True
    accelerator._stock_scaler, accelerator._scaler_config = stock, config
    accelerator._asked_config = asked
    accelerator._worker = Worker(threads_of(config))
    accelerator._boundary = boundary
    if scales:
        accelerator.scaler = scaler
    for model in accelerator._models:
        boundary.recorder.watch(model, accelerator.unwrap_model(model))
    for optimizer in accelerator._optimizers:
        adopt(accelerator, optimizer)
    return True


def _nothing_to_scale(accelerator: Accelerator, config: ScalerConfig) -> str:
    says = f"accel_scaler: mixed_precision={accelerator.mixed_precision!r} needs no gradient "
    if config.telemetry is None:
        return says + (
            "scaling; nothing is attached, training is as before. Set it to 'fp16' to scale."
        )
    return says + (
        "scaling; training is as before, only telemetry is written. Set it to 'fp16' to scale."
    )
