"""A stepper updates one optimizer's parameters: as torch does here, or in another way elsewhere."""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..scaling import (
    DeferredUnscale,
    Gathered,
    SentCheck,
    call_fused,
    match_layout,
    parameters_of,
    stepped,
)
from .arena import Arena, Held, Placed
from .blocks import FusedRule, Run, Scratch, neighbours, rule_of

logger = logging.getLogger("accel_scaler")


@dataclass(slots=True)
class StepTiming:
    """When one update ran, and what waited for it: host time, seconds of ``perf_counter``."""

    start: float = 0.0
    busy: float = 0.0
    """How long it ran."""
    finished: bool = False
    inline: bool = False
    """It ran on the training thread, which waited for all of it."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """``(start, length)`` of each wait."""


class Stepper(ABC):
    """Updates the parameters of one optimizer, perhaps later and on another thread."""

    optimizer: Optimizer
    timing: StepTiming | None = None
    """Timing of the last update, or None before the first."""

    @property
    def keeps_scaled(self) -> bool:
        """Some gradients are float16 or bfloat16 and so are never unscaled in place."""
        return False

    @property
    def reads_beside(self) -> bool:
        """Its update runs on another thread: it unscales there, and reads ``.grad`` until then."""
        return False

    @property
    def has_pre_hooks(self) -> bool:
        """Hooks read the gradients just before the step."""
        everywhere = getattr(optimizer_module, "_global_optimizer_pre_hooks", {})
        return bool(everywhere or getattr(self.optimizer, "_optimizer_step_pre_hooks", {}))

    @abstractmethod
    def step(
        self, deferred: DeferredUnscale | None = None, gathered: Gathered | None = None
    ) -> None:
        """Take the gradients, multiply them by ``deferred``, update. ``gathered``: gradients that a
        check has looked at."""

    def launch(
        self, deferred: DeferredUnscale, sent: SentCheck, gathered: Gathered | None = None
    ) -> bool:
        """Enqueue the update, which moves nothing where ``sent`` fails; :meth:`conclude` comes
        next. False: it cannot be left to the device, and nothing was enqueued. Does not
        synchronise."""
        return False

    def conclude(self, has_moved: bool) -> bool:
        """After :meth:`launch`, once the check was read; ``has_moved``: it tells of no overflow.
        Returns whether the update was made. May wait for what was enqueued before it."""
        return has_moved

    def step_idle(self) -> None:
        """A boundary without gradients. Stock steps all the same: a hook may bring gradients."""
        self.step()

    def before_backward(self, is_last: bool) -> None:  # noqa: B027
        """A backward is about to begin; ``is_last``: a step is to follow it, as far as is known."""

    def skip(self) -> None:  # noqa: B027
        """A boundary without an update: gradients overflowed, or their norm is a spike."""

    def wait(self) -> bool:
        """Wait until the update in flight, if any, is over; False: it failed."""
        return True

    def synchronize(self) -> None:  # noqa: B027
        """Finish the update in flight and publish it."""

    def still(self) -> AbstractContextManager[None]:
        """:meth:`synchronize`; until the end of the block no step of another thread begins."""
        return nullcontext()

    def wait_for_gradients(self) -> None:  # noqa: B027
        """Wait until no step reads ``.grad``: a backward is about to add to it."""


class InlineStepper(Stepper):
    """Steps on the training thread, as ``optimizer.step()`` does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._runs: list[Run] = []
        """They step it by direct calls of a kernel, as long as ``_held`` is current."""
        self._held: Held | None = None

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """The torch optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def step(
        self, deferred: DeferredUnscale | None = None, gathered: Gathered | None = None
    ) -> None:
        """One update, of gradients that are unscaled: nothing is ``deferred``."""
        optimizer, start = self.optimizer, time.perf_counter()
        assert not deferred
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.step()
        elif not self._call_kernels(optimizer, gathered):
            params = parameters_of(optimizer)
            if params and params[0].device.type == "cpu":
                match_layout(params, optimizer.state)
            call_fused(optimizer, None, None)
        self._note_time(start)

    def _note_time(self, start: float) -> None:
        self.timing = StepTiming(start, time.perf_counter() - start, finished=True, inline=True)

    def launch(
        self, deferred: DeferredUnscale, sent: SentCheck, gathered: Gathered | None = None
    ) -> bool:
        optimizer, start = self.optimizer, time.perf_counter()
        if deferred:
            return False
        if not self._call_kernels(optimizer, gathered, sent):
            if not (takes_found_inf(optimizer) and has_state(optimizer)):
                return False
            call_fused(optimizer, None, sent.found_inf)
        self._note_time(start)
        return True

    @torch.no_grad()
    def _call_kernels(
        self, optimizer: Optimizer, gathered: Gathered | None, sent: SentCheck | None = None
    ) -> bool:
        """Do what ``optimizer.step()`` does by direct calls; False: it does more, or other things
        than a kernel can. ``gathered``, ``sent``: see :meth:`launch`."""
        rule = rule_of(optimizer)
        if rule is None or not is_only_kernel(optimizer, rule):
            self._runs, self._held = [], None
            return False
        groups = optimizer.param_groups
        held = self._held
        owners, values = _held_by(optimizer)  # strongly, until the kernels are called
        is_current = held is not None and held.is_current(owners, values)
        # Only now: a group may be gone.
        fits = is_current and all(run.still_fits(groups[run.pairs[0].group]) for run in self._runs)
        if not fits:
            self._held = None  # Ctrl-C may come before they are made
            params = parameters_of(optimizer)
            if len(set(map(id, params))) < len(params):  # one twice: its steps are counted apart
                return False
            with torch.inference_mode(False):
                self._runs = list(self._make_runs(optimizer, rule))
            are_counts = (key == "step" for entry in _entries_of(optimizer) for key in entry)
            self._held = Held(*_held_by(optimizer), are_counts)
        grads = [list(map(_grad_of, run.params)) for run in self._runs]
        runs = list(zip(self._runs, grads, strict=True))
        if not all(run.takes(mine, True, gathered) for run, mine in runs):
            return False
        for run, mine in runs:
            group = groups[run.pairs[0].group]
            run.step(type(optimizer), group, mine, DeferredUnscale(), whole=True, sent=sent)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as an LR scheduler's wrapper
        return True

    def _make_runs(self, optimizer: Optimizer, rule: FusedRule) -> Iterator[Run]:
        for number, group in enumerate(optimizer.param_groups):
            mine = list(_lay_out(optimizer, number, rule))
            for some in neighbours(mine, range(len(mine))):
                yield Run([mine[place] for place in some], rule, group, optimizer, Scratch())


def _held_by(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """The keys of its state and its parameters, a None behind each group's; the state's values."""
    params = chain.from_iterable((*group["params"], None) for group in optimizer.param_groups)
    values = [value for entry in _entries_of(optimizer) for value in entry.values()]
    return [*optimizer.state, *params], values


def _entries_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The entries of its state, but for values that a script keeps there under its own keys."""
    return [entry for entry in optimizer.state.values() if isinstance(entry, dict)]


