"""torch's fused kernels called directly: one pass over an arena, block by block.

A block is cast, unscaled and clipped, updated, published. ``step()`` of torch's optimizers gathers
lists in Python and counts each parameter's steps apart; with thousands of small tensors that takes
longer than the update. Kernels and arguments are the same here, so are the results, bit for bit.

Note [Blocks]
-------------
Operation by operation over whole tensors, every element travels between memory and cache once an
operation, and each tensor costs a call. Here each block is done before the next one begins, while
it is in cache: the gradients are cast into scratch, unscaled and clipped there, torch's fused
kernel updates the block, and the block is rounded into the model.

The kernel is given a list of views, one a parameter, not the block as one tensor: the last elements
of a tensor, which do not fill a vector register, may get other bits than they would in its middle
(torch 2.13, ``exp_avg_sq``). A large parameter is cut where registers end. Where the kernel is all
that there is to do, it gets all parameters at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, groupby
from typing import Any, NamedTuple, cast
from weakref import ref as ref_of

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..scaling import (
    LOW_PRECISION,
    SMALL,
    DeferredUnscale,
    Gathered,
    SentCheck,
    is_uniform,
    run_on_one_thread,
)
from .arena import Placed, flat, is_dense

HOST_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 24
"""Elements in a block: what stays in the cache of each core; on a device few launches matter
instead."""

FULL = frozenset({torch.float32})

Group = Mapping[str, Any]


class FusedRule(NamedTuple):
    """How a fused kernel of torch is called for one block."""

    takes: Callable[[Group], bool]
    """Whether the kernel does all that ``step()`` does for this group."""
    keys: Callable[[Group], tuple[str, ...]]
    """The keys of state that has the parameter's shape."""
    call: Callable[[type, Group, Block, list[Tensor], Tensor | None], None]
    """Update: the optimizer's class, a group, a block, its gradients, and ``found_inf``."""
    counts: bool
    """Whether state has ``step``."""


def _is_plain(group: Group) -> bool:
    lr = group["lr"]
    return (
        bool(group["fused"])
        and not group["differentiable"]
        and not group.get("capturable")
        and all(isinstance(beta, float) for beta in group.get("betas", ()))
        and not (isinstance(lr, Tensor) and lr.device.type != "cpu")
    )


