"""The twin of an optimizer that the worker steps: own parameters, shared state, frozen settings.

The user's optimizer stays what schedulers, checkpoints and log lines look at. Its twin has the
same class, the same state entries, and hyperparameters copied when a step is handed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .fused import AdamGroup, is_plain, nothing_found
from .gradients import is_uniform, match_layout, parameters_of
from .slots import Slot, local, make_slots
from .small import SmallSteps
from .steppable import (
    attributes_of_every_optimizer,
    is_splittable,
    raw_step,
    refuse_unshardable,
    refuse_unsteppable,
)
from .transfer import Lane

__all__ = ["Part", "Shadow", "refuse_unsteppable"]

PARTS = 32
"""About how many parts a step has: each costs some Python, and a forward waits for whole ones."""
SMALLEST_PART, LARGEST_PART = 1 << 19, 1 << 22
"""Elements in a part, unless one parameter alone has more."""

_dtype_of, _is_trained = attrgetter("dtype"), attrgetter("requires_grad")


class Part:
    """Slots that are updated together, in the order of the forward."""

    def __init__(self, slots: list[Slot], start: int) -> None:
        self.slots, self.start, self.end = slots, start, start + len(slots)
        self.groups: dict[int, list[int]] = {}
        for place, slot in enumerate(slots):
            self.groups.setdefault(slot.group, []).append(place)
        self.plans: dict[int, AdamGroup] | None = None
        self.epoch = -1


class Shadow:
    """Slots, parts and the twin of one optimizer. Main thread only, except where said.

    Args:
        offload: state and masters live in host memory.
        masters: every trainable parameter has a float32 master, not just float16 ones.
    """

    def __init__(self, optimizer: Optimizer, lane: Lane, *, offload: bool, masters: bool) -> None:
        refuse_unsteppable(optimizer)
        refuse_unshardable(optimizer)
        self.optimizer, self.lane = optimizer, lane
        self.offload, self.masters = offload, masters or offload
        self.splittable = is_splittable(optimizer)
        self.raw_step = raw_step(type(optimizer))
        self.slots: list[Slot] = []
        self.ordered: list[Slot] = []
        """The slots in the order of the parts."""
        self.has_rounded = False
        """The model holds some parameters in less than their masters' precision."""
        self.has_masters = self.is_sharded = False
        self.has_loaded = False
        """Some slots keep masters from a state dict."""
        self.ends: list[int] = []
        """For each part, how many parameters are stepped once it is done."""
        self.part_of: dict[int, int] = {}
        """``id(parameter)`` -> how many parts must be done for it."""
        self.params: list[Tensor] = []
        """The model's parameters, in the order of the parts."""
        self.parts: list[Part] = []
        self.twin: Any = None
        self._epoch = 0
        """Grows when state entries are other ones than before."""
        self._small: SmallSteps | None = None
        self._small_epoch = -1
        self._order: list[int] = []
        self._known: list[Tensor] = []
        self._places: object = None
        self._may_need_masters = False
        self._state: Any = None
        self._entries: list[Any] = []
        self._settings: list[dict[str, Any]] = []

    def follow(self) -> bool:
        """Take over new groups and moved or resized parameters; True if there were any."""
        params = parameters_of(self.optimizer)
        same = len(params) == len(self._known) and all(map(is_, params, self._known))
        places = _places(params, self._may_need_masters)
        if same and places == self._places and self.twin is not None:
            return False
        refuse_unshardable(self.optimizer)
        slots = make_slots(
            self.optimizer,
            self.lane,
            offload=self.offload,
            masters=self.masters,
            known=self.slots,
        )
        self._may_need_masters = self.masters or any(p.dtype is torch.float16 for p in params)
        self.slots, self._known = slots, params
        self._places = _places(params, self._may_need_masters)
        self._order = list(range(len(slots)))
        self._make_twin()
        self._split()
        self._state = None
        return True

    def reorder(self, first_used: Sequence[Tensor]) -> None:
        """Update in this order from now on; parameters that are not named come last."""
        rank = {id(p): place for place, p in reversed(list(enumerate(first_used)))}
        last = len(first_used)
        self._order.sort(key=lambda i: rank.get(id(self.slots[i].param), last))
        self._split()

    def _make_twin(self) -> None:
        twin: Any = object.__new__(type(self.optimizer))
        hidden = ("step", "param_groups", "state")
        twin.__dict__.update({k: v for k, v in vars(self.optimizer).items() if k not in hidden})
        for key in list(vars(twin)):
            if key.endswith("_hooks"):
                twin.__dict__[key] = type(vars(twin)[key])()
            elif key.startswith("_accel_scaler"):
                del twin.__dict__[key]
        twin.state = defaultdict(dict)
        twin.param_groups = [{"params": []} for _ in self.optimizer.param_groups]
        for slot in self.slots:
            twin.param_groups[slot.group]["params"].append(slot.twin)
        self.twin = twin

    def _split(self) -> None:
        """Cut the slots into parts."""
        ordered = [self.slots[i] for i in self._order]
        total = sum(slot.twin.numel() for slot in ordered)
        size = min(max(total // PARTS, SMALLEST_PART), LARGEST_PART)
        cuts, have = [0], 0
        for place, slot in enumerate(ordered, 1):
            have += slot.twin.numel()
            if have >= size and self.splittable:
                cuts.append(place)
                have = 0
        if cuts[-1] != len(ordered):
            cuts.append(len(ordered))
        self.parts = [Part(ordered[a:b], a) for a, b in pairwise(cuts)]
        self._small, self._small_epoch = None, -1
        self.ordered = ordered
        self.params = [slot.param for slot in ordered]
        self.ends = [part.end for part in self.parts]
        self.part_of = {
            id(slot.param): number
            for number, part in enumerate(self.parts, 1)
            for slot in part.slots
        }
        self.has_rounded = any(slot.is_rounded for slot in ordered)
        self.has_masters = any(slot.is_master for slot in ordered)
        self.is_sharded = any(hasattr(slot.param, "to_local") for slot in ordered)

    def freeze_settings(self) -> None:
        """Copy every hyperparameter as it stands now: a scheduler moves it a line later."""
        for group, own in zip(self.optimizer.param_groups, self.twin.param_groups, strict=True):
            for key in own.keys() - group.keys():
                del own[key]
            own.update({k: _copy(v) for k, v in group.items() if k != "params"})
        if not self.splittable:
            self._settings = [dict(own) for own in self.twin.param_groups]

    def collect_settings(self) -> None:
        """Give the optimizer what its own step has changed in its groups and attributes."""
        if self.splittable:
            return
        groups = zip(self.optimizer.param_groups, self.twin.param_groups, strict=False)
        for (group, own), before in zip(groups, self._settings, strict=False):
            for key, value in own.items():
                if key != "params" and value is not before.get(key):
                    group[key] = value
        for key, value in vars(self.twin).items():
            if key not in attributes_of_every_optimizer() and not key.endswith("_hooks"):
                self.optimizer.__dict__[key] = value

    def link_state(self, grads: Sequence[Tensor | None]) -> None:
        """Share the optimizer's state entries, also those that somebody has put there since."""
        state = self.optimizer.state
        if (
            state is self._state
            and len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and (len(state) >= len(self.slots) or self._has_all(grads))
        ):
            return
        twin_state: Any = defaultdict(dict)
        twin_state.update({k: v for k, v in state.items() if not isinstance(k, Tensor)})
        present = {id(p) for p, g in zip(self.params, grads, strict=True) if g is not None}
        for slot in self.slots:
            entry = state.get(slot.param)
            if entry is None and id(slot.param) in present:
                entry = state[slot.param] = {}
            if entry is not None:
                settle_entry(slot, entry)
                twin_state[slot.twin] = entry
        self.twin.state = twin_state
        self._state, self._entries = state, list(state.values())
        self._epoch += 1

    def load_state(self, state_dict: dict[str, Any], masters: dict[int, Any]) -> None:
        """Load state onto the stepped parameters and share it; the optimizer has the groups."""
        own = self.twin.param_groups
        self.twin.param_groups = [dict(group) for group in own]
        Optimizer.load_state_dict(self.twin, state_dict)
        self.twin.param_groups = own
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        state = self.optimizer.state
        state.clear()
        state.update({k: v for k, v in self.twin.state.items() if not isinstance(k, Tensor)})
        for slot, index in zip(self.slots, saved, strict=True):
            entry = self.twin.state.get(slot.twin)
            if entry:
                settle_entry(slot, entry)
                state[slot.param] = entry
            if slot.is_master:
                master = masters.get(index)
                slot.loaded = None if master is None else local(master)
                slot.refresh(slot.target if master is None else None)
                self.has_loaded = True
        self._state = None

    def forget_loaded(self) -> None:
        """A step begins: the model has been loaded by now, if it ever is."""
        for slot in self.slots if self.has_loaded else ():
            slot.loaded = None
        self.has_loaded = False

    def _has_all(self, grads: Sequence[Tensor | None]) -> bool:
        state = self.optimizer.state
        return all(p in state for p, g in zip(self.params, grads, strict=True) if g is not None)

    def small_steps(self) -> SmallSteps | None:
        """On the worker: the quick way, where every parameter is small and has state."""
        if self._small_epoch != self._epoch:
            self._small_epoch, self._small = self._epoch, None
            if SmallSteps.suits(self.ordered, self.lane) and self._can_plan(self.parts):
                self._small = SmallSteps(self.twin, self.ordered, self.ends, self.lane)
                for part in self.parts:  # each plan puts the step counts in a buffer of its own
                    part.epoch = -1
        return self._small

    def step_part(self, part: Part, grads: list[Tensor | None], grad_scale: Tensor | None) -> None:
        """On the worker: update a part with gradients that are final but for ``grad_scale``."""
        plans = self._plans_of(part)
        complete = plans is not None and all(
            plan.takes([grads[place] for place in part.groups[number]])  # type: ignore[misc]
            for number, plan in plans.items()
        )
        if complete and plans is not None:
            for number, plan in plans.items():
                mine: Any = [grads[place] for place in part.groups[number]]
                plan.step(self.twin.param_groups[number], mine, grad_scale)
            return
        part.epoch = -1  # its first step makes the state that a plan needs
        self._step_in_python(part, grads, grad_scale)

    def _plans_of(self, part: Part) -> dict[int, AdamGroup] | None:
        if part.epoch == self._epoch:
            return part.plans
        part.epoch, part.plans = self._epoch, None
        if self._can_plan([part]):
            self._small, self._small_epoch = None, -1
            part.plans = {
                number: AdamGroup(
                    self.twin,
                    {
                        **self.twin.param_groups[number],
                        "params": [part.slots[place].twin for place in places],
                    },
                )
                for number, places in part.groups.items()
            }
        return part.plans

    def _can_plan(self, parts: Sequence[Part]) -> bool:
        """Whether torch's fused Adam kernel can be called directly for these parts."""
        slots = [slot for part in parts for slot in part.slots]
        return (
            type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and all(is_plain(self.twin.param_groups[n]) for part in parts for n in part.groups)
            and is_uniform([slot.twin.detach() for slot in slots])
            and all(self.twin.state.get(slot.twin) for slot in slots)
        )

    def _step_in_python(
        self, part: Part, grads: list[Tensor | None], grad_scale: Tensor | None
    ) -> None:
        """The optimizer's own step on the part; what it was before, if that fails half-way."""
        twins = [slot.twin for slot in part.slots]
        before = [
            twin.detach().clone() for twin, g in zip(twins, grads, strict=True) if g is not None
        ]
        whole = self.twin.param_groups
        self.twin.param_groups = [
            {**whole[number], "params": [twins[place] for place in places]}
            for number, places in part.groups.items()
        ]
        if not self.splittable:
            self.twin.param_groups = whole
        try:
            for twin, grad in zip(twins, grads, strict=True):
                twin.grad = grad
            self.call_step(twins, grad_scale)
        except BaseException:
            stepped = [twin for twin, g in zip(twins, grads, strict=True) if g is not None]
            for twin, old in zip(stepped, before, strict=True):
                twin.detach().copy_(old)
            raise
        finally:
            self.twin.param_groups = whole
            for twin in twins:
                twin.grad = None

    def call_step(self, twins: Sequence[Tensor], grad_scale: Tensor | None) -> Any:
        """On the worker: the class's step on the twin."""
        if not getattr(self.twin, "_step_supports_amp_scaling", False):
            return self.raw_step(self.twin)
        if twins and twins[0].device.type == "cpu":
            match_layout(twins)
        self.twin.grad_scale, self.twin.found_inf = grad_scale, nothing_found(self.twin)
        try:
            return self.raw_step(self.twin)
        finally:
            del self.twin.grad_scale, self.twin.found_inf


def settle_entry(slot: Slot, entry: dict[str, Any]) -> None:
    """Bring one parameter's state to where it is stepped: shards, the master's device."""
    for key, value in entry.items():
        if not isinstance(value, Tensor):
            continue
        value = local(value)
        if slot.is_master:
            exact = key == "step" or not value.is_floating_point()
            value = value.to(slot.twin.device, None if exact else torch.float32)
        entry[key] = value


def _places(params: list[Tensor], masters: bool) -> object:
    """Where each is, its shape, and with masters whether it is trained, for then it needs one."""
    sharded = bool(params) and hasattr(params[0], "to_local")
    held = [local(p.detach()) for p in params] if sharded else params
    return (
        list(map(Tensor.data_ptr, held)),
        list(map(Tensor.size, held)),
        list(map(Tensor.stride, held)),
        list(map(_dtype_of, held)),
        masters and list(map(_is_trained, params)),
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
