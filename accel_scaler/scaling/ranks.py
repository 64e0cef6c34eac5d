"""The share of each rank in an optimizer's gradients, and so the ranks that come to a collective.

Note [Who comes to a collective]
--------------------------------
A collective hangs where a rank does not come, so each is entered only where :class:`Ranks` knows
that all ranks come. All collectives run on the training thread, in program order.

| Collective | Entered | Who comes, and why |
|---|---|---|
| ``agree_on_overflow`` | by a check of ``PARTS``; by a clip of these beside others; by ``scale()`` after these were unscaled | the ranks of the meshes, or all with ``sharded=True``: each has a part and runs the same step; refused within ``Join``, where a rank may run out of inputs |
| ``add_norms`` | for the spike guard, with ``sharded=True`` | all, as for the check just before |
| ``whole``, ``reduce_partial_gradients`` | by a check, norm or clip of DTensors | the ranks of the mesh, as to any operation on a DTensor |
| ``gather_objects`` of settings | as a model is prepared that all ranks have | all: DDP's constructor and ``fully_shard`` are collectives, too |
| ``gather_objects`` of findings about an overflow, and forwards and backwards that are made again | after an optimizer's own overflow, where settings are alike | all: :meth:`Ranks.all_have` says that every rank has this verdict |
| ``gather_objects`` of the scales | as ``accelerator.join_uneven_inputs`` ends, in fp16 | all: ``Join`` ends for all of them together |

Nothing is sent where the scale grows.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import UnsupportedError
from .collectives import any_rank, has_ranks, is_sharded
from .gradients import gradients_of, parameters_of


class Share(Enum):
    """This rank's share in an optimizer's gradients of the present window."""

    ALONE = auto()
    """Gradients of this rank alone, as far as is known. No rank waits for another one."""
    SAME = auto()
    """The same gradients as on every rank: DDP has reduced them."""
    PARTS = auto()
    """A part of them. Ranks agree on each verdict."""


@dataclass
class _Reduction:
    """The last reduction of a wrapper of DDP's."""

    keys: frozenset[int]
    """The ``id`` of each parameter that the reducer has, and so keeps alive."""
    stats: list[int]
    """The reducer's own times of that reduction."""
    number: int = 0
    """The number of its backward; 0 before the first one."""
    grads: list[tuple[int, int]] | None = None
    """``id`` and version of each gradient after it; None once another backward adds to them."""