def _adam_keys(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _call_adam(
    kind: type, group: Group, block: Block, grads: list[Tensor], found_inf: Tensor | None
) -> None:
    averages, squares, *largest = block.state
    lists = [block.masters, grads, averages, squares, *(largest or [[]]), block.counts]
    names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
    settings = {name: group[name] for name in names}
    settings["beta1"], settings["beta2"] = group["betas"]
    # Before torch 2.7 the group does not say so.
    decoupled = group.get("decoupled_weight_decay", issubclass(kind, torch.optim.AdamW))
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(*lists, **settings, grad_scale=None, found_inf=found_inf)


def _call_sgd(
    kind: type, group: Group, block: Block, grads: list[Tensor], found_inf: Tensor | None
) -> None:
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    settings = {name: group[name] for name in names}
    lists = block.masters, grads, *(block.state or [[]])
    torch._fused_sgd_(*lists, **settings, is_first_step=False, grad_scale=None, found_inf=found_inf)


def _sgd_keys(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


@dataclass(slots=True)
class Block:
    """Some parameters, or a piece of one; the lists have an entry for each."""

    places: Sequence[int]
    """Indices of its parameters in the run."""
    piece: slice | None
    """Its elements in its only parameter; None: all of its parameters."""
    begin: int
    """Where it begins in the arena."""
    length: int
    is_small: bool
    """All of its tensors have at most ``SMALL`` elements, and are on the host."""
    masters: list[Tensor]
    refs: list[list[ref_of[Tensor]]]
    """Of the state; a list for each of the rule's keys."""
    counts: list[Tensor]
    targets: list[Tensor]
    scratch: list[Tensor] = field(default_factory=list)
    """See :meth:`Run.scratch`; empty before its first use."""

    @property
    def state(self) -> list[list[Tensor]]:
        """A list for each of the rule's keys. Only the optimizer keeps it."""
        rows: Any = [[ref() for ref in row] for row in self.refs]
        return rows if self.piece is None else [[flat(t)[self.piece]] for (t,) in rows]

    def part(self, piece: slice) -> Block:
        """The block of a piece of its only parameter."""
        masters, targets = ([flat(t)[piece] for t in ts] for ts in (self.masters, self.targets))
        length = piece.stop - piece.start
        return replace(
            self, piece=piece, length=length, masters=masters, targets=targets, scratch=[]
        )


ADAM = FusedRule(_is_plain, _adam_keys, _call_adam, counts=True)
RULES = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: FusedRule(_is_plain, _sgd_keys, _call_sgd, counts=False),
}


class Scratch:
    """Float32 memory that one block after the other uses; allocated where it is first used."""

    def __init__(self) -> None:
        self._held: dict[torch.device, Tensor] = {}

    def take(self, length: int, device: torch.device) -> Tensor:
        """The first ``length`` elements of the memory on ``device``; their values are arbitrary."""
        held = self._held.get(device)
        if held is None or held.numel() < length:
            held = self._held[device] = torch.empty(length, dtype=torch.float32, device=device)
        return held[:length]


class Run:
    """Neighbours in one arena, of one part and one parameter group, and their blocks.

    Args:
        optimizer: the one whose state it is, by stepped parameter; held weakly.
        memory: what :meth:`scratch` uses.
    """

    def __init__(
        self,
        pairs: Sequence[Placed],
        rule: FusedRule,
        group: Group,
        optimizer: Optimizer,
        memory: Scratch,
    ) -> None:
        self.pairs, self._rule, self._memory = list(pairs), rule, memory
        self._optimizer = ref_of(optimizer)
        self._takes, self._keys = rule.takes(group), rule.keys(group)
        self._arena, self._first = pairs[0].arena, pairs[0].slot
        self._slots = slice(self._first, self._first + len(pairs))
        self.params = [pair.stepped for pair in pairs]
        """What is stepped."""
        self._strides = list(map(Tensor.stride, self.params))
        self._is_contiguous = all(map(Tensor.is_contiguous, self.params))
        self._blocks: dict[tuple[int, int, bool], list[Block]] = {}
        """By the arguments of :meth:`_blocks_of`."""
        self._limit = block_length(self._arena.device)
        self._large = [i for i, p in enumerate(self.params) if p.numel() > self._limit]

    @property
    def _state(self) -> Mapping[Tensor, dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.state

    def still_fits(self, group: Group) -> bool:
        """Whether ``group`` still asks for the same kernel with the same keys of state."""
        return (self._rule.takes(group), self._rule.keys(group)) == (self._takes, self._keys)

    def takes(
        self,
        grads: Sequence[Tensor | None],
        whole: bool = False,
        gathered: Gathered | None = None,
    ) -> bool:
        """Whether the kernel can step it with these gradients; some may be missing.

        Args:
            whole: not block by block, from the gradients as they are; only without masters.
            gathered: what is known of some gradients.
        """
        found, arena = [grad for grad in grads if grad is not None], self._arena
        fits = arena.fits[self._slots]
        if not found or not self._takes or (whole and arena.has_masters):
            return self._takes and not found
        known = found if gathered is None or not gathered.holds(found) else gathered
        return (
            is_uniform(known, LOW_PRECISION if arena.has_masters else FULL)
            and found[0].device == arena.device
            and (all(fits) or all(compress(fits, (grad is not None for grad in grads))))
            and (self._is_whole(grads, found) if whole else self._is_cut(grads))
        )

    def _is_cut(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether large gradients can be cut into pieces as their parameters."""
        strides = self._strides
        return all((g := grads[i]) is None or g.stride() == strides[i] for i in self._large)

    def _is_whole(self, grads: Sequence[Tensor | None], found: Sequence[Tensor]) -> bool:
        """Whether all gradients, ``found`` among ``grads``, are laid out like their parameters,
        which are as they were (``.data`` may be assigned)."""
        if self._is_contiguous and all(map(Tensor.is_contiguous, chain(self.params, found))):
            return True  # at half the cost
        given = [p if g is None else g for p, g in zip(self.params, grads, strict=True)]
        both = self.params, given
        return all(list(map(Tensor.stride, tensors)) == self._strides for tensors in both)

    def step(
        self,
        kind: type[Optimizer],
        group: Group,
        grads: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        publishes: bool = False,
        whole: bool = False,
        sent: SentCheck | None = None,
    ) -> None:
        """Update every parameter that has a gradient.

        Args:
            group: the hyperparameters.
            deferred: factors still due on the gradients; float32 gradients get them in place.
            publishes: write masters' new values to the model.
            whole: it :meth:`takes` them so, and nothing is ``deferred``.
            sent: a check of the gradients, by which the device decides.
        """
        arena, found_inf = self._arena, None if sent is None else sent.found_inf
        for a, b in _stretches([grad is None for grad in grads]):
            if self._rule.counts:
                slots = slice(self._first + a, self._first + b)
                arena.counts[slots].add_(1 if sent is None else sent.moves)
            for block in self._blocks_of(a, b, whole):
                if whole:
                    is_all = len(block.places) == len(grads)
                    given = grads if is_all else [grads[i] for i in block.places]
                    final = cast("list[Tensor]", given)
                else:
                    final = self._gather(block, grads, deferred)
                with run_on_one_thread(block.is_small):
                    self._rule.call(kind, group, block, final, found_inf)
                if publishes and arena.has_masters:
                    torch._foreach_copy_(block.targets, block.masters)

    def publish(self, grads: Sequence[Tensor | None]) -> None:
        """Write masters' new values to the model, after a :meth:`step` that has not."""
        missing = [grad is None for grad in grads]
        for a, b in _stretches(missing) if self._arena.has_masters else ():
            for block in self._blocks_of(a, b, False):
                torch._foreach_copy_(block.targets, block.masters)

    def _gather(
        self, block: Block, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> list[Tensor]:
        """The gradients of a block as the kernel takes them, multiplied by ``deferred``. Those of
        masters, and those laid out unlike their parameters, are copied into scratch."""
        params = [self.pairs[i].param for i in block.places]
        found = cast("list[Tensor]", [grads[i] for i in block.places])
        if block.piece is not None:
            found = [flat(found[0])[block.piece]]
        if not self._arena.has_masters:
            deferred.apply(list(zip(params, found, strict=True)))
            strides = [list(map(Tensor.stride, tensors)) for tensors in (found, block.masters)]
            if block.piece is not None or strides[0] == strides[1]:
                return found
        into = self._scratch(block)
        torch._foreach_copy_(into, found)
        if self._arena.has_masters and deferred.clips:
            deferred.apply(list(zip(params, into, strict=True)))
        elif self._arena.has_masters:
            deferred.apply([(params[0], _joined(into, block.length))])
        return into

    def _scratch(self, block: Block) -> list[Tensor]:
        """Memory like a block's tensors, into which gradients are copied; all blocks share it."""
        if not block.scratch:
            memory, view = self._memory.take(block.length, self._arena.device), self._arena.view
            block.scratch = [memory]
            if block.piece is None:
                slots = [self._first + place for place in block.places]
                block.scratch = [view(memory, slot, block.begin) for slot in slots]
        return block.scratch

    def _blocks_of(self, a: int, b: int, whole: bool) -> list[Block]:
        """The places from ``a`` to ``b``, which have state, in blocks; ``whole``: small ones in
        one, large ones in another, wherever they are in the arena."""
        if (a, b, whole) not in self._blocks:
            blocks = self._by_size(a, b) if whole else self._cut(a, b)
            self._blocks[a, b, whole] = list(blocks)
        return self._blocks[a, b, whole]

    def _by_size(self, a: int, b: int) -> Iterator[Block]:
        is_small = [length <= SMALL for length in self._arena.lengths[self._slots]]
        for kind in (True, False):
            if places := [place for place in range(a, b) if is_small[place] is kind]:
                yield self._block(places)

    def _cut(self, a: int, b: int) -> Iterator[Block]:
        start, arena = a, self._arena
        for place in range(a + 1, b):
            begin = arena.offsets[self._first + start]
            if arena.end(self._first + place) - begin > self._limit:
                yield from self._blocks_from(start, place)
                start = place
        yield from self._blocks_from(start, b)

    def _blocks_from(self, c: int, d: int) -> Iterator[Block]:
        """One block of whole parameters, or the pieces of a large one."""
        whole = self._block(range(c, d))
        if whole.length <= self._limit or not is_dense(self.pairs[c].target):
            yield whole
        else:
            for i in range(0, whole.length, self._limit):
                yield whole.part(slice(i, min(i + self._limit, whole.length)))

    def _block(self, places: Sequence[int]) -> Block:
        arena, state, masters = self._arena, self._state, [self.params[i] for i in places]
        slots = [self._first + i for i in places]
        begin = arena.offsets[slots[0]]
        # Without keys no entry is made, as torch makes none.
        rows = [[state[p][key] for p in masters] for key in self._keys]
        return Block(
            places=places,
            piece=None,
            begin=begin,
            length=arena.end(slots[-1]) - begin,
            is_small=arena.device.type == "cpu" and max(arena.lengths[i] for i in slots) <= SMALL,
            masters=masters,
            refs=[list(map(ref_of, row)) for row in rows],
            counts=[arena.count_views[slot] for slot in slots] if self._rule.counts else [],
            targets=[self.pairs[i].target for i in places],
        )


def block_length(device: torch.device) -> int:
    """Elements in a block of this thread, at most. A kernel shares a block of the host's out among
    the thread's cores."""
    return DEVICE_BLOCK if device.type != "cpu" else HOST_BLOCK * torch.get_num_threads()


def _joined(views: Sequence[Tensor], length: int) -> Tensor:
    """The memory from the first of these views on."""
    return views[0].as_strided((length,), (1,), views[0].storage_offset())


def rule_of(optimizer: Optimizer) -> FusedRule | None:
    """How a fused kernel of torch steps ``optimizer``; None: no such kernel is known."""
    return RULES.get(type(optimizer))


def neighbours(pairs: Sequence[Placed], places: Sequence[int]) -> Iterator[list[int]]:
    """``places`` of ``pairs``, split into lists of neighbours in one arena."""
    for _, some in groupby(
        enumerate(places), lambda each: (pairs[each[1]].arena, pairs[each[1]].slot - each[0])
    ):
        yield [place for _, place in some]


def _stretches(left_out: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of places, none of them left out."""
    end = 0
    if not any(left_out):  # nearly always
        yield end, len(left_out)
        return
    for is_left_out, some in groupby(left_out):
        begin, end = end, end + len(list(some))
        if not is_left_out:
            yield begin, end
