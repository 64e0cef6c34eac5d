"""One pass over an arena, block by block: cast, unscale, clip, update, publish.

Note [Blocks]
-------------
Operation by operation over whole tensors, every element travels between memory and cache once an
operation, and each tensor costs a call. Here each block is done before the next one begins, while
it is in cache: the gradients are cast into scratch, unscaled and clipped there, torch's fused
kernel updates the block, and the block is rounded into the model.

The kernel is given a list of views, one a parameter, not the block as one tensor: the last elements
of a tensor, which do not fill a vector register, may get other bits than they would in its middle
(torch 2.13, ``exp_avg_sq``). A large parameter is cut where registers end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optimizer_step import call_adam, is_plain
from ..scaling import LOW_PRECISION, DeferredUnscale, is_uniform
from .arena import Where, flat, is_dense
from .master_params import ParameterPair
from .streams import SideStreams

HOST_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 22
"""Elements in a block: what stays in a core's cache; on a device few launches matter instead."""

DTYPES = LOW_PRECISION | {torch.float32}

Group = Mapping[str, Any]


class FusedRule(NamedTuple):
    """How a fused kernel of torch is called for one block."""

    takes: Callable[[Group], bool]
    """Whether the kernel does all that ``step()`` does for this group."""
    keys: Callable[[Group], tuple[str, ...]]
    """The state with the parameter's shape."""
    call: Callable[[type[Optimizer], Group, Block, bool], None]
    """For a class, a group and a block; the last: whether it is the first step."""
    counts: bool
    """State has ``step``."""


