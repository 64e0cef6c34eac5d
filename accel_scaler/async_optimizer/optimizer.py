"""AsyncOptimizer: a torch optimizer whose update runs beside the next forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..config import Offload, StepMode, merge
from ..devices import warn_where_idle
from ..errors import ConfigError, OrderError, UnsupportedError
from ..models import untraced
from ..optimizer_step import Boundary, MasterRule, boundary_of, master_rule
from ..scaling import GradScaler, ParameterNames, parameters_of, whole
from .async_stepper import AsyncStepper
from .pending_parameter import drop_gradients
from .worker import Worker

SETTINGS = ("sharded", "master_weights", "offload_budget")
"""Fields of ``ScalerConfig`` that it takes, too."""


class AsyncOptimizer(Optimizer):
    """Steps a torch optimizer on a thread of its own.

    >>> optimizer = AsyncOptimizer(torch.optim.AdamW(model.parameters()), model, scaler=scaler)
    >>> scaler.scale(loss).backward()
    >>> optimizer.clip_grad_norm_(1.0)
    >>> optimizer.step()          # checks, updates the scale, hands the update over
    >>> optimizer.zero_grad()

    ``step_mode="overlap"`` computes what the plain optimizer computes, bit for bit: on a CPU a
    second thread does, and a parameter is awaited where it is next used. ``"sync"`` steps at once.
    In both modes float16 parameters train through float32 masters, and if losses are scaled,
    bfloat16 ones too.

    With ``scaler``, :meth:`step` is the whole boundary. Without, it only updates, so
    ``scaler.step(optimizer); scaler.update()`` work as with any optimizer. After ``step`` ``.grad``
    is what the plain optimizer leaves there; reading or writing it waits for the step.

    ``param_groups`` and ``state`` are the wrapped optimizer's: an LR scheduler may be given either
    optimizer. Saving, loading and evaluating (after ``model.eval()``, or without gradients) see the
    newest values; before another read call :meth:`synchronize`. Close it, or use a ``with`` block.

    Args:
        optimizer: one of torch's own (or transformers' Adafactor), whose ``step`` treats each
            parameter alone and needs no closure.
        model: the module that holds its parameters. Its order is the order of updates, and where
            its reads of parameters cannot be seen (compiled, scripted, FSDP2), ``step`` waits.
        scaler: scales the loss; its windows end with :meth:`step`.
        step_mode: ``"overlap"`` or ``"sync"``, as in ``ScalerConfig``.
        offload: ``"cpu"`` for state and float32 masters that rest in host memory and are stepped
            on the device, else ``"none"``.
        settings: fields of ``ScalerConfig``: ``master_weights`` (where no ``scaler`` scales,
            ``"auto"`` steps bfloat16 parameters in place, as torch does), ``offload_budget`` and
            ``sharded``.

    Raises:
        ConfigError: a wrong argument, or a model without any of the optimizer's parameters.
        OrderError: another AsyncOptimizer, or an accelerator, steps the optimizer already.
        UnsupportedError: an optimizer that another thread cannot step, with the reason.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Module | None = None,
        *,
        scaler: GradScaler | None = None,
        step_mode: StepMode = "overlap",
        offload: Offload = "none",
        **settings: Any,
    ) -> None:
        given = settings | {"step_mode": step_mode, "offload": offload}
        config, _ = merge(("AsyncOptimizer", given))
        if foreign := settings.keys() - {*SETTINGS}:
            raise ConfigError(
                f"AsyncOptimizer: got {', '.join(sorted(foreign))}, expected of the settings only "
                f"{', '.join(SETTINGS)}. The scale's are arguments of GradScaler."
            )
        _check_arguments(type(self).__name__, optimizer, model, scaler)
        # Optimizer.__init__ would make groups of its own; these are the wrapped one's.
        self.optimizer, self.model, self.scaler = optimizer, model, scaler
        self.defaults = optimizer.defaults
        # Hooks run on the training thread.
        hooks = {k: v for k, v in vars(optimizer).items() if k.startswith("_optimizer_")}
        self.__dict__.update(hooks)
        self.stepped_optimizer = optimizer
        """The wrapped optimizer, under whose name a window knows it."""
        scaled = scaler is not None and scaler.is_enabled()
        self._config, self._closed = replace(config, enabled=scaled), False
        self.step_was_skipped = False
        """Whether the last :meth:`step` left the parameters alone because of an overflow."""
        self._worker = Worker()
        device = parameters_of(optimizer)[0].device
        names = ParameterNames() if scaler is None else scaler.parameter_names
        if model is not None:
            names.add_module(model)
        self._stepper = AsyncStepper(
            optimizer,
            self._rule(device),
            config.step_mode,
            worker=self._worker,
            guards_backward=not scaled,
            parameter_names=names,
        )
        self._boundary: Boundary | None = None
        try:
            self._watch()
            self._stepper.refresh()
            if scaler is not None:  # one for all its optimizers, an accelerator's too
                found = boundary_of(scaler)
                self._boundary = found or Boundary(scaler, device, skip_nonfinite=False)
                self._boundary.add(self)
                scaler.ranks.sharded = scaler.ranks.sharded or config.sharded
        except BaseException:
            self.close()
            raise

    def _rule(self, device: torch.device) -> MasterRule:
        warn_where_idle(self._config.step_mode, self._config.offload, device)
        return master_rule(self._config, device)

    def _watch(self) -> None:
        if self.model is not None:
            self._stepper.watch(self.model)

    @property
    def _inside(self) -> bool:
        """On the optimizer thread: calls mean the parameters that are stepped there."""
        return self._worker.is_current()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's groups; inside :meth:`submit`, the replica's."""
        return (self._stepper.replica.copy if self._inside else self.optimizer).param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state; call :meth:`synchronize` before reading it."""
        return (self._stepper.replica.copy if self._inside else self.optimizer).state

    @untraced
    def step(self, closure: Any = None) -> Any:
        """Check the gradients, update the scale, and hand the update to the optimizer thread.
        ``closure`` runs first, and its loss is returned.

        Without ``scaler`` it only hands over. Waits for the step before; with an enabled ``scaler``
        synchronises with the device once, to know whether the step is skipped.

        Raises:
            StepError: the step before failed; says which parameters it had updated.
            OrderError: closed, or (with ``scaler``) no loss was scaled.
        """
        self._check_open("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._inside:
            replica = self._stepper.replica
            replica.call_step([pair.stepped for pair in replica.pairs])
            return loss
        self._watch()
        scaler, is_skipped = self.scaler, False
        if self._boundary is None or scaler is None:
            self._stepper.step()
        elif scaler.is_stepping(self):
            with self._boundary.deferred_of(self) as deferred:
                self._stepper.step(deferred)
        else:
            is_skipped = not self._boundary.step(self)
        self.step_was_skipped = is_skipped
        return loss

    @untraced
    def skip_step(self) -> None:
        """``scaler.step(self)`` has found an overflow: a boundary without an update."""
        if not self._inside:
            self._check_open("step")
            self._stepper.skip()
            self.step_was_skipped = True

    @untraced
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Unscale, check and clip the total norm of the gradients, before :meth:`step`.

        Args:
            parameters: summed in this order; default: all of this optimizer's, in its own order.

        Returns the norm before clipping, unscaled, shape (); float32 for float32 gradients or those
        of masters, else in torch's dtype; inf after an overflow. ``.grad`` is then what torch
        leaves, but stays scaled until the step where it is float16, or bfloat16 with a master.
        Synchronises where gradients are checked.
        """
        self._check_open("clip_grad_norm_")
        self._forbid_inside("clip_grad_norm_")
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        chosen = parameters_of(self.optimizer) if parameters is None else list(parameters)
        if self._boundary is None:
            return whole(torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type))
        return self._boundary.clipping.clip_norm(chosen, max_norm, norm_type)

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. ``set_to_none=False`` waits for the step that reads the gradients."""
        if self._inside:
            for pair in self._stepper.replica.pairs:
                pair.stepped.grad = None
            return
        if not (set_to_none and drop_gradients(self.optimizer)):
            self.optimizer.zero_grad(set_to_none)

    @untraced
    def submit(self, fn: Callable[[], object]) -> None:
        """Run ``fn``, a step function, on the optimizer thread, after the steps before it. That
        thread does not know ``torch.set_default_device``.

        Inside ``fn`` this optimizer's ``param_groups``, ``step`` and ``zero_grad`` mean the
        stepped parameters and the gradients as they are now; ``scaler.unscale_(optimizer)`` and
        ``scaler.step(optimizer)`` use the window that is open now. The wrapped optimizer's
        ``step`` and ``zero_grad``, or that one given to ``scaler``, mean the same. With
        ``scaler`` the gradients are checked here, so call ``scaler.update()`` straight after.

        Raises:
            StepError: the step before failed. An error in ``fn`` is raised by the next call.
            OrderError: closed, called from inside ``fn``, or no window is open.
        """
        self._check_open("submit")
        self._forbid_inside("submit")
        if self._stepper.replica.masters.on_host:
            raise UnsupportedError(
                "submit(): with offload state and float32 copies (masters) pass through the device "
                "inside step() alone. Call step()."
            )
        self._watch()
        scaler = self.scaler
        fn = self._lent_to(fn)
        if self._boundary is None or scaler is None or not scaler.is_enabled():
            self._stepper.submit(lambda: fn)
        else:
            # What a clip has left to be done is done where the job finds its gradients.
            with self._boundary.deferred_of(self) as deferred:
                self._stepper.submit(lambda: scaler.bind(fn, self), deferred)

    def _lent_to(self, fn: Callable[[], object]) -> Callable[[], object]:
        """``fn``, in which the wrapped optimizer's ``step`` and ``zero_grad`` are this one's: its
        own parameters are the model's, whose gradients are the next window's by then."""
        inner, names = vars(self.optimizer), ("step", "zero_grad")

        def lent(name: str) -> Any:
            own, mine = getattr(self.optimizer, name), getattr(self, name)
            return lambda *args, **given: (mine if self._inside else own)(*args, **given)

        def run() -> object:
            before = {name: inner[name] for name in names if name in inner}
            inner.update({name: lent(name) for name in names})
            try:
                return fn()
            finally:
                for name in names:
                    del inner[name]
                inner.update(before)

        return run

    @untraced
    def synchronize(self) -> None:
        """Wait for the step in flight: parameters and state are the newest then. Raises
        ``StepError`` where it failed, and ``OrderError`` in :meth:`submit`."""
        self._stepper.synchronize()

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """As torch writes it for the wrapped optimizer, after :meth:`synchronize`. Parameters that
        hold less than their float32 ``master`` add it to their entries."""
        with self._stepper.still():
            return self.optimizer.state_dict()

    @untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or the wrapped one's ``state_dict`` gave."""
        self.optimizer.load_state_dict(state_dict)

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the parameters take part from the next step on."""
        self.optimizer.add_param_group(param_group)

    @untraced
    def close(self) -> None:
        """Finish, stop the thread, remove every hook: the wrapped optimizer is torch's again.
        Raises ``StepError`` where the step in flight failed; it is closed all the same."""
        if self._closed:
            return
        self._forbid_inside("close")
        self._closed = True
        if self.scaler is not None:
            self.scaler.release(self.optimizer)
        try:
            self._stepper.close()
        finally:
            self._worker.stop()

    def __enter__(self) -> AsyncOptimizer:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close()

    def _check_open(self, call: str) -> None:
        if self._closed and not self._inside:  # the last step may still run, and call step()
            name = type(self).__name__
            raise OrderError(f"{call}(): this {name} is closed. Make another {name}.")

    def _forbid_inside(self, call: str) -> None:
        if self._inside:
            raise OrderError(
                f"{call}() was called inside submit(fn), on the optimizer thread. Inside fn use "
                "param_groups, state, step(), zero_grad(), scaler.unscale_(optimizer), "
                "scaler.step(optimizer) and torch.nn.utils.clip_grad_norm_."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"an {type(self).__name__} is not copied or pickled. Save model.state_dict() and "
            "optimizer.state_dict(), make another model and optimizer, and load them there."
        )

    def __repr__(self) -> str:
        return f"AsyncOptimizer(step_mode={self._config.step_mode!r}, {self.optimizer!r})"


def _check_arguments(name: str, optimizer: Any, model: Any, scaler: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AsyncOptimizer):
        raise ConfigError(f"{name}: got a {kind}, expected a torch optimizer.")
    if not parameters_of(optimizer):
        raise ConfigError(f"{name}: this {kind} has no parameters.")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ConfigError(
            f"{name}: got scaler={type(scaler).__name__}, expected our GradScaler. "
            "With torch's own, leave it out here and call scaler.step(optimizer)."
        )
    if not isinstance(model, Module | None):
        raise ConfigError(f"{name}: got model={model!r}, expected a torch.nn.Module.")
    own = set(map(id, parameters_of(optimizer)))
    if model is not None and own.isdisjoint(map(id, model.parameters())):
        raise ConfigError(
            f"{name}: {type(model).__name__} has none of the optimizer's {len(own)} "
            "parameters. Make the optimizer from model.parameters(), after wrapping or moving "
            "the model."
        )
