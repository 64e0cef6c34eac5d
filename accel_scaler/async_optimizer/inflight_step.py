"""One update in flight: its gradients, its work on the optimizer thread, who waits for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..devices import as_on_stream, present_stream
from ..optimizer_step import Replica
from ..scaling import SMALL, DeferredUnscale
from .pending_parameter import hold, release
from .worker import Task

_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_count_of: Callable[[int], int] = torch._C._storage_Use_Count
_layout_of = attrgetter("layout")


class InflightStep(Task):
    """Made by :class:`.async_stepper.AsyncStepper` for each update; dies with it.

    It has a part for each part of the replica, a single one for a function given to ``submit()``.

    Args:
        grads: in the order of the parts, final once they are multiplied by ``deferred``. It drops
            each once it was read.
        begin: called first: lets masters take edits of the model.
        fail: called on a thread that uses a tensor which a failed update has left behind; raises
            ``StepError``.
        fn: the function given to ``submit()``, which steps instead, on the present stream of the
            thread that makes this; None: the optimizer steps.
    """

    def __init__(
        self,
        replica: Replica,
        grads: list[Tensor | None],
        deferred: DeferredUnscale,
        begin: Callable[[], None],
        fail: Callable[[InflightStep], None],
        fn: Callable[[], object] | None,
    ) -> None:
        self._replica, self._grads, self._deferred = replica, grads, deferred
        self._begin, self._fail, self._fn = begin, fail, fn
        self._stream = present_stream(replica.params[0].device)
        self._params, self._part_of = replica.params, replica.part_of
        self._ends = [part.end for part in replica.parts] if fn is None else [len(self._params)]
        """For each part, how many parameters are ready when it is done."""
        self._released = 0
        """How many of them, from the first on, are plain again."""
        self._ref: weakref.ref[Any] = weakref.ref(self)
        super().__init__(self._step_parts if fn is None else self._run_submitted, len(self._ends))

    @property
    def is_submitted(self) -> bool:
        """It runs a function given to ``submit()``."""
        return self._fn is not None

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Each use of ``tensors`` waits: of a parameter for its part, of a gradient for all."""
        hold(tensors, self._ref)

    def wait_for(self, t: Tensor) -> None:
        if not self.wait(None if self.is_submitted else self._part_of.get(id(t))):
            self._fail(self)
        done = min(self.done, self.parts)
        end = self._ends[done - 1] if done else 0
        release([*self._params[self._released : end], t], self._ref)
        self._released = max(self._released, end)

    def release_all(self) -> None:
        """Nothing waits for it any more."""
        release([*self._params, *(p.grad for p in self._params)], self._ref)

    @torch.no_grad()
    def _step_parts(self) -> None:
        self._begin()
        for part in self._replica.parts:
            mine = slice(part.start, part.end)
            final = self._grads[mine]
            self._grads[mine] = [None] * len(final)
            self.spent += [g for g in final if g is not None and g.numel() <= SMALL]
            with _beside_no_compile():
                self._replica.step_part(part, final, self._deferred)
            self.advance()

    @torch.no_grad()
    def _run_submitted(self) -> None:
        assert self._fn is not None
        replica = self._replica
        with as_on_stream(self._stream):
            self._begin()
            try:
                final = replica.bring(replica.ordered, self._grads, self._deferred)
                for pair, grad in zip(replica.ordered, final, strict=True):
                    pair.stepped.grad = None if grad is None else grad.to(pair.stepped.device)
                del final
                self._grads.clear()
                with _beside_no_compile():
                    self._fn()
            finally:
                for pair in replica.pairs:
                    pair.stepped.grad = None
            for pair in replica.pairs:
                pair.publish()
        self.advance()


def has_compiled() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process. Its code checks the class of
    parameters before any of ours runs."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and dynamo.FRAME_COUNTER > 0


def _beside_no_compile() -> Any:
    """Nothing is compiled within the block. While dynamo compiles, ``is_compiling()`` is True on
    every thread (torch 2.13), and torch's optimizers, which ask it, compute differently."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    return nullcontext() if dynamo is None else dynamo.compile_lock


def are_own(grads: Sequence[Any]) -> bool:
    """Whether another thread may read ``grads`` where they are, since each later use can be seen.
    Not shards, sparse gradients, and those to whose memory others write unseen: DDP's buckets, a
    buffer of the user's."""
    # Sets of maps over C functions: with thousands of gradients a Python loop would show.
    return (
        {Tensor}.issuperset(map(type, grads))
        and {torch.strided}.issuperset(map(_layout_of, grads))
        and {1}.issuperset(map(_count_of, map(_storage_of, grads)))
    )