def _adam_keys(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _call_adam(kind: type[Optimizer], group: Group, block: Block, is_first: bool) -> None:
    averages, squares, *largest = block.state
    lists = [block.masters, block.into, averages, squares, *(largest or [[]]), block.counts]
    call_adam(kind, group, lists, None)


def _call_sgd(kind: type[Optimizer], group: Group, block: Block, is_first: bool) -> None:
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    settings = {name: group[name] for name in names}
    (velocity,) = block.state or [[]]
    settings["is_first_step"] = is_first and bool(velocity)
    torch._fused_sgd_(block.masters, block.into, velocity, **settings)


def _sgd_keys(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


@dataclass(slots=True)
class Block:
    """Some parameters, or a piece of one; the lists have an entry for each."""

    places: slice
    """Of its parameters among those of the run."""
    piece: slice | None
    """Its elements in its only parameter; None: all of its parameters."""
    scratch: Tensor
    into: list[Tensor]
    """Where gradients go: views of ``scratch``."""
    masters: list[Tensor]
    state: list[list[Tensor]]
    """For each of the rule's keys."""
    counts: list[Tensor]
    staging: list[Tensor]
    """Host memory from which the device gets the values; empty: directly."""
    targets: list[Tensor]
    previews: list[Tensor]
    """Where the preview of the next update is prepared (``delayed``); else empty."""


ADAM = FusedRule(is_plain, _adam_keys, _call_adam, counts=True)
RULES = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: FusedRule(is_plain, _sgd_keys, _call_sgd, counts=False),
}


class Follower(Protocol):
    """What is done to each block behind its update, while it is in cache."""

    def block(self, block: Block) -> None:
        """It was updated."""

    def end(self) -> None:
        """All were."""


class FlatRun:
    """Neighbours in one arena, of one part and one parameter group.

    Args:
        is_sent: float32 gradients were unscaled before they were sent to host memory.
        scratch: returns memory for so many elements, float32.
    """

    def __init__(
        self,
        pairs: Sequence[ParameterPair],
        rule: FusedRule,
        group: Group,
        streams: SideStreams,
        is_sent: bool,
        scratch: Callable[[int], Tensor],
    ) -> None:
        self.pairs, self._rule, self._streams = list(pairs), rule, streams
        self._is_sent, self._scratch = is_sent, scratch
        self._takes, self._keys = rule.takes(group), rule.keys(group)
        arena, first = pairs[0].arena, pairs[0].slot
        assert arena is not None
        self._arena, self._first = arena, first
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        """By their first and last place."""
        self._limit = HOST_BLOCK if arena.device.type == "cpu" else DEVICE_BLOCK
        self._large = [i for i, pair in enumerate(pairs) if pair.stepped.numel() > self._limit]

    def still_fits(self, group: Group) -> bool:
        """Whether the settings still ask for the same kernel over the same state."""
        return (self._rule.takes(group), self._rule.keys(group)) == (self._takes, self._keys)

    def takes(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether the kernel can step it with these gradients; some may be missing."""
        if not self._takes:
            return False
        found = [grad for grad in grads if grad is not None]
        slots = slice(self._first, self._first + len(self.pairs))
        return not found or (
            (is_uniform(found, DTYPES) and found[0].device == self._arena.device)
            and Where.ELSEWHERE not in self._arena.where[slots]
            and self.is_laid_out(grads)
        )

    def is_laid_out(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients can be gathered piece by piece where they have to be."""
        large = ((grads[i], self.pairs[i].stepped) for i in self._large)
        return all(grad is None or grad.stride() == p.stride() for grad, p in large)

    def step(
        self,
        kind: type[Optimizer],
        group: Group,
        state: Mapping[Tensor, dict[str, Any]],
        grads: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        publishes: bool,
        follow: Callable[[Sequence[ParameterPair], list[float]], Follower | None] | None = None,
    ) -> None:
        """Update every parameter that has a gradient.

        Args:
            group: the hyperparameters.
            state: takes a parameter's first state.
            deferred: what is still to be done to the gradients: in place to float32 ones.
            publishes: write the new values to the model.
            follow: from some of the pairs and their counts, what follows each of their blocks.
        """
        arena, where = self._arena, self._arena.where
        kinds = arena.where[self._first : self._first + len(self.pairs)]
        for a, b in stretches([grad is None for grad in grads], kinds):
            slots = slice(self._first + a, self._first + b)
            is_first = where[slots.start] is Where.NOWHERE
            if is_first:
                for pair in self.pairs[a:b]:
                    arena.fill(pair.slot, state[pair.stepped], self._keys, self._rule.counts)
            if self._rule.counts:
                arena.counts[slots].add_(1)
            counts = arena.counts[slots].tolist() if follow is not None else []
            follower = None if follow is None else follow(self.pairs[a:b], counts)
            for block in self.blocks_of(a, b):
                self.gather(block, grads, deferred)
                self._rule.call(kind, group, block, is_first)
                if publishes:
                    self._publish(block)
                if follower is not None:
                    follower.block(block)
            if follower is not None:
                follower.end()

    def gather(
        self, block: Block, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> None:
        """Cast the gradients of a block into scratch, and do what is ``deferred``."""
        pairs, mine = self.pairs[block.places], list(grads[block.places])
        if block.piece is not None:
            (grad,) = mine
            assert grad is not None
            length = pairs[0].stepped.numel()
            mine = [grad.as_strided((length,), (1,), grad.storage_offset())[block.piece]]
        found: list[Any] = mine
        low = [grad.dtype in LOW_PRECISION for grad in found]
        if deferred and not self._is_sent and not all(low):
            exact = zip(pairs, found, low, strict=True)
            deferred.apply([(pair.param, grad) for pair, grad, is_low in exact if not is_low])
        torch._foreach_copy_(block.into, found)
        if not deferred or not any(low):
            return
        if all(low) and not deferred.clips:
            deferred.apply([(pairs[0].param, block.scratch)])
            return
        narrow = zip(pairs, block.into, low, strict=True)
        deferred.apply([(pair.param, view) for pair, view, is_low in narrow if is_low])

    def _publish(self, block: Block) -> None:
        source = block.masters
        if block.staging:
            torch._foreach_copy_(block.staging, source)
            source = block.staging
        torch._foreach_copy_(block.targets, source, non_blocking=self._streams.copies_beside)

    def blocks_of(self, a: int, b: int) -> list[Block]:
        """The places from ``a`` to ``b``, in blocks."""
        found = self._blocks.get((a, b))
        if found is None:
            found = self._blocks[a, b] = list(self._cut(a, b))
        return found

    def _cut(self, a: int, b: int) -> Iterator[Block]:
        cuts: list[tuple[int, int]] = []
        start = a
        for place in range(a, b):
            begin = self._arena.offsets[self._first + start]
            if place > start and self._arena.end(self._first + place) - begin > self._limit:
                cuts.append((start, place))
                start = place
        cuts.append((start, b))
        for c, d in cuts:
            yield from self._blocks_from(c, d)

    def _blocks_from(self, c: int, d: int) -> Iterator[Block]:
        """One block of whole parameters, or the pieces of a large one."""
        arena, first, pairs = self._arena, self._first + c, self.pairs[c:d]
        begin, end = arena.offsets[first], arena.end(self._first + d - 1)
        slots = range(first, first + d - c)
        stagings = [pair.staging for pair in pairs if pair.staging is not None]
        previews = [pair.preview for pair in pairs if pair.preview is not None]
        state = [[arena.views(key)[slot] for slot in slots] for key in self._keys]
        counts = [arena.count_views[slot] for slot in slots]
        if end - begin <= self._limit or not is_dense(pairs[0].target):
            scratch = self._scratch(end - begin)
            into = [arena.view(scratch, pair.slot, begin) for pair in pairs]
            masters, targets = [p.stepped.data for p in pairs], [p.target for p in pairs]
            yield Block(
                places=slice(c, d),
                piece=None,
                scratch=scratch,
                into=into,
                masters=masters,
                state=state,
                counts=counts,
                staging=stagings,
                targets=targets,
                previews=previews,
            )
            return
        (pair,) = pairs
        stagings, previews = [flat(t) for t in stagings], [flat(t) for t in previews]
        target, master = flat(pair.target), flat(pair.stepped.data)
        flats = [flat(t) for (t,) in state]
        for i in range(0, end - begin, self._limit):
            piece = slice(i, min(i + self._limit, end - begin))
            scratch = self._scratch(piece.stop - i)
            yield Block(
                places=slice(c, d),
                piece=piece,
                scratch=scratch,
                into=[scratch],
                masters=[master[piece]],
                state=[[t[piece]] for t in flats],
                counts=counts,
                staging=[t[piece] for t in stagings],
                targets=[target[piece]],
                previews=[t[piece] for t in previews],
            )


def rule_of(optimizer: Optimizer) -> FusedRule | None:
    """What is known of the state of a group, and of its kernel; None: nothing."""
    return RULES.get(type(optimizer))


def neighbours(pairs: Sequence[ParameterPair], places: Sequence[int]) -> Iterator[list[int]]:
    """``places`` of pairs with masters, those that are neighbours in one arena together."""
    run: list[int] = []
    for place in places:
        last = pairs[run[-1]] if run else None
        if last is not None and (last.arena, last.slot + 1) != (
            pairs[place].arena,
            pairs[place].slot,
        ):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def stretches(left_out: Sequence[bool], kinds: Sequence[object]) -> Iterator[tuple[int, int]]:
    """The begin and end of each run of places that are of one kind, but for those left out."""
    end = 0
    for (is_left_out, _), some in groupby(zip(left_out, kinds, strict=True)):
        begin, end = end, end + sum(1 for _ in some)
        if not is_left_out:
            yield begin, end