def _lay_out(optimizer: Optimizer, number: int, rule: FusedRule) -> Iterator[Placed]:
    """Lay a group's state out anew, an arena for each stretch of parameters on one device."""
    group = optimizer.param_groups[number]
    for device, some in groupby(group["params"], attrgetter("device")):
        params = list(some)
        arena = Arena([p.detach() for p in params], device, has_masters=False)
        for slot, p in enumerate(params):
            arena.adopt(slot, optimizer.state.get(p, {}), rule.keys(group), rule.counts)
            yield Placed(p, number, arena, slot)


_grad_of = attrgetter("grad")
_unhooked = partial(inspect.unwrap, stop=lambda step: not getattr(step, "hooked", False))


def raw_step(cls: type[Optimizer]) -> Any:
    """The class's step without torch's wrapper that runs hooks, which are the main thread's."""
    return _unhooked(cls.step)


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether ``step`` on the instance is not the class's own."""
    step = vars(optimizer).get("step")
    # Accelerate leaves the bound method there; an LR scheduler leaves its wrapper.
    by_scheduler = getattr(step, "_wrapped_by_lr_sched", False)
    inner: Any = getattr(step, "__wrapped__" if by_scheduler else "__func__", None)
    if not by_scheduler and getattr(step, "__self__", None) is not optimizer:
        inner = None
    return step is not None and _unhooked(inner) is not raw_step(type(optimizer))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step()`` is torch's, with kernels that do nothing where ``found_inf`` is
    1."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and not (is_replaced(optimizer) or has_hooks(optimizer))
    )


def has_state(optimizer: Optimizer) -> bool:
    """Whether there is state for all gradients. A kernel that makes it where ``found_inf`` is 1
    leaves it uninitialised."""
    entries = [optimizer.state.get(p) for p in parameters_of(optimizer) if p.grad is not None]
    return all(entry and all(v is not None for v in entry.values()) for entry in entries)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether anything is called before or after its step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizer_module._global_optimizer_pre_hooks
        or optimizer_module._global_optimizer_post_hooks
    )


def is_only_kernel(optimizer: Optimizer, rule: FusedRule) -> bool:
    """Whether direct calls of a kernel mean the same as ``optimizer.step()``."""
    return (
        not is_replaced(optimizer)
        and not has_hooks(optimizer)
        and not torch.autograd.profiler._is_profiler_enabled
        and all(map(rule.takes, optimizer.param_groups))
    )


ATTRIBUTE = "_accel_scaler_stepper"
"""Where an optimizer keeps its asynchronous stepper: that one holds the optimizer, so a table would
keep both alive for ever."""

_inline: weakref.WeakKeyDictionary[Optimizer, InlineStepper] = weakref.WeakKeyDictionary()


def stepper_of(optimizer: Optimizer) -> Stepper:
    """The stepper of ``optimizer``: the registered one, else an inline one."""
    optimizer = stepped(optimizer)
    found = async_stepper_of(optimizer) or _inline.get(optimizer)
    if found is None:
        found = _inline[optimizer] = InlineStepper(optimizer)
    return found


def async_stepper_of(optimizer: Optimizer) -> Stepper | None:
    """The registered stepper of ``optimizer``; None: it is stepped inline."""
    found: Stepper | None = stepped(optimizer).__dict__.get(ATTRIBUTE)
    return found


def register(stepper: Stepper) -> None:
    """``stepper`` steps its optimizer from now on."""
    stepper.optimizer.__dict__[ATTRIBUTE] = stepper


def unregister(optimizer: Optimizer) -> None:
    """The optimizer is stepped inline again."""
    optimizer.__dict__.pop(ATTRIBUTE, None)
