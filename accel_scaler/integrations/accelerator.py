"""ScaledAccelerator: every change to an accelerator is a method overridden here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor
from torch.optim import Optimizer

from ..config import Asked, ScalerConfig
from ..optimizer_step import stepper_of
from ..telemetry import History
from ..untraced import untraced
from .attachment import Attachment, begin
from .autocast import add_autocast, add_emulation
from .optimizer import adopt, inner_of, refuse_unsuitable


class ScaledAccelerator(Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` whose fp16 training is scaled by :class:`GradScaler`.

    Takes every argument of ``Accelerator``, and ``scaler_config``, as :func:`attach` takes its
    ``config``. Usually made by :func:`attach`. Without ``mixed_precision="fp16"`` it is a plain
    ``Accelerator``.
    """

    _attachment: Attachment | None = None

    def __init__(
        self,
        *args: Any,
        scaler_config: ScalerConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        asked = Asked(scaler_config, {}, "scaler_config")
        super().__init__(*args, **kwargs)
        begin(self, asked)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as what it was before :func:`attach`, with a copy of the scaler; not attached.

        Its optimizers step like stock. Waits for the step in hand.
        """
        cls, attachment = type(self), self._attachment
        if attachment is not None:
            attachment.synchronize()
            cls = attachment.stock_class or cls
        state = {name: value for name, value in vars(self).items() if name != "_attachment"}
        return _empty, (cls,), state

    @property
    def scaler_history(self) -> History:
        """What the scaler did: one record a window, totals, ``summary()``."""
        return History() if self._attachment is None else self._attachment.recorder.history

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's.

        Raises:
            UnsupportedError: an optimizer that another thread cannot step, a module of
                ``fp32_modules`` that cannot run in float32, with the reason; nothing was prepared.
        """
        with self._all_or_nothing(args):
            result = super().prepare(*args, **kwargs)
            if self._attachment is not None:
                for model in self._models:  # FSDP2's come by no other way
                    self._attachment.chosen.enable(model)
        return result

    @contextmanager
    def _all_or_nothing(self, objects: Sequence[Any]) -> Iterator[None]:
        """Around their preparation: what can be refused is refused before; what is seen only when
        all is wrapped and placed (FSDP1, a device without streams), and whatever else ends it,
        leaves nothing registered."""
        attachment = self._attachment
        optimizers = [each for each in objects if isinstance(each, Optimizer)]
        if attachment is not None and attachment.is_preparing:
            yield  # of one of those objects
            return
        if attachment is not None:
            refuse_unsuitable(optimizers, attachment.config, are_placed=False)
            for each in objects:
                if isinstance(each, torch.nn.Module):
                    attachment.chosen.refuse_uncastable(each)
        chosen = 0 if attachment is None else attachment.chosen.count
        registered = (self._models, self._optimizers, self._schedulers, self._dataloaders)
        known = {id(each) for kind in registered for each in kind}
        try:
            if attachment is None:
                yield
                return
            attachment.is_preparing = True
            yield
            attachment.take_over(optimizers)
        except BaseException:
            if attachment is not None:
                given = known.union(map(id, objects))  # prepared before: they stay as they are
                attachment.release([o for o in self._optimizers if id(o) not in given])
                attachment.chosen.disable(chosen)
            for kind in registered:
                kind[:] = [each for each in kind if id(each) in known]
            raise
        finally:
            if attachment is not None:
                attachment.is_preparing = False

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's, and takes the parameters' names for errors and telemetry.

        Raises:
            UnsupportedError: it was prepared and compiled without autocast before, or has a module
                of ``fp32_modules`` that cannot run in float32.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.chosen.refuse_uncastable(model)
        prepared = super().prepare_model(model, *args, **kwargs)
        if attachment is not None:
            if attachment.scales and self.native_amp:
                # Of a model that another accelerator has prepared Accelerate changes nothing.
                add_autocast(self, [prepared])
            if attachment.emulates_float16:
                add_emulation(self, prepared)
            attachment.chosen.enable(prepared)  # a compiler traces it in its first forward
            attachment.watch(prepared, self.unwrap_model(prepared))
            attachment.agree(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As Accelerate's, with this package's optimizer wrapper.

        Raises:
            UnsupportedError: an optimizer that another thread cannot step, with the reason.
        """
        with self._all_or_nothing([optimizer]):
            prepared = super().prepare_optimizer(optimizer, device_placement)
            if self._attachment is not None:
                adopt(prepared, self._attachment)
        return prepared

    @untraced
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerate's: divide by the accumulation steps, scale, backward.

        Raises:
            ConfigError: a glob in ``fp32_modules`` matches no module; nothing was done.
        """
        attachment = self._attachment
        if attachment is None:
            super().backward(loss, **kwargs)
            return
        attachment.check_chosen()
        attachment.follow_parameters()  # before anything looks at the gradients
        accumulation = self.gradient_accumulation_steps
        attachment.boundary.before_backward(loss, accumulation)
        with self._emulation():
            super().backward(loss, **kwargs)
        attachment.boundary.after_backward(self.step, accumulation)

    @contextmanager
    def autocast(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As Accelerate's; on a CPU without float16 instructions its products are fast too."""
        with self._emulation(), super().autocast(*args, **kwargs):
            yield

    def _emulation(self) -> AbstractContextManager[None]:
        return nullcontext() if self._attachment is None else self._attachment.float16()

    @untraced
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer`` (default: all prepared), once a window.

        Off the boundary of an accumulation window it does nothing.
        """
        if self._attachment is None:
            super().unscale_gradients(optimizer)
        elif self.sync_gradients:
            chosen = self._optimizers if optimizer is None else optimizer
            self._attachment.boundary.unscale(inner_of(chosen))

    @untraced
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Unscale, then clip the total norm of ``parameters`` to ``max_norm``.

        On the last micro-batch of a window it clips; before that it changes nothing and
        returns the unscaled norm so far, so it may be called on every micro-batch.

        Returns the total norm before clipping, unscaled, shape (); inf after an overflow.
        Synchronises with the device once.
        """
        attachment = self._attachment
        # Where only telemetry is wanted, stock clips on every micro-batch.
        if attachment is None or not (self.sync_gradients or attachment.scales):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        boundary = attachment.boundary
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.sync_gradients:
            return boundary.clipping.norm_so_far(parameters, norm_type)
        if self.distributed_type != DistributedType.FSDP:
            return boundary.clipping.clip_norm(parameters, max_norm, norm_type)
        owned, _ = boundary.check.split(parameters)
        if boundary.unscale(owner for owner, _ in owned):
            return torch.full((), float("inf"), dtype=torch.float32, device=self.device)
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        boundary.clipping.note_norm(parameters, norm, max_norm, norm_type)
        return norm

    @untraced
    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Unscale, then clip each element to ``[-clip_value, clip_value]``; at boundaries."""
        attachment = self._attachment
        if attachment is None or self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(parameters, clip_value)  # under FSDP it refuses
        elif self.sync_gradients or not attachment.scales:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            parameters = [p for p in parameters if p.grad is not None]
            attachment.boundary.clipping.clip_value(parameters, clip_value)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; of a parameter (``LocalSGD`` averages them) the newest values."""
        self._finish_steps_of(tensor)
        return super().reduce(tensor, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; of a parameter the newest values."""
        self._finish_steps_of(tensor)
        return super().gather(tensor)

    @untraced
    def _finish_steps_of(self, tensor: Any) -> None:
        """``p.data`` does not wait for what is still to be written to its memory."""
        if self._attachment is None:
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
        if self._attachment is not None:
            self._attachment.synchronize()
            self._attachment.recorder.flush()
        super().end_training()

    def free_memory(self, *objects: Any) -> list[Any]:
        """As Accelerate's; the telemetry file is complete then, and no parameter is kept."""
        if self._attachment is not None:
            self._attachment.recorder.flush()
            self._attachment.scaler.release(*inner_of(self._optimizers))
        released: list[Any] = super().free_memory(*objects)
        return released

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; a window that was open is given up."""
        result = super().load_state(*args, **kwargs)
        if self._attachment is not None:
            self._attachment.scaler.abandon_window()
        return result


def _empty(cls: Any) -> Any:
    """An object for unpickling into."""
    return cls.__new__(cls)
