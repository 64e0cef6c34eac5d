"""What is stepped for each parameter: an alias of it, or its float32 master."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
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

    @property
    def kept(self) -> int:
        """Bytes of masters and state that stay on the device."""
        return self.budget or 0

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
    """One parameter of the model and the parameter that is stepped in its place."""

    def __init__(self, param: Tensor, group: int) -> None:
        self.param, self.group = param, group
        with torch.no_grad():
            self.target = local(param.detach()).data
        """The model's memory, under a version counter of its own."""
        self.is_master = self.is_offloaded = self.is_kept = False
        """Whether it has a master; whether that and its state rest in host memory, or would but for
        the budget of what is kept on the device."""
        self.is_edited_since = False
        """Offloaded: a script has written to the parameter since its master was last stepped."""
        self.stepped = nn.Parameter(self.target, requires_grad=param.requires_grad)
        if getattr(param, "grad_dtype", param.dtype) is not param.dtype:
            self.stepped.grad_dtype = param.grad_dtype

    def place(self, arena: Arena, slot: int, memory: Tensor | None) -> None:
        """Take ``slot`` of ``arena``; step a master in ``memory`` from now on (None: no master)."""
        self.arena, self.slot = arena, slot
        if memory is None:
            return
        memory.copy_(self.target)
        self.is_master = True
        self.stepped = nn.Parameter(memory, requires_grad=True)
        kind = getattr(self.param, "grad_dtype", self.param.dtype)
        if kind not in {torch.float32, *LOW_PRECISION}:  # such gradients are float32 by then
            self.stepped.grad_dtype = kind

    @property
    def is_rounded(self) -> bool:
        """The model holds less than the master."""
        return self.is_master and self.target.dtype in LOW_PRECISION

    @property
    def is_edited(self) -> bool:
        """Whether the parameter differs from its rounded master. Reads both; synchronises."""
        if not self.is_master:
            return False
        rounded = self.stepped.detach().to(self.target.dtype)
        # As integers: NaN is equal to itself, and torch compares float16 five times as slowly.
        bits = torch.int16 if self.target.element_size() == 2 else torch.int32
        return not torch.equal(rounded.view(bits), self.target.to(rounded.device).view(bits))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameter to the master, whose elements stay where they round to it."""
        now, master = self.target.to(self.stepped.device), self.stepped
        if self.is_rounded:
            now = with_edits(master, now)
        master.copy_(now)

    def publish(self) -> None:
        """Write the master to the model, rounded to its dtype. Call without autograd."""
        if self.is_master:
            self.target.copy_(self.stepped.data)


def make_pairs(
    optimizer: Optimizer,
    masters: MasterRule,
    known: Iterable[ParameterPair],
    saved: Container[int] = (),
    ranks: Mapping[int, int] = MappingProxyType({}),
    size: Callable[[ParameterPair], int] = lambda pair: 0,
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
    fresh: list[tuple[bool, ParameterPair]] = []
    """Whether it is to have a master, and the pair."""
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            pair = ParameterPair(p, number)
            before = old.get(id(p))
            had_master = before is not None and before.is_master
            was_offloaded = before is not None and before.is_offloaded
            needed = had_master or was_offloaded or id(p) in saved or is_stepped(p)
            wanted = needed and masters.takes(p)
            on_device = not is_host(pair.target.device)
            pair.is_offloaded = needed and masters.on_host and on_device
            if (
                before is not None
                and place_of(before.target) == place_of(pair.target)
                and before.is_master == wanted
                and (before.is_offloaded or before.is_kept) == pair.is_offloaded
            ):
                before.group = number
                pair = before
            else:
                fresh.append((wanted, pair))
            pairs.append(pair)
    last = len(ranks)
    fresh.sort(key=lambda each: (each[1].group, ranks.get(id(each[1].param), last)))
    left = masters.kept - sum(size(pair) for pair in pairs if pair.is_kept)
    for _, pair in fresh if left > 0 else ():
        if pair.is_offloaded and size(pair) <= left:
            left -= size(pair)
            pair.is_kept, pair.is_offloaded = True, False
    for wanted in (False, True):
        _place([pair for has, pair in fresh if has is wanted], wanted)
    _keep_masters([pair for has, pair in fresh if has], old)
    return pairs


def with_edits(master: Tensor, now: Tensor) -> Tensor:
    """``master``, but for elements that do not round to the parameter ``now``: these are its."""
    return torch.where(master.to(now.dtype) == now, master, now.float())


def shard_of(value: Tensor, param: Tensor) -> Tensor:
    """This rank's part of ``value``, a tensor like ``param``: a shard, or whole as in a full state
    dict. torch itself cuts only the state that its own optimizers make."""
    like: Any = param
    if hasattr(value, "to_local") or not hasattr(like, "to_local") or value.shape != like.shape:
        return local(value)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(whole.redistribute(placements=like.placements))


def goes_to_master(pair: ParameterPair, grad: Tensor) -> bool:
    """Whether ``grad``, float16 or bfloat16, is unscaled on its way to a master, in float32."""
    return pair.is_master and grad.dtype in LOW_PRECISION


def is_stepped(p: Tensor) -> bool:
    """Whether an optimizer may update it: also a frozen one, while it has a gradient."""
    return p.requires_grad or p.grad is not None


@torch.no_grad()
def _place(pairs: Sequence[ParameterPair], has_masters: bool) -> None:
    """Give each a place in an arena; there is one for neighbours of one group and device."""
    pairs = sorted(pairs, key=attrgetter("is_offloaded"))
    for (_, device, is_offloaded), neighbours in groupby(
        pairs, key=lambda pair: (pair.group, pair.target.device, pair.is_offloaded)
    ):
        mine = list(neighbours)
        kind = HostArena if is_offloaded else Arena
        arena = kind([pair.target for pair in mine], device, has_masters)
        slots = range(len(mine))
        memory = arena.allocate(slots, MASTER) if has_masters else [None] * len(mine)
        for slot, pair in enumerate(mine):
            pair.place(arena, slot, memory[slot])


@torch.no_grad()
def _keep_masters(pairs: Sequence[ParameterPair], old: dict[int, ParameterPair]) -> None:
    """Copy the masters' values to ``pairs`` that replace an ``old`` one of their parameter."""
    for pair in pairs:
        before = old.get(id(pair.param))
        if before is not None and before.is_master and before.stepped.shape == pair.stepped.shape:
            pair.stepped.copy_(before.stepped)
            pair.refresh()


def entry_of(entries: Mapping[Any, Any], key: Any) -> dict[str, Any]:
    """One parameter's saved state; {}: there is none, or not as a dict."""
    entry = entries.get(key)
    return entry if isinstance(entry, dict) else {}


def without_master(entry: Any) -> Any:
    """A parameter's saved state without its master."""
    if not isinstance(entry, dict):
        return entry
    return {key: value for key, value in entry.items() if key != MASTER}


def holds_masters(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict has float32 masters in it."""
    entries = state_dict.get("state", {})
    return any(MASTER in entry_of(entries, key) for key in entries)
