"""When stretches of offloaded state move: up in the backward before a step, down in a forward.

Hooks on some parameters and their modules look at the device's memory (:class:`Room`) and say how
much of it slots may take. Whether a backward is the one before the step is what the caller says
(``accelerator.accumulate``); where it does not, each is taken for that, until forwards have come
instead of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from ..devices import is_capturing
from ..models import inert, is_compiled, is_in_backward, is_replaying, untraced
from .room import Room

if TYPE_CHECKING:
    from .offloaded import OffloadedReplica
    from .ring import Ring

MOMENTS = 32
"""Looks at a backward, and at a forward, at most: each asks the allocator."""

FORWARD, FIRST = 1 << 10, 1 << 11
"""Added to the number of a look: it is in a forward, which is the first after a step."""

WRONG = 2
"""Forwards that came where a step was expected, after which nothing comes up early any more."""


class Looks:
    """The looks of one replica, which owns them and is referred to weakly, for its ``ring``."""

    def __init__(self, replica: OffloadedReplica, ring: Ring) -> None:
        self._replica, self.ring = weakref.ref(replica), ring
        self._room = Room(ring)
        self._hooks: list[Any] = []
        self.are_in_forward = False
        """Slots may stay after the step: looks at the forward let them go in time."""
        self.is_last = True
        """The next backward is a window's last, as far as the caller knows."""
        self._is_first = True
        """The next forward is the first after a step."""
        self._is_evaluation = False
        """The forward that runs has no backward. One that has may run modules without gradients,
        too: those that are checkpointed."""
        self._wrong = 0
        """How often a forward came where a step was expected."""

    def put(self, params: Sequence[Tensor], models: Iterable[Module]) -> None:
        """Look where gradients of some of ``params`` come, and before their modules run; not in
        models whose modules are not called one by one."""
        self.remove()
        chosen: Sequence[Any] = params[:: -(-len(params) // MOMENTS) or 1]
        for look, param in enumerate(chosen):
            hook = Hook(self.gradient_came, look)
            self._hooks.append(param.register_post_accumulate_grad_hook(hook))
        numbers = {id(param): look for look, param in enumerate(chosen)}
        for model in models:
            modules = () if any(map(is_compiled, model.modules())) else model.modules()
            for module in modules:
                own = [numbers[id(p)] for p in module._parameters.values() if id(p) in numbers]
                if own:
                    hook = Hook(self.module_runs, FORWARD + own[0])
                    self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
                    self.are_in_forward = True
            hook = Hook(self.before_forward)
            self._hooks.append(model.register_forward_pre_hook(hook, prepend=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.are_in_forward = [], False

    @property
    def _mover(self) -> OffloadedReplica | None:
        """The replica, unless it steps now: then all is decided."""
        replica = self._replica()
        return None if replica is None or replica.is_stepping or is_capturing() else replica

    def before_forward(self) -> None:
        """A watched model is about to run: drop what came up for a step that did not come."""
        if (replica := self._mover) is None:
            return
        counts = not is_replaying()  # else a window is run again
        with replica.lock:
            self._room.begin()
            self._is_evaluation = not torch.is_grad_enabled()
            if self._is_evaluation:
                self.ring.release_free()  # an evaluation may take the memory between two looks
            self._wrong += bool(self.ring.loaded) and counts
            self.ring.drop()

    def module_runs(self, look: int) -> None:
        """In a forward: let go so many of the slots that go down that the peak does not rise."""
        if (replica := self._mover) is None or is_in_backward():
            return
        with replica.lock:
            is_known = not self._is_first and not self.ring.free and self._room.knows(look)
            if self._is_evaluation or is_known:
                self._room.leave_out()
            else:
                look += FIRST if self._is_first else 0
                self.ring.release_free(self._room.left(look))

    def gradient_came(self, look: int) -> None:
        """In a backward, on its thread: have stretches come up where there is room."""
        if (replica := self._mover) is None:
            return
        with replica.lock:
            self._is_first = False
            is_last = self.is_last and self._wrong < WRONG
            if not is_last and self._room.knows(look):
                self.ring.release_free()
                self._room.leave_out()
                return
            left = self._room.left(look, until_step=True)
            self.ring.release_free(left)
            if is_last:
                try:
                    replica.come_up(left)
                except torch.OutOfMemoryError:
                    self._wrong = WRONG  # there is room, in pieces that are too small

    def before_step(self) -> None:
        """The step begins, or the window is skipped."""
        self._room.end()

    def after_step(self) -> None:
        """The step has ended, or the window was skipped: let go so many slots that the peak does
        not rise until the next forward."""
        self._is_first = True
        left = self._room.after_step()
        self.ring.release_free(left if self.are_in_forward else 0)


class Hook:
    """Calls a method with ``args``. It refers to the object weakly, and does nothing in a copy."""

    def __init__(self, method: Callable[..., None], *args: object) -> None:
        self._method, self._args = weakref.WeakMethod(method), args

    def __reduce__(self) -> Any:
        return inert()

    @untraced
    def __call__(self, *_: object) -> None:
        if (method := self._method()) is not None:
            method(*self._args)
