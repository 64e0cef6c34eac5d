"""The class of an attached accelerator, which overrides each method that works differently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim import Optimizer

from ..config import ScalerConfig
from ..errors import UnsupportedError
from ..models import untraced
from ..scaling import pause_before_the_end
from ..telemetry import History
from .attachment import Attachment, requested, resolved
from .autocast import add_autocast
from .optimizer import adopt, inner_of, refuse_unsuitable


class ScaledAccelerator(Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` whose optimizer step is checked, in fp16 with a loss scale.

    Takes every argument of ``Accelerator``, and ``scaler_config``: the ``config`` of
    :func:`attach`, which usually makes one; ``detach`` makes it an ``Accelerator``, and refuses
    subclasses. Without ``mixed_precision="fp16"`` nothing is scaled, and ``scaler`` is None.
    """

    _attachment: Attachment

    def __init__(
        self,
        *args: Any,
        scaler_config: ScalerConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        wanted = resolved(*requested(scaler_config, {}))
        super().__init__(*args, **kwargs)
        attachment = Attachment(self, *wanted)
        attachment.stock_class = Accelerator
        attachment.install(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "an attached accelerator cannot be copied or pickled; call detach(accelerator) first."
        )

    @property
    def scaler_history(self) -> History:
        """The history of the windows: records, totals, ``summary()``."""
        return self._attachment.recorder.history

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's.

        Raises:
            UnsupportedError: an optimizer that another thread cannot step, or a module of
                ``fp32_modules`` that cannot run in float32.
        """
        attachment = self._attachment
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        refuse_unsuitable(optimizers, attachment)
        for each in args:
            if isinstance(each, torch.nn.Module):
                attachment.fp32_modules.refuse_uncastable(each)
        registered = (self._models, self._optimizers, self._schedulers, self._dataloaders)
        before, adopted = list(map(list, registered)), set(attachment.optimizers)
        try:
            result = super().prepare(*args, **kwargs)
            for model in self._models:  # FSDP2's models do not pass prepare_model
                attachment.fp32_modules.enable(model)
            attachment.make_ready(optimizers)
        except BaseException:
            # A second prepare would register it twice, and an LR scheduler asks the first of two
            # wrappers whether a step was skipped.
            for optimizer in set(attachment.optimizers) - adopted:
                optimizer.leave(attachment)
            for kind, known in zip(registered, before, strict=True):
                kind[:] = known
            raise
        return result

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; registers the parameters' names for errors and telemetry.

        Raises:
            UnsupportedError: a model that was prepared and compiled without autocast before, or
                with a module of ``fp32_modules`` that cannot run in float32.
        """
        attachment = self._attachment
        attachment.fp32_modules.refuse_uncastable(model)
        prepared = super().prepare_model(model, *args, **kwargs)
        if attachment.added_autocast and self.native_amp:
            add_autocast(self, prepared)
        attachment.fp32_modules.enable(prepared)  # before a compiler traces its first forward
        attachment.watch(prepared, self.unwrap_model(prepared))
        attachment.compare_settings(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As Accelerate's, with this package's optimizer wrapper.

        Raises:
            UnsupportedError: an optimizer that another thread cannot step, with the reason.
        """
        refuse_unsuitable([optimizer], self._attachment)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        adopt(prepared, self._attachment)
        return prepared

    @untraced
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate's: divide by the accumulation steps, scale, backward.

        Raises:
            ConfigError: a glob in ``fp32_modules`` matches no module; no gradient was computed.
        """
        attachment = self._attachment
        attachment.fp32_modules.refuse_unmatched(attachment.models)  # all models are prepared now
        is_last = self.sync_gradients
        for optimizer in list(attachment.optimizers):
            if is_last:  # before a clip reads the gradients
                optimizer.follow_parameters()
            optimizer.dropped.backward(is_last)
        attachment.boundary.before_backward(loss, self.gradient_accumulation_steps, is_last)
        with attachment.float16():
            super().backward(loss, **kwargs)
        attachment.boundary.after_backward()

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As Accelerate's; also on a CPU without float16 instructions float16 products are fast."""
        with self._attachment.float16(), super().autocast(*args, **kwargs):
            yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """As Accelerate's. In fp16 every rank leaves it with the scale of the rank with the most
        batches: other ranks have counted fewer windows towards growth."""
        with super().join_uneven_inputs(joinables, even_batches):
            yield
        if self._attachment.scales:
            self._attachment.share_scale()

    @untraced
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer`` (default: of all prepared ones) in the last
        micro-batch of a window, once; before it do nothing."""
        if self.sync_gradients:
            chosen = self._optimizers if optimizer is None else optimizer
            self._attachment.boundary.unscale(inner_of(chosen))

    @untraced
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Unscale, then clip the total norm of ``parameters`` to ``max_norm``.

        In fp16 a call before the last micro-batch of a window changes nothing and returns the
        unscaled norm so far; in bf16 and fp32 it clips, as stock does.

        Returns the total norm before clipping, unscaled, shape (); inf after an overflow.
        Synchronises with the device once.
        """
        # Where nothing is scaled a clip before the last micro-batch is stock's.
        if not (self.sync_gradients or self._attachment.scales):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        boundary = self._attachment.boundary
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return boundary.clipping.norm_so_far(parameters, norm_type)
        if self.distributed_type != DistributedType.FSDP or self.is_fsdp2:
            return boundary.clipping.clip_norm(parameters, max_norm, norm_type)
        if boundary.unscale(owner for owner, *_ in boundary.check.parts(parameters)):
            return torch.full((), float("inf"), dtype=torch.float32, device=self.device)
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        boundary.clipping.note_norm(parameters, norm, max_norm, norm_type)
        return norm

    @untraced
    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Unscale, then clip each element to ``[-clip_value, clip_value]``; in fp16 on the last
        micro-batch only."""
        if self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(parameters, clip_value)  # under FSDP Accelerate refuses
        elif self.sync_gradients or not self._attachment.scales:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            parameters = [p for p in parameters if p.grad is not None]
            self._attachment.boundary.clipping.clip_value(parameters, clip_value)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; adds the ``scaler/...`` values of the last window. Telemetry notes the
        values of an evaluation (``eval...``, ``val...``, ``test...``)."""
        self._attachment.recorder.note(values)
        if self._attachment.config.log_values:
            values = {**self.scaler_history.metrics(), **values}
        super().log(values, *args, **kwargs)

    def end_training(self) -> None:
        """As Accelerate's; first publishes the last step and writes all of the telemetry."""
        self._attachment.finish()
        pause_before_the_end()
        super().end_training()

    def free_memory(self, *objects: Any) -> list[Any]:
        """As Accelerate's; first writes all of the telemetry and drops the parameters."""
        self._attachment.recorder.flush()
        self._attachment.scaler.release(*inner_of(self._optimizers))
        return super().free_memory(*objects)  # type: ignore[no-any-return]

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's; an open window is abandoned."""
        super().load_state(*args, **kwargs)
        self._attachment.scaler.abandon_window()