class Ranks:
    """Knows which ranks come to a collective about gradients: see Note [Who comes to a collective].

    Nothing here communicates, but for :meth:`agree_on_overflow`.
    """

    sharded = False
    """Ranks have parts of the gradients, which are no DTensors (``ScalerConfig.sharded``)."""

    def __init__(self) -> None:
        self._reduced: WeakKeyDictionary[DistributedDataParallel, _Reduction] = WeakKeyDictionary()
        self._number = 0
        """The number of backwards that were reduced."""
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """That number at each optimizer's last step."""

    def watch(self, model: Module) -> None:
        """Note a prepared model, if it is a wrapper of DDP's."""
        if isinstance(model, DistributedDataParallel) and model not in self._reduced:
            named, ignored = model.module.named_parameters(), model.parameters_to_ignore
            keys = (id(p) for name, p in named if p.requires_grad and name not in ignored)
            stats = list(model.reducer.get_backward_stats())
            self._reduced[model] = _Reduction(frozenset(keys), stats)

    def backward_ended(self) -> None:
        """See which wrappers have reduced. Some backwards are not reduced: after one forward all
        but the first, those under ``no_sync``, and those that pass by the wrapper."""
        for wrapper, last in self._reduced.items():
            # The reducer notes times of each backward that it reduces.
            stats = list(wrapper.reducer.get_backward_stats())
            grads = [(id(g), g._version) for g in gradients_of(wrapper.module.parameters())]
            if stats != last.stats:
                self._number += 1
                last.number, last.stats, last.grads = self._number, stats, grads
            elif grads != last.grads:
                last.grads = None

    def step_ended(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or was skipped."""
        self._steps[optimizer] = self._number

    @property
    def are_uneven(self) -> bool:
        """A rank may be out of inputs, within ``Join`` or after it."""
        return any(wrapper._join_config.enable for wrapper in self._reduced)

    def has_parts(self, optimizer: Optimizer) -> bool:
        """Whether ranks have parts of the optimizer's gradients."""
        return self.sharded or is_sharded(parameters_of(optimizer))

    def share(self, optimizer: Optimizer) -> Share:
        """This rank's share in the optimizer's gradients, which are due to be stepped."""
        if self.has_parts(optimizer):
            return Share.PARTS
        last = self._steps.get(optimizer, 0)
        wrappers = [
            wrapper
            for wrapper, reduction in self._reduced.items()
            if reduction.grads is not None and reduction.number > last
            if is_worldwide(wrapper) and _averages(wrapper) and not wrapper._join_config.enable
        ]
        return Share.SAME if self._reduce_all(wrappers, optimizer) else Share.ALONE

    def _reduce_all(
        self, wrappers: Iterable[DistributedDataParallel], optimizer: Optimizer
    ) -> bool:
        reduced = frozenset[int]().union(*(self._reduced[wrapper].keys for wrapper in wrappers))
        return reduced.issuperset(id(p) for p in parameters_of(optimizer) if p.requires_grad)

    def all_have(self, optimizer: Optimizer) -> bool:
        """Whether every rank is known to have the same verdict on the optimizer's gradients, and so
        comes to a collective about it. False without other ranks."""
        share = self.share(optimizer) if has_ranks() else Share.ALONE
        if share is Share.PARTS:
            return self._groups(optimizer) == [None]
        return share is Share.SAME

    def _groups(self, optimizer: Optimizer) -> list[Any]:
        """The groups of ranks that have parts of its gradients; None is the group of all ranks."""
        if self.sharded:
            return [None]
        meshes = _meshes(parameters_of(optimizer))
        if any(mesh.size() == dist.get_world_size() for mesh in meshes):
            return [None]
        return [group for mesh in meshes for group in mesh.get_all_groups()]

    def agree_on_overflow(
        self, found_inf: bool, optimizer: Optimizer, device: torch.device
    ) -> bool:
        """Whether any rank found an overflow in the optimizer's gradients; ``found_inf``: this
        rank's own answer.

        For ``PARTS`` this communicates on ``device``, and synchronises with it and the other ranks.
        Else nothing is sent: DDP's all-reduce has brought an inf or NaN of one rank into every
        rank's gradients. Raises ``UnsupportedError`` for ``PARTS`` within ``Join``.
        """
        if not has_ranks() or not self.has_parts(optimizer):
            return found_inf
        if self.are_uneven:
            raise UnsupportedError(
                "Join (join_uneven_inputs) beside sharded=True or DTensors: ranks agree at each "
                "step, and one that is out of inputs steps no more, so the others would wait for "
                "it. Give every rank as many batches (even_batches=True)."
            )
        for group in self._groups(optimizer):
            found_inf = any_rank(found_inf, device, group)
        return found_inf


def is_worldwide(model: Any) -> bool:
    """Whether every rank has this model: DDP's or sharded over all of them."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_world_size(model.process_group) == dist.get_world_size()
    return any(mesh.size() == dist.get_world_size() for mesh in _meshes(model.parameters()))


def _meshes(parameters: Iterable[Any]) -> list[Any]:
    """The meshes of DTensors, in the order of the parameters: the same on every rank."""
    return list(dict.fromkeys(p.device_mesh for p in parameters if hasattr(p, "placements")))


AVERAGES = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook")
"""torch's hooks that stand for DDP's all-reduce and give all ranks one result."""


def _averages(wrapper: DistributedDataParallel) -> bool:
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    return all(getattr(hook, "__qualname__", "") in AVERAGES for hook in hooks)
