"""What is stepped in place of an optimizer: a copy of it, with parameters of its own.

The user's optimizer stays what schedulers, checkpoints and log lines look at. The copy has the same
class and shares the state entries; its hyperparameters are copied at each step. It knows neither
which thread steps it nor who waits.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    SentCheck,
    local,
    match_layout,
    nothing_found,
    parameters_of,
)
from .arena import Arena, Held
from .blocks import Run, Scratch, rule_of
from .masters import (
    MASTER,
    MasterRule,
    ParameterPair,
    goes_to_master,
    is_ours,
    is_stepped,
    keys_of,
    make_pairs,
    without_master,
)
from .spot_check import SpotCheck
from .stepper import ATTRIBUTE, raw_step
from .supported_optimizers import refuse_replaced, refuse_unsteppable

PARTS = 32
"""About how many parts a step has: each costs some Python, and a forward waits for whole ones."""
SMALLEST_PART, LARGEST_PART = 1 << 19, 1 << 22
"""Elements in a part, unless one parameter alone has more."""


class Part:
    """Pairs that are updated together: neighbours in an arena, and so of one parameter group."""

    def __init__(self, pairs: list[ParameterPair], start: int) -> None:
        self.pairs, self.start, self.end = pairs, start, start + len(pairs)
        self.group = pairs[0].group
        self.run: Run | None = None
        """What may step it by a fused kernel; None: not made yet."""


class Replica:
    """Pairs, parts and the copy of one optimizer; ``masters`` says which parameters have one. For
    the training thread, except where said."""

    def __init__(self, optimizer: Optimizer, masters: MasterRule) -> None:
        self.optimizer, self.masters = optimizer, masters
        self.lock = threading.RLock()
        """Held for an update. Another thread that saves holds it, too."""
        refuse_unsteppable(optimizer, masters)
        self._ranks: dict[int, int] = {}
        """The order of the parts, by the ``id`` of parameters."""
        self.saved: set[int] = set()
        """``id`` of parameters whose masters are about to be loaded."""
        self.let_go()

    def let_go(self) -> None:
        """Keep no master, no copy and no parameter, as before the first :meth:`follow`."""
        self.pairs: list[ParameterPair] = []
        """All pairs in the optimizer's order."""
        self.parts: list[Part] = []
        self.ordered: list[ParameterPair] = []
        self.params: list[Tensor] = []
        """All pairs, and the model's parameters, in the order of the parts."""
        self.part_of: dict[int, int] = {}
        """``id(parameter)`` -> how many parts must be done for it."""
        self.has_masters = self.is_sharded = False
        self.copy: Any = None
        self.is_doubtful = self.takes_edits = False
        """Parameters may be other than their rounded masters: they were edited, masters were loaded
        and the model perhaps not yet, or a step has failed. So the next step, or this one, compares
        all."""
        self._scratch = Scratch()
        self._spot_check = SpotCheck(())
        self._layout: object = None
        """What :meth:`_layout_of` said at the last :meth:`follow`."""
        self._shared: Held | None = None
        """The optimizer's state, when it was last shared."""
        self._entries = 0
        """How many entries of state the copy was given for this step."""
        self._keys: list[tuple[bool, tuple[str, ...]]] = []
        """Per group, when the state was last shared: (has a kernel, keys of state)."""

    def is_current(self) -> bool:
        """Whether there is nothing for :meth:`follow` to do."""
        params = parameters_of(self.optimizer)
        return not self.saved and self._layout_of(params) == self._layout

    def _layout_of(self, params: list[Tensor]) -> object:
        """Per group of each parameter, its memory (which its pair keeps, so no other comes to lie
        there), and whether it is trained, if some may need a master."""
        # float16 is refused without a master, once it is trained.
        low = self.masters.dtypes | {torch.float16}
        is_sharded = any(hasattr(p, "to_local") for p in params[:1])
        may_need_masters = self.masters.on_host or any(p.dtype in low for p in params)
        held = [local(p.detach()) for p in params] if is_sharded else params
        return (
            [len(group["params"]) for group in self.optimizer.param_groups],
            [
                (id(p), t.data_ptr(), t.size(), t.stride())
                for p, t in zip(params, held, strict=True)
            ],
            may_need_masters and list(map(is_stepped, params)),
        )

    def may_have_masters(self) -> bool:
        """Whether some have masters now, or after :meth:`follow`: one may be unfrozen."""
        takes, params = self.masters.takes, parameters_of(self.optimizer)
        return self.has_masters or any(takes(p) and is_stepped(p) for p in params)

    def follow(self) -> None:
        """Take over new groups and moved or resized parameters."""
        refuse_unsteppable(self.optimizer, self.masters)
        self.pairs = make_pairs(
            self.optimizer, self.masters, self.pairs, self.saved, self._ranks, self.size_of
        )
        self._layout, self.saved = self._layout_of(parameters_of(self.optimizer)), set()
        self._make_copy()
        self._split()
        self._spot_check = SpotCheck(self.pairs, self._spot_check.may_miss)
        self._shared = None

    def order_by(self, params: Iterable[Tensor]) -> None:
        """Update ``params`` in this order from now on, after those of earlier calls; others come
        last."""
        for p in params:
            self._ranks.setdefault(id(p), len(self._ranks))
        if self.pairs:
            self._split()

    def _make_copy(self) -> None:
        cls: Any = type(self.optimizer)
        copy: Any = object.__new__(cls)
        hidden = ("step", "param_groups", "state", ATTRIBUTE)
        copy.__dict__.update({k: v for k, v in vars(self.optimizer).items() if k not in hidden})
        for key in list(vars(copy)):
            if key.startswith("_optimizer_") and key.endswith("_hooks"):
                copy.__dict__[key] = type(vars(copy)[key])()
        copy.state = defaultdict(dict)
        copy.param_groups = [{"params": []} for _ in self.optimizer.param_groups]
        for pair in self.pairs:
            copy.param_groups[pair.group]["params"].append(pair.stepped)
        self.copy = copy

    def _split(self) -> None:
        """Cut the pairs into parts, in the model's order."""
        self.rest()  # other parts know nothing of copies under way
        ranks, last, limit = self._ranks, len(self._ranks), self._largest_part()
        by_arena: dict[Arena, list[ParameterPair]] = {}
        for pair in self.pairs:
            by_arena.setdefault(pair.arena, []).append(pair)
        cut = [some for mine in by_arena.values() for some in _neighbours(mine, limit)]
        cut.sort(key=lambda some: min(ranks.get(id(pair.param), last) for pair in some))
        self.parts, self.ordered = [], []
        for some in cut:
            self.parts.extend(self._parts_of(some, len(self.ordered), limit))
            self.ordered.extend(some)
        ordered = self.ordered
        self.params = [pair.param for pair in ordered]
        self.part_of = {
            id(pair.param): number
            for number, part in enumerate(self.parts, 1)
            for pair in part.pairs
        }
        self.has_masters = any(pair.is_master for pair in ordered)
        self.is_sharded = any(hasattr(pair.param, "to_local") for pair in ordered)

    def _largest_part(self) -> int:
        """Elements in a part, unless one parameter alone has more."""
        elements = sum(pair.target.numel() for pair in self.pairs)
        return min(max(elements // PARTS, SMALLEST_PART), LARGEST_PART)

    def _parts_of(self, pairs: list[ParameterPair], start: int, limit: int) -> Sequence[Part]:
        return [Part(pairs, start)]

    def size_of(self, pair: ParameterPair) -> int:
        """Bytes of a pair's master and state."""
        return 0

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        """Get ready for a step with ``grads``, as the optimizer is now.

        Raises:
            UnsupportedError: it cannot be stepped so; nothing was changed.
        """
        refuse_replaced(self.optimizer)
        state = self.optimizer.state
        self._lay_out(state)
        stepped_of = {id(pair.param): pair.stepped for pair in self.pairs}
        entries = {stepped_of.get(id(key), key): entry for key, entry in state.items()}
        self.copy.state, self._entries = defaultdict(dict, entries), len(entries)
        # A scheduler moves the hyperparameters a line later.
        groups = zip(self.optimizer.param_groups, self.copy.param_groups, strict=True)
        self.copy.param_groups = [  # all at once: Ctrl-C may come while they are copied
            {k: own["params"] if k == "params" else frozen(v) for k, v in group.items()}
            for group, own in groups
        ]

    def give_back_state(self) -> None:
        """Give the optimizer the state that a step has made, and keep none: a script may take it
        out, to free its memory."""
        if self.copy is None:
            return
        state, made = self.optimizer.state, self.copy.state
        for pair in self.pairs if len(made) > self._entries else ():
            if pair.param not in state and (entry := made.get(pair.stepped)):
                state[pair.param] = entry
        self.copy.state = defaultdict(dict)

    def _lay_out(self, state: dict[Any, Any]) -> None:
        """Let pairs step the optimizer's ``state`` as it is now."""
        rule, groups, shared = rule_of(self.optimizer), self.optimizer.param_groups, self._shared
        keys = [] if rule is None else [(rule.takes(group), rule.keys(group)) for group in groups]
        values = _values_of(state)
        if keys == self._keys and shared is not None and shared.is_current([*state], values):
            return
        for arena in {pair.arena for pair in self.pairs}:
            arena.renew_counts()
        for pair in self.pairs:
            self._move_entry(pair, state.get(pair.param, {}))
        self._shared, self._keys = Held([*state], _values_of(state), repeat(True)), keys
        for part in self.parts:
            part.run = None

    def _move_entry(self, pair: ParameterPair, entry: dict[str, Any]) -> None:
        """Convert one parameter's state to the tensors that its pair steps with: shards, or for a
        master float32 tensors on its device."""
        for key, value in entry.items():
            if isinstance(value, Tensor):
                entry[key] = self._moved(pair, key, local(value))
        rule, group = rule_of(self.optimizer), self.optimizer.param_groups[pair.group]
        if rule is not None and not pair.is_offloaded:
            counts = rule.counts and rule.takes(group)  # else they may be on another device
            pair.arena.adopt(pair.slot, entry, rule.keys(group), counts)

    def _moved(self, pair: ParameterPair, key: str, value: Tensor) -> Tensor:
        return exact(key, value.to(pair.stepped.device)) if pair.is_master else value

    def load_state(self, state_dict: dict[str, Any]) -> None:
        """Load masters, with their state, and state in host memory; torch has loaded the rest."""
        self.rest()
        for pair, key in zip(self.pairs, keys_of(state_dict), strict=True):
            saved = state_dict["state"].get(key, {})
            if is_ours(pair) and (own := without_master(saved)):
                self._move_entry(pair, own)
                self.optimizer.state[pair.param] = own
            if pair.is_master:
                master = saved.get(MASTER)
                pair.stepped.data.copy_(pair.target if master is None else local(master))
        self._shared, self.is_doubtful = None, True
        self.give_back_state()

    def find_edits(self) -> bool:
        """While the model has the masters' values, look for edits that no version counts
        (``p.data``). Returns whether there are some for the first time.

        Reads samples of all masters and parameters. Synchronises with the device.
        """
        with self.lock:
            if self.is_doubtful:
                return False
            had_some = self._spot_check.may_miss
            self.is_doubtful = had_some or self._spot_check.find()
            return self.is_doubtful and not had_some

    def begin_update(self) -> None:
        """On the thread that steps: if some may be edited, let masters take the values of
        parameters; those in host memory do while they are stepped."""
        self.takes_edits = self.is_doubtful
        for pair in self.pairs if self.takes_edits else ():
            if not pair.is_offloaded:
                pair.refresh()
        self.is_doubtful = False

    def take_edits(self) -> None:
        """If some may be edited, let masters take the values of parameters, where they rest."""
        with self.lock:
            if self.is_doubtful:
                self.rest()
                for pair in self.pairs:
                    pair.refresh()
                self._spot_check.note()
                self.is_doubtful = False

    # What only state in host memory needs.

    def watch(self, model: Module) -> None:
        """``model`` is about to be trained."""

    def before_backward(self, is_last: bool) -> None:
        """As :meth:`Stepper.before_backward`."""

    def skip(self) -> None:
        """A window without a step."""

    def rest(self) -> None:
        """Wait until masters and state are the newest where they rest."""

    def step_part(
        self, part: Part, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> None:
        """On any thread: multiply a part's gradients by ``deferred``, update it, and write new
        values of masters to the model."""
        if (run := self._run_of(part)) is not None and run.takes(grads):
            self._call_run(part, run, grads, deferred)
            return
        params, final = [p.stepped for p in part.pairs], self.bring(part.pairs, grads, deferred)
        self.step_these(params, final, part.group, self.copy.state)
        for pair in part.pairs:
            pair.publish()

    def _run_of(self, part: Part) -> Run | None:
        """What may step a part by calls of a fused kernel; None: no such kernel is known."""
        rule = rule_of(self.optimizer)
        if rule is not None and part.run is None:
            group = self.copy.param_groups[part.group]
            part.run = Run(part.pairs, rule, group, self.copy, self._scratch)
        return part.run

    def _call_run(
        self,
        part: Part,
        run: Run,
        grads: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        sent: SentCheck | None = None,
    ) -> None:
        """Step a part by ``run``, and publish masters, unless a check that was ``sent`` decides."""
        kind, group = type(self.optimizer), self.copy.param_groups[part.group]
        whole = not deferred and run.takes(grads, whole=True)
        run.step(kind, group, grads, deferred, publishes=sent is None, whole=whole, sent=sent)

    def can_launch(self, grads: Sequence[Tensor | None], deferred: DeferredUnscale) -> bool:
        """Whether :meth:`launch` may be called after :meth:`prepare`: kernels do all of the step,
        and nothing is multiplied in place, which a second try would do again."""
        in_place = deferred and not all(g is None or g.dtype in LOW_PRECISION for g in grads)
        if in_place or self.is_doubtful or self.is_sharded or self._spot_check.may_miss:
            return False
        runs = [(self._run_of(part), grads[part.start : part.end]) for part in self.parts]
        return all(run is not None and run.takes(mine) for run, mine in runs)

    def launch(
        self, grads: Sequence[Tensor | None], deferred: DeferredUnscale, sent: SentCheck
    ) -> SentCheck:
        """Enqueue the update of all parts. It moves nothing where the returned check fails: where
        ``sent`` does, or a parameter was edited unseen. Does not synchronise."""
        both = self._spot_check.send(sent)
        for part in self.parts:
            assert part.run is not None
            self._call_run(part, part.run, grads[part.start : part.end], deferred, both)
        return both

    def publish_launched(self, grads: Sequence[Tensor | None]) -> None:
        """Write masters' new values to the model, after a :meth:`launch` that has moved them."""
        for part in self.parts:
            if part.run is not None:
                part.run.publish(grads[part.start : part.end])

    def bring(
        self,
        pairs: Sequence[ParameterPair],
        grads: Sequence[Tensor | None],
        deferred: DeferredUnscale,
    ) -> list[Tensor | None]:
        """The gradients that ``pairs`` are stepped with, float32 for masters, where they are.
        Gradients of float32 parameters are unscaled in place."""
        final = list(grads)
        scaled: list[tuple[Tensor, Tensor]] = []
        for place, (pair, grad) in enumerate(zip(pairs, grads, strict=True)):
            if grad is not None:
                final[place] = exact = grad.float() if goes_to_master(pair, grad) else grad
                scaled.append((pair.param, exact))
        deferred.apply(scaled)
        return final

    def step_these(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        group: int,
        state: dict[Any, Any],
    ) -> None:
        """The optimizer's own step on ``params``, of one ``group``, and their ``state``."""
        copy, whole, states = self.copy, self.copy.param_groups, self.copy.state
        copy.state, copy.param_groups = state, [{**whole[group], "params": list(params)}]
        try:
            # Apart: torch's fused SGD takes no momentum beside parameters that have none yet.
            new = {
                p for p in params if any(v is None for v in (state.get(p) or {"": None}).values())
            }
            for some in filter(None, (new, {*params} - new)):
                for p, grad in zip(params, grads, strict=True):
                    if grad is not None and grad.dtype is not p.dtype:
                        p.grad_dtype = grad.dtype
                    p.grad = grad if p in some else None
                self.call_step(params)
        finally:
            copy.param_groups, copy.state = whole, states
            for p in params:
                p.grad = None

    def call_step(self, params: Sequence[Tensor]) -> Any:
        """The class's step on the copy, where ``params`` have gradients."""
        copy, step = self.copy, raw_step(type(self.optimizer))
        if not getattr(copy, "_step_supports_amp_scaling", False):
            return step(copy)
        if params and params[0].device.type == "cpu":
            match_layout(params, copy.state)
        copy.grad_scale, copy.found_inf = None, nothing_found(copy)
        try:
            return step(copy)
        finally:
            del copy.grad_scale, copy.found_inf


def _neighbours(pairs: list[ParameterPair], limit: int) -> Iterator[list[ParameterPair]]:
    """All ``pairs`` of one arena, in pieces without a gap (a parameter may have left) of at most
    ``limit`` elements there, unless one alone has more."""
    pairs, begin = sorted(pairs, key=attrgetter("slot")), 0
    arena = pairs[0].arena
    for end in range(1, len(pairs)):
        slot, is_gap = pairs[end].slot, pairs[end].slot - pairs[end - 1].slot > 1
        if is_gap or arena.end(slot) - arena.offsets[pairs[begin].slot] > limit:
            yield pairs[begin:end]
            begin = end
    yield pairs[begin:]


def exact(key: str, value: Tensor) -> Tensor:
    """A tensor of state as a master's: in float32."""
    return value.float() if key != "step" and value.is_floating_point() else value


def frozen(value: Any) -> Any:
    """A copy of hyperparameters, with new containers, and new tensors (a ``Parameter`` stays)."""
    if type(value) in (float, int, bool, NoneType):  # nearly always
        return value

    def copy_of(leaf: Any) -> Any:
        is_copied = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        return leaf.detach().clone() if is_copied else leaf

    return tree_map(copy_of, value)


def _values_of(state: Mapping[Any, Any]) -> list[Any]:
    """All values in the entries of parameters."""
    entries = [entry for key, entry in state.items() if isinstance(key, Tensor)]
    return list(chain.from_iterable(map(dict.values, entries)))
