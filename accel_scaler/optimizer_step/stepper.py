"""A stepper updates one optimizer's parameters: inline here, or asynchronously elsewhere."""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..scaling import DeferredUnscale, call_fused, match_layout, parameters_of, stepped
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
    step_mode: str | None = None
    """How it ran, ``"sync"`` or ``"overlap"``, where ``"auto"`` chose it; else None."""
    mode_seconds: tuple[float, float] | None = None
    """Seconds a step in ``sync`` and in ``overlap``, where ``"auto"`` has just chosen by them."""


class Stepper(ABC):
    """Updates the parameters of one optimizer, perhaps later and on another thread."""

    optimizer: Optimizer
    timing: StepTiming | None = None
    """That of the last update; None: there was none."""
    fold_unscale = False
    """The user lets unscaling and clipping be left to the kernel."""
    reads_beside = False
    """An unfinished update may read ``.grad``, on another thread."""

    @property
    def keeps_scaled(self) -> bool:
        """Some gradients are float16 or bfloat16 and so are never unscaled in place."""
        return False

    @property
    def defers_unscale(self) -> bool:
        """Gradients may be checked while they are scaled: unscaling goes along with the step."""
        return False

    @property
    def unscales(self) -> bool:
        """Its step does what is deferred, and writes the result to ``.grad``, too."""
        return False

    @property
    def divides(self) -> bool:
        """Its kernel may divide gradients by ``grad_scale``."""
        takes_grad_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        return self.fold_unscale and takes_grad_scale and not self.has_pre_hooks

    @property
    def has_pre_hooks(self) -> bool:
        """Hooks read the gradients just before the step."""
        everywhere = getattr(optimizer_module, "_global_optimizer_pre_hooks", {})
        return bool(everywhere or getattr(self.optimizer, "_optimizer_step_pre_hooks", {}))

    @abstractmethod
    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """Take the gradients, do what is ``deferred``, update."""

    def step_idle(self) -> None:
        """A boundary without gradients. Stock steps all the same: a hook may bring gradients."""
        self.step()

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


class Layout(Protocol):
    """Where another stepper of the same optimizer has laid out the state."""

    def places(self) -> Sequence[Placed]:
        """Of all parameters, as their state is now; (): of none."""

    @property
    def version(self) -> object:
        """Another object once anything has been laid out anew."""


class InlineStepper(Stepper):
    """Steps on the training thread, as ``optimizer.step()`` does.

    Args:
        layout: the state stays where this has it.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout | None = None) -> None:
        self._optimizer, self._layout = weakref.ref(optimizer), layout
        self._version: object = None
        """That of the layout for which ``_runs`` were made."""
        self._runs: list[Run] = []
        """They step it by direct calls of a kernel, as long as ``_held`` is current."""
        self._held: Held | None = None

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """What is stepped."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """One update. ``deferred`` may only hold what the kernel divides by."""
        optimizer, start = self.optimizer, time.perf_counter()
        deferred = DeferredUnscale() if deferred is None else deferred
        assert deferred.multiply is None
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.step()
        elif not self._call_kernels(optimizer, deferred):
            params = parameters_of(optimizer)
            if params and params[0].device.type == "cpu":
                match_layout(params, optimizer.state)
            call_fused(optimizer, deferred.divide, None)
        self.timing = StepTiming(start, time.perf_counter() - start, finished=True, inline=True)

    @torch.no_grad()
    def _call_kernels(self, optimizer: Optimizer, deferred: DeferredUnscale) -> bool:
        """Do what ``optimizer.step()`` does by direct calls; False: it does more, or other things
        than a kernel can."""
        rule = rule_of(optimizer)
        if rule is None or not is_only_kernel(optimizer, rule):
            self._runs, self._held = [], None
            return False
        groups = optimizer.param_groups
        is_moved = self._layout is not None and self._layout.version is not self._version
        held = self._held
        owners, values = _held_by(optimizer)  # strongly, until the kernels are called
        is_current = held is not None and not is_moved and held.is_current(owners, values)
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
        if not all(run.takes(mine, whole=True) for run, mine in runs):
            return False
        for run, mine in runs:
            run.step(type(optimizer), groups[run.pairs[0].group], mine, deferred, whole=True)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as an LR scheduler's wrapper
        return True

    def _make_runs(self, optimizer: Optimizer, rule: FusedRule) -> Iterator[Run]:
        places: Sequence[Placed] = ()
        if self._layout is not None:
            places, self._version = self._layout.places(), self._layout.version
        places = places or list(_lay_out(optimizer, rule))
        for number, group in enumerate(optimizer.param_groups):
            mine = [Placed(p.param, number, p.arena, p.slot) for p in places if p.group == number]
            mine.sort(key=lambda each: (id(each.arena), each.slot))
            for some in neighbours(mine, range(len(mine))):
                pairs = [mine[place] for place in some]
                yield Run(pairs, rule, group, optimizer, Scratch(pairs[0].arena.device))


def _held_by(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """Whose state it has, and its parameters, a None behind each group's; what is in its state."""
    params = chain.from_iterable((*group["params"], None) for group in optimizer.param_groups)
    values = chain.from_iterable(map(dict.values, _entries_of(optimizer)))
    return [*optimizer.state, *params], list(values)


def _entries_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its state's, without what a script has put there under a key of its own."""
    return [entry for entry in optimizer.state.values() if isinstance(entry, dict)]


def _lay_out(optimizer: Optimizer, rule: FusedRule) -> Iterator[Placed]:
    """Lay the state out anew, an arena for each stretch of a group's parameters on one device."""
    for number, group in enumerate(optimizer.param_groups):
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


def is_only_kernel(optimizer: Optimizer, rule: FusedRule) -> bool:
    """Whether direct calls of a kernel mean the same as ``optimizer.step()``."""
    return (
        not is_replaced(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not optimizer_module._global_optimizer_pre_hooks
        and not optimizer_module._global_optimizer_post_hooks
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
