"""A stepper that updates an optimizer through its replica, inside ``step()``.

It follows a script's changes from outside (of groups, parameters, their values), and loads and
saves float32 masters with the optimizer's state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..errors import OrderError, StepError, UnsupportedError, listed
from ..scaling import (
    MAX_NAMES,
    DeferredUnscale,
    Gathered,
    ParameterNames,
    SentCheck,
    local,
    parameters_of,
    reduce_partial_gradients,
)
from .masters import MASTER, MasterRule, is_ours, is_stepped, keys_of, without_master
from .offloaded import OffloadedReplica
from .replica import Replica
from .state_dicts import give_state_back, with_masters
from .stepper import (
    Stepper,
    StepTiming,
    async_stepper_of,
    has_state,
    is_replaced,
    register,
    unregister,
)
from .supported_optimizers import refuse_overlapping

logger = logging.getLogger("accel_scaler")


class ReplicaStepper(Stepper):
    """Steps ``optimizer``. Methods are for the training thread, except where documented.

    Args:
        masters: which parameters are stepped through float32 masters.
        parameter_names: names parameters in errors.
    """

    optimizer: Optimizer

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterRule,
        *,
        parameter_names: ParameterNames | None = None,
    ) -> None:
        if async_stepper_of(optimizer) is not None:
            raise OrderError(
                f"this {type(optimizer).__name__} is stepped by an AsyncOptimizer or an attached "
                "accelerator already; close() or detach() that one first, or make another "
                f"{type(optimizer).__name__}."
            )
        self.optimizer = optimizer
        self.parameter_names = parameter_names or ParameterNames()
        self.replica = (OffloadedReplica if masters.on_host else Replica)(optimizer, masters)
        self._refuse_overlapping()
        self.steps = 0
        """Updates so far."""
        self.is_closed = False
        self._versions: list[int] = []
        """With masters: the version of each parameter, in the optimizer's order, when it last was
        its rounded master."""
        self._launched: tuple[list[Tensor | None], SentCheck, StepTiming] | None = None
        """Between :meth:`launch` and :meth:`conclude`: the gradients, and what decides."""
        self._handles: list[Any] = []
        """Of torch's hooks around ``state_dict`` and ``load_state_dict``."""
        self._loading: Any = None
        """The state dict that is being loaded."""
        register(self)
        try:
            self._add_hooks(optimizer, self._handles.append)
        except BaseException:
            self._leave_optimizer()
            raise

    def _add_hooks(self, optimizer: Optimizer, add: Callable[[Any], None]) -> None:
        add(optimizer.register_state_dict_pre_hook(self._before_saving))
        add(optimizer.register_state_dict_post_hook(self._after_saving))
        last = optimizer.register_load_state_dict_pre_hook(self._before_loading)
        add(last)
        self._last = last.id
        # Before the user's, which see the state.
        after = self._after_loading
        add(optimizer.register_load_state_dict_post_hook(after, prepend=True))

    def _refuse_overlapping(self) -> None:
        takes = self.replica.masters.takes
        params = [p for p in parameters_of(self.optimizer) if is_stepped(p) and takes(p)]
        refuse_overlapping(self.optimizer, params, self.parameter_names)

    def watch(self, model: Module) -> None:
        """``model`` is about to be trained, and may have parameters of the optimizer."""
        self.replica.watch(model)

    def before_backward(self, is_last: bool) -> None:
        self.replica.before_backward(is_last)

    def skip(self) -> None:
        self.replica.skip()

    @contextmanager
    def still(self) -> Iterator[None]:
        """No step begins on another thread until the end of the block."""
        with self.replica.lock:
            yield

    # The boundary's questions.

    @property
    def keeps_scaled(self) -> bool:
        """Some parameters are float16 or bfloat16 with masters: their gradients stay scaled."""
        if not self.replica.pairs:
            self.refresh()
        return self.replica.may_have_masters()

    # Following changes from outside.

    def refresh(self) -> None:
        """Follow changes from outside: groups, parameters, their values."""
        is_current = self.replica.is_current()
        with torch.inference_mode(False):  # masters made in an evaluation are stepped outside of it
            self._follow_edits()
            if not is_current:
                self._follow_parameters()

    def _follow_parameters(self) -> None:
        self._refuse_overlapping()
        self.replica.follow()
        self._note_versions()

    def _note_versions(self) -> None:
        pairs = self.replica.pairs if self.replica.has_masters else ()
        self._versions = [pair.param._version for pair in pairs]

    def _follow_edits(self) -> None:
        known = self._versions
        self._note_versions()
        if known != self._versions:
            self.replica.is_doubtful = True

    def take_edits(self) -> None:
        """Let masters take all edits of the model before they are read."""
        with torch.inference_mode(False):
            self._find_edits()
            self.replica.take_edits()

    def _begin_update(self) -> None:
        """On the thread that steps: let masters take edits before they overwrite the model."""
        self._find_edits()
        self.replica.begin_update()

    def _find_edits(self) -> None:
        if self.replica.has_masters and self.replica.find_edits():
            logger.warning(
                "parameters of %s changed where torch counts no version (.data). Their float32 "
                "copies (masters) take the new values, but of large tensors only a sample had been "
                "compared: write `with torch.no_grad(): p.copy_(...)`, which is always seen. From "
                "now on each step compares all of them.",
                type(self.optimizer).__name__,
            )

    # The step.

    def step(
        self, deferred: DeferredUnscale | None = None, gathered: Gathered | None = None
    ) -> None:
        """Take the gradients and update. Synchronises with the device for masters, which are
        compared with the model.

        Raises:
            OrderError: it is closed.
            StepError: the update failed; says which parameters were updated.
            UnsupportedError: it cannot be stepped so; nothing was changed.
        """
        self._run_hooks("pre")
        self._get_ready()
        if self.replica.is_sharded:
            reduce_partial_gradients(self.replica.params)
        grads = [p.grad for p in self.replica.params]
        if any(grad is not None for grad in grads):
            self._forbid_sparse(grads)
            with self.replica.lock:
                self._update(grads, deferred or DeferredUnscale())
        self._run_hooks("post")

    def step_idle(self) -> None:
        if self._step_hooks("pre") or self._step_hooks("post"):
            self.step()

    def _get_ready(self) -> None:
        if self.is_closed:
            raise OrderError(
                f"a step of {type(self.optimizer).__name__} came after its stepper was closed. "
                "Make another AsyncOptimizer, or prepare the optimizer again."
            )
        self.refresh()

    @torch.no_grad()
    def launch(
        self, deferred: DeferredUnscale, sent: SentCheck, gathered: Gathered | None = None
    ) -> bool:
        if self._step_hooks("post") or self.replica.masters.on_host or is_replaced(self.optimizer):
            return False
        self._get_ready()
        grads, self._launched = [p.grad for p in self.replica.params], None
        if self.reads_beside or not has_state(self.optimizer):
            return False
        try:
            self.replica.prepare(grads)
            if self.replica.can_launch(grads, deferred):
                self.timing = timing = StepTiming(time.perf_counter(), inline=True)
                self._launched = grads, self.replica.launch(grads, deferred, sent), timing
        finally:
            if self._launched is None:
                self.replica.give_back_state()
        return self._launched is not None

    @torch.no_grad()
    def conclude(self, has_moved: bool) -> bool:
        assert self._launched is not None
        grads, check, timing = self._launched
        has_moved = has_moved and check.is_finite
        if has_moved:
            self.replica.publish_launched(grads)
            self.optimizer.__dict__["_opt_called"] = True
        self._end_update(grads if has_moved else [None] * len(grads), timing)
        self.steps += has_moved
        self._launched = None  # only now: after an interrupt all of it is done once more
        return has_moved

    @torch.no_grad()
    def _update(self, grads: Sequence[Tensor | None], deferred: DeferredUnscale) -> None:
        replica, done = self.replica, 0
        self._begin_update()
        replica.prepare(grads)
        self.steps += 1
        self.timing = timing = StepTiming(time.perf_counter(), inline=True)
        held = [None if grad is None else local(grad) for grad in grads]
        self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
        try:
            for part in replica.parts:
                replica.step_part(part, held[part.start : part.end], deferred)
                done += 1
        except BaseException as error:
            replica.is_doubtful = True
            failure = self._failure(error, self.steps, done, "training")
            if isinstance(error, Exception):
                raise failure from error
            logger.error("%s", failure)  # Ctrl-C and exit() go on as they would from torch's step
            raise
        finally:
            self._end_update(grads, timing)

    def _end_update(self, grads: Sequence[Tensor | None], timing: StepTiming) -> None:
        """Parameters with ``grads`` were, or may have been, updated."""
        timing.busy, timing.finished = time.perf_counter() - timing.start, True
        # Not those without a gradient: another branch's backward may still need them.
        params = zip(self.replica.params, grads, strict=True)
        torch.autograd.graph.increment_version([p for p, g in params if g is not None])
        self._note_versions()
        self.replica.give_back_state()

    def _failure(self, error: BaseException, number: int, done: int, thread: str) -> StepError:
        """The error of update ``number`` that failed after ``done`` parts."""
        replica, names = self.replica, self._names
        params, part = replica.params, replica.parts[min(done, len(replica.parts) - 1)]
        rest = "The gradients of this step are gone; the next step works with new ones."
        if thread == "training":
            rest = "Zero the gradients before the next backward."
        return StepError(
            f"step {number} of {type(self.optimizer).__name__} failed on the {thread} thread "
            f"({type(error).__name__}: {error}). Updated: {names(params[: part.start])}. Of "
            f"{names(params[part.start : part.end])} some may have moved, or their optimizer "
            f"state. As before the step: {names(params[part.end :])}. {rest}"
        )

    def _forbid_sparse(self, grads: Sequence[Tensor | None]) -> None:
        has_any = self.replica.has_masters or self.replica.masters.on_host
        for pair, grad in zip(self.replica.ordered if has_any else (), grads, strict=False):
            if grad is not None and grad.layout is not torch.strided and is_ours(pair):
                raise UnsupportedError(
                    f"{self._names([pair.param])} has a sparse gradient, which offload and float32 "
                    "copies (masters) do not take. Use Embedding(sparse=False), or float32 "
                    "parameters without offload."
                )

    def _step_hooks(self, when: str) -> list[Callable[..., Any]]:
        """The optimizer's own step hooks and the global ones, in torch's order."""
        everywhere = getattr(optimizer_module, f"_global_optimizer_{when}_hooks").values()
        own = getattr(self.optimizer, f"_optimizer_step_{when}_hooks").values()
        return [*everywhere, *own] if when == "pre" else [*own, *everywhere]

    def _run_hooks(self, when: str) -> None:
        """Call the step hooks on the training thread, as torch does."""
        hooks = self._step_hooks(when)
        if hooks:
            self.synchronize()  # they see the state after the update, the last or the present one
        for hook in hooks:
            hook(self.optimizer, (self.optimizer,), {})

    # Saving, loading and closing.

    def _before_saving(self, optimizer: Optimizer) -> None:
        self.synchronize()
        self.refresh()  # a model that was loaded after its masters
        self.take_edits()
        self.replica.rest()

    def _after_saving(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return with_masters(state_dict, self.replica.pairs)

    def _before_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Make room for masters, also where a parameter is frozen and may be trained again, and
        leave to torch what is not ours."""
        self.synchronize()
        # Not strict: torch refuses a state dict of another number of parameters.
        params = zip(keys_of(state_dict), parameters_of(optimizer), strict=False)
        entries = state_dict["state"]
        self.replica.saved = {id(p) for key, p in params if MASTER in entries.get(key, {})}
        self.refresh()
        self._loading = state_dict
        keyed = zip(keys_of(state_dict), self.replica.pairs, strict=False)
        # torch would cast to the parameter's dtype and device, which is not where it lives here.
        ours = {key for key, pair in keyed if is_ours(pair)}
        if ours and next(reversed(optimizer._optimizer_load_state_dict_pre_hooks)) != self._last:
            raise UnsupportedError(
                "load_state_dict: a pre-hook was registered after prepare() or AsyncOptimizer(), "
                "and would not see the state, which goes into float32 copies (masters). Register "
                "it before, or change the state dict before it is loaded."
            )
        rest = {key: without_master(entry) for key, entry in entries.items() if key not in ours}
        return {**state_dict, "state": rest}

    def _after_loading(self, optimizer: Optimizer) -> None:
        """Load masters and their state. A saved ``master`` counts as far as it rounds to the
        model's present parameter."""
        loaded, self._loading = self._loading, None
        if loaded is not None:
            with torch.inference_mode(False):
                self.replica.load_state(loaded)
                self._note_versions()
            self.refresh()

    def close(self) -> None:
        """Give the optimizer back to torch: its state is as torch has it."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            give_state_back(self.optimizer, self.replica.pairs)
        finally:
            self._leave_optimizer()
            self.replica.let_go()
            self._versions = []

    def _leave_optimizer(self) -> None:
        unregister(self.optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _names(self, params: Sequence[Tensor]) -> str:
        names = self.parameter_names.of(params[:MAX_NAMES], self.optimizer)
        return listed(names, len(params)) or "none"
