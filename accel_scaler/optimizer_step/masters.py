"""What is stepped for each parameter: an alias of it, or its float32 master."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import ScalerConfig
from ..devices import is_host
from ..scaling import LOW_PRECISION, local
from .arena import Arena, Placed, place_of
from .host_memory import HostArena

MASTER = "master"
"""The key of a parameter's float32 master, in its arena and in its saved state."""


@dataclass(frozen=True, slots=True)
class MasterRule:
    """Which of the trained parameters have a float32 master, and where that and the optimizer's
    state rest."""

    dtypes: frozenset[torch.dtype]
    """The dtypes of parameters that have one."""
    on_host: bool = False
    """In host memory (``offload``); else where the parameters are."""
    budget: int | None = None
    """``offload_budget``: bytes of it that stay on the device; None: "auto"."""

    def takes(self, p: Tensor) -> bool:
        """Whether ``p`` has a master while it is trained."""
        return p.dtype in self.dtypes


def master_rule(config: ScalerConfig, device: torch.device) -> MasterRule:
    """The rule of these settings for parameters on ``device``. By ``"auto"`` bfloat16 has masters
    if losses are scaled or state is offloaded. On a CPU state is in host memory as it is."""
    if config.offload == "cpu":
        return MasterRule(LOW_PRECISION, not is_host(device), config.budget_bytes)
    if config.master_weights == "none":
        return MasterRule(frozenset())
    if config.enabled or config.master_weights == "fp32":
        return MasterRule(LOW_PRECISION)
    return MasterRule(frozenset({torch.float16}))


class ParameterPair(Placed):
    """One parameter of the model and the parameter that is stepped in its place.

    Args:
        by_rule: whether it is to have a master, and whether that and its state are to rest in host
            memory, but for the budget of what stays on the device.
    """

    def __init__(self, param: Tensor, group: int, by_rule: tuple[bool, bool]) -> None:
        self.param, self.group, self.by_rule = param, group, by_rule
        with torch.no_grad():
            self.target = local(param.detach()).data
        """The model's memory, under a version counter of its own."""
        self.is_master = False
        """It has a master, and the model holds less than that."""
        self.is_offloaded = by_rule[1]
        """Its master and state rest in host memory."""
        self.stepped = nn.Parameter(self.target, requires_grad=param.requires_grad)
        if getattr(param, "grad_dtype", param.dtype) is not param.dtype:
            self.stepped.grad_dtype = param.grad_dtype

    def place(self, arena: Arena, slot: int, memory: Tensor | None) -> None:
        """Take ``slot`` of ``arena``; step a master there from now on, in the arena's ``memory``
        (None: no master)."""
        self.arena, self.slot = arena, slot
        if memory is not None:
            self.is_master = True
            self.stepped = nn.Parameter(arena.view(memory, slot).copy_(self.target))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameter to its master, whose elements stay where they round to it."""
        if self.is_master:
            take_edits(self.stepped, self.target.to(self.stepped.device))

    def publish(self) -> None:
        """Write the master to the model, rounded to its dtype. Call without autograd."""
        if self.is_master:
            self.target.copy_(self.stepped.data)


@torch.no_grad()
def make_pairs(
    optimizer: Optimizer,
    masters: MasterRule,
    known: Iterable[ParameterPair],
    saved: Container[int],
    ranks: Mapping[int, int],
    size: Callable[[ParameterPair], int],
) -> list[ParameterPair]:
    """A pair for each parameter, in the optimizer's order.

    A ``known`` pair keeps its master while its parameter stays where it was, even a frozen one.

    Args:
        saved: ``id`` of parameters whose masters are about to be loaded, frozen ones too.
        ranks: the order of masters in memory, by the ``id`` of parameters.
        size: bytes of a pair's master and state, where some rest in host memory.
    """
    old = {id(pair.param): pair for pair in known}
    pairs: list[ParameterPair] = []
    fresh: list[ParameterPair] = []
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            before = old.get(id(p))
            was_stepped = before is not None and any(before.by_rule)
            is_needed = was_stepped or id(p) in saved or is_stepped(p)
            on_host = is_needed and masters.on_host and not is_host(p.device)
            pair = ParameterPair(p, number, (is_needed and masters.takes(p), on_host))
            if (
                before is not None
                and place_of(before.target) == place_of(pair.target)
                and (before.group, before.by_rule) == (number, pair.by_rule)
            ):
                pair = before
            else:
                fresh.append(pair)
            pairs.append(pair)
    last = len(ranks)
    fresh.sort(key=lambda pair: (pair.group, ranks.get(id(pair.param), last)))
    left = (masters.budget or 0) - sum(
        size(pair) for pair in pairs if pair.by_rule[1] and not pair.is_offloaded
    )
    for pair in fresh if left > 0 else ():
        if pair.is_offloaded and size(pair) <= left:
            left -= size(pair)
            pair.is_offloaded = False
    _place(fresh)
    for pair in fresh:
        before = old.get(id(pair.param))
        is_kept = pair.is_master and before is not None and before.is_master
        if before is not None and is_kept and before.stepped.shape == pair.stepped.shape:
            pair.stepped.copy_(before.stepped)
            pair.refresh()
    return pairs


def goes_to_master(pair: ParameterPair, grad: Tensor) -> bool:
    """Whether ``grad``, float16 or bfloat16, is unscaled on its way to a master, in float32."""
    return pair.is_master and grad.dtype in LOW_PRECISION


@torch.no_grad()
def take_edits(master: Tensor, now: Tensor) -> None:
    """Copy ``now``, a parameter on the master's device, to ``master``, whose elements stay where
    they round to it."""
    master.copy_(torch.where(master.to(now.dtype) == now, master, now.float()))


def is_ours(pair: ParameterPair) -> bool:
    """Whether its state is where torch has none: in host memory, or in float32 for a master."""
    return pair.is_master or pair.is_offloaded


def is_stepped(p: Tensor) -> bool:
    """Whether an optimizer may update it: also a frozen one, while it has a gradient."""
    return p.requires_grad or p.grad is not None


def _place(pairs: Sequence[ParameterPair]) -> None:
    """Give each a place in an arena; there is one for neighbours of one kind, group and device."""

    def kind_of(pair: ParameterPair) -> Any:
        return pair.by_rule[0], pair.is_offloaded, pair.group, str(pair.target.device)

    for (has_masters, is_offloaded, *_), neighbours in groupby(sorted(pairs, key=kind_of), kind_of):
        mine = list(neighbours)
        kind = HostArena if is_offloaded else Arena
        arena = kind([pair.target for pair in mine], mine[0].target.device, has_masters)
        memory = arena.allocate(MASTER) if has_masters else None
        for slot, pair in enumerate(mine):
            pair.place(arena, slot, memory)


def keys_of(state_dict: Mapping[str, Any]) -> list[Any]:
    """The keys of the parameters in a state dict, in the optimizer's order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def without_master(entry: Any) -> Any:
    """A parameter's saved state without its master."""
    if not isinstance(entry, dict):
        return entry
    return {key: value for key, value in entry.items() if key != MASTER}


def holds_masters(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has float32 masters in it."""
    entries = state_dict.get("state", {}).values()
    return any(isinstance(entry, dict) and MASTER in entry for entry in entries)
