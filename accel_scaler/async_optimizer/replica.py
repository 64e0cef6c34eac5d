"""What is stepped: a copy of the optimizer with own parameters, shared state, frozen settings.

The user's optimizer stays what schedulers, checkpoints and log lines look at. Its copy has the
same class, the same state entries, and hyperparameters copied when a step is handed over. Only
torch's optimizers, whose steps treat each parameter alone, are copied: another one steps itself,
on the training thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedError
from ..optimizer_step import ATTRIBUTE, AdamGroup, is_plain
from ..scaling import (
    LOW_PRECISION,
    SMALL,
    is_uniform,
    laid_out_otherwise,
    local,
    match_layout,
    nothing_found,
    parameters_of,
)
from .master_params import ParameterPair, is_stepped, make_pairs, shard_of
from .master_rule import MasterRule
from .shared_memory import overlapping
from .spot_check import SpotCheck
from .streams import SideStreams
from .supported_optimizers import (
    attributes_of_every_optimizer,
    is_splittable,
    known_class,
    raw_step,
    refuse_replaced,
    refuse_spread,
    refuse_unshardable,
    refuse_unsteppable,
)
from .thread_context import ThreadContext

PARTS = 32
"""About how many parts a step has: each costs some Python, and a forward waits for whole ones."""
SMALLEST_PART, LARGEST_PART = 1 << 19, 1 << 22
"""Elements in a part, unless one parameter alone has more."""

_dtype_of = attrgetter("dtype")


class Part:
    """Pairs that are updated together, in the order of the forward."""

    def __init__(self, pairs: list[ParameterPair], start: int) -> None:
        self.pairs, self.start, self.end = pairs, start, start + len(pairs)
        found: dict[int, list[int]] = {}
        for place, pair in enumerate(pairs):
            found.setdefault(pair.group, []).append(place)
        self.groups = dict(sorted(found.items()))
        """The places of each parameter group's pairs, in the optimizer's order of groups."""
        self.plans: dict[int, AdamGroup] | None = None
        self.epoch = -1


class Replica:
    """Pairs, parts and the copy of one optimizer. Main thread only, except where said.

    torch's optimizers are stepped part by part. Another one is stepped whole, by itself.

    Args:
        offload: state and masters live in host memory.
        masters: which parameters have them.
        inline: steps run on the training thread.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        streams: SideStreams,
        *,
        offload: bool,
        masters: MasterRule,
        inline: bool = False,
    ) -> None:
        self.optimizer, self.streams = optimizer, streams
        self.offload, self.masters = offload, masters
        refuse_unsteppable(self.optimizer, self.masters)
        refuse_unshardable(optimizer)
        self.splittable = is_splittable(optimizer)
        self.inline = inline or not self.splittable
        """Steps run on the training thread."""
        self.thread_context = ThreadContext(streams.device)
        """Of the thread that has handed the last step over."""
        self.raw_step = raw_step(type(optimizer))
        self.pairs: list[ParameterPair] = []
        self.ordered: list[ParameterPair] = []
        """The pairs in the order of the parts."""
        self.has_rounded = False
        """The model holds some parameters in less than their masters' precision."""
        self.has_masters = self.is_sharded = False
        self.has_loaded = False
        """Some pairs keep masters from a state dict."""
        self.ends: list[int] = []
        """For each part, how many parameters are stepped once it is done."""
        self.part_of: dict[int, int] = {}
        """``id(parameter)`` -> how many parts must be done for it."""
        self.params: list[Tensor] = []
        """The model's parameters, in the order of the parts."""
        self.parts: list[Part] = []
        self._buffers: list[Any] = []
        """Where gradients are copied to, in the order of the parts, if all of them are small."""
        self.copy: Any = None
        self._epoch = 0
        """Grows when state entries are other ones than before."""
        self._order: list[int] = []
        self._together: dict[int, list[int]] = {}
        """Of pairs, by their places, that have memory in common: all of these."""
        self._spot_check = SpotCheck((), set())
        self._edited: set[int] = set()
        """``id`` of parameters that were written to where no version shows it."""
        self._left: list[ParameterPair] = []
        """Of parameters that are in no group now, while the optimizer's state still has them."""
        self._saved: set[int] = set()
        """``id`` of parameters of which a state dict has a master."""
        self._known: list[Tensor] = []
        self._places: object = None
        self._may_need_masters = False
        self._state: Any = None
        self._entries: list[Any] = []
        self._mine: list[dict[str, Any]] = []
        """Of these, the parameters' own."""
        self._values: list[Any] = []
        """What the entries held when they were last brought to where they are stepped."""
        self._kept: tuple[Any, list[Any]] = None, []
        """The training stream, and what the entries held, when their memory was last kept."""

    def is_current(self) -> bool:
        """Whether there is nothing for :meth:`follow` to do."""
        params = parameters_of(self.optimizer)
        return (
            self.copy is not None
            and len(params) == len(self._known)
            and all(map(is_, params, self._known))
            and _places(params, self._may_need_masters) == self._places
        )

    def rounds_now(self) -> bool:
        """What ``has_rounded`` will be once :meth:`follow` has looked: one may be unfrozen."""
        trained = filter(is_stepped, parameters_of(self.optimizer))
        return not self.masters.rounded.isdisjoint(map(_dtype_of, trained))

    def follow(self) -> bool:
        """Take over new groups and moved or resized parameters; True if there were any."""
        if self.is_current():
            return False
        params = parameters_of(self.optimizer)
        refuse_unsteppable(self.optimizer, self.masters)
        refuse_unshardable(self.optimizer)
        if not self.inline:
            refuse_spread(self.optimizer, self.streams.device)
        known = [*self.pairs, *self._left]
        pairs = make_pairs(
            self.optimizer,
            self.streams,
            offload=self.offload,
            masters=self.masters,
            known=known,
            saved=self._saved,
        )
        self._follow_groups(known, pairs)
        # Or is refused, once it is trained.
        low = self.masters.rounded | {torch.float16}
        self._may_need_masters = self.masters.every or any(p.dtype in low for p in params)
        self.pairs, self._known, self._saved = pairs, params, set()
        self._places = _places(params, self._may_need_masters)
        self._order = list(range(len(pairs)))
        groups = overlapping([pair.target for pair in pairs])
        self._together = {i: group for group in groups for i in group}
        self._make_copy()
        self._split()
        self._spot_check = SpotCheck(pairs, self._edited)
        self._state = None
        return True

    def _follow_groups(self, known: list[ParameterPair], pairs: list[ParameterPair]) -> None:
        """Keep the masters of parameters that were taken out of their groups, as the optimizer
        keeps their state, and bring to those that come back what was written meanwhile."""
        now = {id(pair.param) for pair in pairs}
        back = set(map(id, self._left)).intersection(map(id, pairs))
        for pair in (pair for pair in pairs if id(pair) in back):
            pair.refresh()
        state = self.optimizer.state
        self._left = [
            pair
            for pair in known
            if pair.is_master and id(pair.param) not in now and pair.param in state
        ]

    def reorder(self, first_used: Sequence[Tensor]) -> None:
        """Update in this order from now on; parameters that are not named come last."""
        rank = {id(p): place for place, p in reversed(list(enumerate(first_used)))}
        last = len(first_used)
        self._order.sort(key=lambda i: rank.get(id(self.pairs[i].param), last))
        self._split()

    def _bring_together(self, order: list[int]) -> list[int]:
        """``order``, with those that have memory in common where the first of them is, and in the
        optimizer's order: who waits for one waits for what all of them do to that memory."""
        if not self._together:
            return order
        place = {i: at for at, i in enumerate(order)}
        first = {i: min(place[j] for j in group) for i, group in self._together.items()}
        return sorted(order, key=lambda i: (first.get(i, place[i]), i))

    def _make_copy(self) -> None:
        # Of another one it only holds the groups.
        cls: Any = known_class(type(self.optimizer)) if self.splittable else Optimizer
        copy: Any = object.__new__(cls)
        hidden = ("step", "param_groups", "state", ATTRIBUTE)
        copy.__dict__.update({k: v for k, v in vars(self.optimizer).items() if k not in hidden})
        for key in list(vars(copy)):
            if key.endswith("_hooks") and key in attributes_of_every_optimizer():
                copy.__dict__[key] = type(vars(copy)[key])()
        copy.state = defaultdict(dict)
        copy.param_groups = [{"params": []} for _ in self.optimizer.param_groups]
        for pair in self.pairs:
            copy.param_groups[pair.group]["params"].append(pair.stepped)
        self.copy = copy

    def _split(self) -> None:
        """Cut the pairs into parts, not between those that have memory in common."""
        self._order = order = self._bring_together(self._order)
        ordered = [self.pairs[i] for i in order]
        total = sum(pair.stepped.numel() for pair in ordered)
        size = min(max(total // PARTS, SMALLEST_PART), LARGEST_PART)
        cuts, have = [0], 0
        for place, pair in enumerate(ordered, 1):
            have += pair.stepped.numel()
            if have >= size and self.splittable and not self._belongs_to_next(place):
                cuts.append(place)
                have = 0
        if cuts[-1] != len(ordered):
            cuts.append(len(ordered))
        self.parts = [Part(ordered[a:b], a) for a, b in pairwise(cuts)]
        self.ordered = ordered
        self.params = [pair.param for pair in ordered]
        self.ends = [part.end for part in self.parts]
        self._buffers = self._make_buffers()
        self.part_of = {
            id(pair.param): number
            for number, part in enumerate(self.parts, 1)
            for pair in part.pairs
        }
        self.has_rounded = any(pair.is_rounded for pair in ordered)
        self.has_masters = any(pair.is_master for pair in ordered)
        self.is_sharded = any(hasattr(pair.param, "to_local") for pair in ordered)

    def _belongs_to_next(self, place: int) -> bool:
        """Whether the pair before ``place`` has memory in common with the one there."""
        after = self._order[place] if place < len(self._order) else -1
        return after in self._together.get(self._order[place - 1], ())

    def _make_buffers(self) -> list[Any]:
        targets = [pair.target for pair in self.ordered]
        suits = self.streams.is_host and not self.inline and is_uniform(targets)
        if suits and all(
            0 < t.numel() <= SMALL and t.is_contiguous() and not pair.is_master
            for pair, t in zip(self.ordered, targets, strict=True)
        ):
            return self.streams.host_like(targets)
        return []

    def fill_buffers(self, grads: list[Any], multiply: Tensor | None) -> bool:
        """On the worker, where all gradients are small: few calls for thousands of them.

        Beside a thread that runs Python each call into torch takes long, since it gives the
        interpreter's lock away, and so does dropping a tensor. So one call unscales all, one
        copies them to buffers, one counts the step; each part is one call of the kernel, with
        arguments that nobody has to look at anew. False: not so, nothing was done.
        """
        if (
            not self._buffers
            or set(map(type, grads)) != {Tensor}
            or list(map(Tensor.numel, grads)) != list(map(Tensor.numel, self._buffers))
        ):
            return False
        plans = [self._plans_of(part) for part in self.parts]
        if not all(plans):
            return False
        if multiply is not None:
            torch._foreach_mul_(grads, multiply)  # where ``.grad`` is
        torch._foreach_copy_(self._buffers, grads)
        self.count_steps(1, self.parts)
        return True

    def count_steps(self, steps: int, parts: Iterable[Part]) -> None:
        """Add to the counts in the state of ``parts``, which have plans."""
        plans = chain.from_iterable(part.plans.values() for part in parts if part.plans)
        torch._foreach_add_([plan.counts for plan in plans], steps)

    def prepare(self, grads: Sequence[Tensor | None], submitted: bool = False) -> None:
        """Get ready for a step with ``grads``, as the optimizer is now.

        Args:
            submitted: a function of the user's steps, on the optimizer thread.

        Raises:
            UnsupportedError: it may not be stepped so; nothing was changed.
        """
        refuse_replaced(self.optimizer)
        name = type(self.optimizer).__name__
        if self.splittable and not is_splittable(self.optimizer):
            raise UnsupportedError(
                f"{name}: a method that its step uses was replaced on this instance while a copy "
                "of it was stepped. Replace it before, or in a subclass."
            )
        if submitted and not self.splittable:
            raise UnsupportedError(
                f"submit(): {name} cannot be stepped on the optimizer thread, as torch's own "
                "optimizers can. Call optimizer.step() instead, which steps it on this one."
            )
        self.thread_context = ThreadContext(self.streams.device)
        if self.splittable:
            self.link_state(grads)
            self.freeze_settings()

    def freeze_settings(self) -> None:
        """Copy every hyperparameter as it stands now: a scheduler moves it a line later."""
        groups = zip(self.optimizer.param_groups, self.copy.param_groups, strict=True)
        for group, own in groups:
            for key in own.keys() - group.keys():
                del own[key]
            own.update({k: frozen(v) for k, v in group.items() if k != "params"})

    def link_state(self, grads: Sequence[Tensor | None]) -> None:
        """Share the optimizer's state entries, also those that somebody has put there since."""
        state = self.optimizer.state
        if (
            state is self._state
            and len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and (len(self._mine) == len(self.pairs) or self._has_all(grads))
        ):
            self._follow_values()
            return
        copied_state: Any = defaultdict(dict)
        copied_state.update({k: v for k, v in state.items() if not isinstance(k, Tensor)})
        present = {id(p) for p, g in zip(self.params, grads, strict=True) if g is not None}
        self._mine = []
        for pair in self.pairs:
            entry = state.get(pair.param)
            if entry is None and id(pair.param) in present:
                entry = state[pair.param] = {}
            if entry is not None:
                settle_entry(pair, entry)
                copied_state[pair.stepped] = entry
                self._mine.append(entry)
        self.copy.state = copied_state
        self._state, self._entries = state, list(state.values())
        self._values = []
        self._epoch += 1

    def _follow_values(self) -> None:
        """The entries are the same ones; what they hold may have been exchanged."""
        if self.has_masters or self.is_sharded:
            values = [v for entry in self._mine for v in entry.values()]
            known = self._values
            if len(values) != len(known) or not all(map(is_, values, known)):
                for pair in self.pairs:
                    settle_entry(pair, self.copy.state.get(pair.stepped, {}))
                self._values = [v for entry in self._mine for v in entry.values()]
        groups = self.optimizer.param_groups
        plans: list[tuple[int, AdamGroup]] = []
        for part in self.parts:
            if part.plans is not None and part.epoch == self._epoch:
                plans += part.plans.items()
        if not all(plan.still_fits(groups[number]) for number, plan in plans):
            self._epoch += 1

    def keep(self) -> None:
        """On the worker: the memory of what is stepped is not given to others before both streams
        are done with it, whichever it came from. Called before a step, and once it is enqueued.
        """
        streams = self.streams
        if not streams.copies_beside:
            return
        for group in self.copy.param_groups:
            streams.keep(tensors_in(value for key, value in group.items() if key != "params"))
        values = [v for entry in self._mine for v in entry.values()]
        home, known = self._kept
        if home != streams.home or len(values) != len(known) or not all(map(is_, values, known)):
            streams.keep(tensors_in(values), at_home=True)
            self._kept = streams.home, values

    def expect_masters(self, params: Iterable[Tensor]) -> None:
        """Masters of ``params`` are going to be loaded: :meth:`follow` makes room for those of
        frozen ones, too, which may be trained again."""
        self._saved = set(map(id, params))
        if any(id(pair.param) in self._saved and not pair.is_master for pair in self.pairs):
            self._places = None

    def load_state(self, state_dict: dict[str, Any], masters: dict[int, Any]) -> list[Any]:
        """Load state onto the stepped parameters and share it; the optimizer has the groups.

        Returns for each pair the key of its entry.
        """
        own = self.copy.param_groups
        self.copy.param_groups = [dict(group) for group in own]
        Optimizer.load_state_dict(self.copy, state_dict)
        self.copy.param_groups = own
        saved = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        state = self.optimizer.state
        state.clear()
        state.update({k: v for k, v in self.copy.state.items() if not isinstance(k, Tensor)})
        for pair, index in zip(self.pairs, saved, strict=True):
            entry = self.copy.state.get(pair.stepped)
            if entry is not None and not is_empty(entry):
                if isinstance(entry, dict):
                    settle_entry(pair, entry)
                    if not pair.is_master and self.masters.takes(pair.target):
                        _keep_exact(entry, state_dict["state"][index])
                state[pair.param] = entry
        self._take_masters(saved, masters)
        return saved

    def _take_masters(self, saved: Sequence[Any], masters: dict[int, Any]) -> None:
        for pair, index in zip(self.pairs, saved, strict=True):
            if pair.is_master:
                master = masters.get(index)
                pair.loaded = None if master is None else shard_of(master, pair.param)
                pair.refresh(pair.target if master is None else None)
                self.has_loaded = True
        self._state = None

    def take_edits(self) -> list[Tensor]:
        """Before a step, while the model has what was published: bring to the masters what was
        written to parameters where no version shows it (``p.data``). Returns these parameters.

        Reads samples of all masters and parameters; waits for the device.
        """
        edited = self._spot_check.find()
        if self.has_loaded:  # a model is loaded after its masters, perhaps through ``.data``
            loaded = [pair for pair in self.pairs if pair.loaded is not None]
            edited += [pair for pair in loaded if pair not in edited and pair.is_edited]
        for pair in edited:
            pair.refresh()
        return [pair.param for pair in edited]

    def forget_loaded(self) -> None:
        """A step begins: the model has been loaded by now, if it ever is."""
        for pair in self.pairs if self.has_loaded else ():
            pair.loaded = None
        self.has_loaded = False

    def _has_all(self, grads: Sequence[Tensor | None]) -> bool:
        state = self.optimizer.state
        return all(p in state for p, g in zip(self.params, grads, strict=True) if g is not None)

    def step_part(
        self,
        part: Part,
        grads: list[Any],
        grad_scale: Tensor | None,
        buffered: bool = False,
    ) -> None:
        """On the worker: update a part with gradients that are final but for ``grad_scale``.

        ``buffered``: :meth:`fill_buffers` has taken them.
        """
        plans = self._plans_of(part)
        if buffered and plans is not None:
            filled = self._buffers[part.start : part.end]
            for number, plan in plans.items():
                mine = [filled[place] for place in part.groups[number]]
                plan.update(self.copy.param_groups[number], mine, grad_scale)
            if grad_scale is not None:  # as the kernel leaves them where it is given them
                torch._foreach_copy_(grads, filled)
            return
        complete = plans is not None and all(
            plan.takes([grads[place] for place in part.groups[number]])
            for number, plan in plans.items()
        )
        if complete and plans is not None:
            for number, plan in plans.items():
                mine = [grads[place] for place in part.groups[number]]
                plan.step(self.copy.param_groups[number], mine, grad_scale)
            return
        part.epoch = -1  # its first step makes the state that a plan needs
        self._step_in_python(part, grads, grad_scale)

    def _plans_of(self, part: Part) -> dict[int, AdamGroup] | None:
        if part.epoch == self._epoch:
            return part.plans
        part.epoch, part.plans = self._epoch, None
        if self._can_plan(part):
            part.plans = {
                number: AdamGroup(
                    self.copy,
                    {
                        **self.copy.param_groups[number],
                        "params": [part.pairs[place].stepped for place in places],
                    },
                )
                for number, places in part.groups.items()
            }
        return part.plans

    def _can_plan(self, part: Part) -> bool:
        """Whether torch's fused Adam kernel can be called directly."""
        return (
            type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and all(is_plain(self.copy.param_groups[n]) for n in part.groups)
            and is_uniform([pair.stepped.detach() for pair in part.pairs])
            and all(self.copy.state.get(pair.stepped) for pair in part.pairs)
            and not any(laid_out_otherwise(pair.stepped, self.copy.state) for pair in part.pairs)
            and len(self.part_of) == len(self.params)  # none of them twice
        )

    def _step_in_python(
        self, part: Part, grads: list[Tensor | None], grad_scale: Tensor | None
    ) -> None:
        """The optimizer's own step on the part; what it was before, if that fails half-way."""
        if not self.splittable:  # all of it in one step; what it has done stays, as in torch
            self.call_step([pair.param for pair in part.pairs], grad_scale, self.optimizer)
            return
        params = [pair.stepped for pair in part.pairs]
        before = [p.detach().clone() for p, g in zip(params, grads, strict=True) if g is not None]
        whole = self.copy.param_groups
        self.copy.param_groups = [
            {**whole[number], "params": [params[place] for place in places]}
            for number, places in part.groups.items()
        ]
        try:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            self.call_step(params, grad_scale, self.copy)
            for p, grad in zip(params if grad_scale is not None else (), grads, strict=False):
                if grad is not None and p.grad is not None and p.grad is not grad:
                    grad.copy_(p.grad)  # the kernel has unscaled a copy in another layout
        except BaseException:
            stepped = [p for p, g in zip(params, grads, strict=True) if g is not None]
            for p, old in zip(stepped, before, strict=True):
                p.detach().copy_(old)
            raise
        finally:
            self.copy.param_groups = whole
            for p in params:
                p.grad = None

    def let_go(self) -> None:
        """Nothing is stepped any more: keep no master, no copy and no parameter."""
        self.pairs, self.ordered, self.params, self.parts = [], [], [], []
        self.copy, self._known, self._buffers = None, [], []
        self._spot_check, self._left = SpotCheck((), set()), []
        self._state, self._entries, self._mine, self._values = None, [], [], []
        self._kept = None, []

    def call_step(
        self, params: Sequence[Tensor], grad_scale: Tensor | None, stepped: Any = None
    ) -> Any:
        """The class's step on ``stepped``, by default the copy.

        Args:
            params: have the gradients.
        """
        stepped = self.copy if stepped is None else stepped
        with self.thread_context.around_step(), self._beside_masters():
            if not getattr(stepped, "_step_supports_amp_scaling", False):
                return self.raw_step(stepped)
            if params and params[0].device.type == "cpu":
                match_layout(params, stepped.state)
            stepped.grad_scale, stepped.found_inf = grad_scale, nothing_found(stepped)
            try:
                return self.raw_step(stepped)
            finally:
                del stepped.grad_scale, stepped.found_inf

    def _beside_masters(self) -> AbstractContextManager[Any]:
        """What the step makes without naming a device lies where the masters are."""
        elsewhere = self.offload and torch.get_default_device().type != "cpu"
        return torch.device("cpu") if elsewhere else nullcontext()


def frozen(value: Any) -> Any:
    """As it is now: a hyperparameter, or a list, tuple or dict of some."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(frozen, value))
    return {key: frozen(item) for key, item in value.items()} if type(value) is dict else value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among ``values``, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def is_empty(entry: Any) -> bool:
    """Whether a parameter's state was made for sharing, and never filled."""
    return isinstance(entry, dict) and not entry


def settle_entry(pair: ParameterPair, entry: dict[str, Any]) -> None:
    """Bring one parameter's state to where it is stepped: shards, the master's device, float32."""
    for key, value in entry.items():
        if not isinstance(value, Tensor):
            continue
        value = local(value)
        if pair.is_master:
            exact = key == "step" or not value.is_floating_point()
            value = value.to(pair.stepped.device, None if exact else torch.float32)
        entry[key] = value


def _keep_exact(entry: dict[str, Any], saved: dict[str, Any]) -> None:
    """Of a frozen parameter, which may be unfrozen: what torch has rounded to its dtype."""
    for key, value in saved.items():
        rounded = entry.get(key)
        if isinstance(rounded, Tensor) and rounded.dtype in LOW_PRECISION:
            entry[key] = local(value).to(rounded.device, copy=True)


def _places(params: list[Tensor], masters: bool) -> object:
    """Where each is, its shape, and with masters whether it is stepped, for then it needs one."""
    sharded = bool(params) and hasattr(params[0], "to_local")
    held = [local(p.detach()) for p in params] if sharded else params
    return (
        list(map(Tensor.data_ptr, held)),
        list(map(Tensor.size, held)),
        list(map(Tensor.stride, held)),
        list(map(_dtype_of, held)),
        masters and list(map(is_stepped, params)),
    )
