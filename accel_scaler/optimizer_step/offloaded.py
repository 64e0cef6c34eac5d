"""A replica whose masters and state rest in host memory and are stepped on the device.

Of the parameters' memory nothing moves. Masters and state lie in host arenas, cut into *stretches*:
some parameters, or a piece of a large one. At the step one stretch after the other passes through
a :class:`Ring`, and the optimizer's own ``step()`` runs on views of the slot, so its numbers are
those of a step without offload. Some stretches may be up already: in the backward before the step
they are loaded into memory that activations have left (:class:`Looks`). Their copies down run
beside the next forward.

    up         0 1 2 ·  ·  3 4 5         (0 1 2: early, in the backward)
    training   backward · 0 1 2 3 4 5 · forward
    down                    0 1 2 3 4 5
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer

from ..scaling import DeferredUnscale, local
from .arena import ALIGNED, flat, is_dense, place_of
from .blocks import DEVICE_BLOCK, rule_of
from .host_memory import HostArena, WaitingState
from .looks import Looks
from .masters import MASTER, MasterRule, ParameterPair, with_edits
from .replica import Part, Replica, exact
from .ring import COUNT, Block, Ring, Slot

BLOCKS, SMALLEST_BLOCK = 32, 1 << 20
"""About how many stretches there are, and the elements that one has at least."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state with one number a parameter, which stay where the optimizer reads them."""


class Stretch(Block):
    """Some parameters of a part, or a piece of one, in one host arena."""

    def __init__(self, part: Part, arena: HostArena, places: range, piece: slice | None) -> None:
        first, last = (part.pairs[place].slot for place in (places[0], places[-1]))
        begin, end = arena.offsets[first], arena.end(last)
        if piece is not None:
            begin, end = begin + piece.start, begin + piece.stop
        super().__init__(begin, end - begin)
        self.part, self.arena, self.places, self.piece = part, arena, places, piece
        self.keys: list[str] = []
        """What there is of it in host memory, at this step."""

    def homes(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Its host memory, shape (length,) for each key."""
        end = self.begin + self.length
        return {key: self.arena.memory[key][self.begin : end] for key in keys}

    def view(self, memory: Tensor, pair: ParameterPair) -> Tensor:
        """A parameter's view, or that of its piece, of memory that begins where this does."""
        if self.piece is not None:
            return memory
        return self.arena.view(memory, pair.slot, self.begin)


@dataclass
class Loaded:
    """A stretch that is in a slot, and the versions of its arena then."""

    slot: Slot
    versions: list[int]


class OffloadedReplica(Replica):
    """As :class:`Replica`, with state in host memory. Its methods are for the training thread, but
    for :meth:`rest` and reads of state, which wait for a step under way."""

    def __init__(self, optimizer: Optimizer, masters: MasterRule) -> None:
        self._ring: Ring | None = None
        self._looks: Looks | None = None
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._loaded: dict[Stretch, Loaded] = {}
        self._unstored: list[ParameterPair] = []
        """Parameters that have new values, while their masters are not stored."""
        self._queue: deque[Stretch] = deque()
        """Stretches of this step that are not loaded yet."""
        self.is_stepping = False
        super().__init__(optimizer, masters)

    # Parts, and where they lie.

    def let_go(self) -> None:
        if self._looks is not None:
            self._looks.remove()
        if self._ring is not None:
            self.rest()
        state = self.optimizer.state
        if isinstance(state, WaitingState):
            self.optimizer.state = defaultdict(dict, dict.items(state))
        self._stretches: dict[Part, list[Stretch]] = {}
        super().let_go()

    def follow(self) -> bool:
        if self.is_current():
            return False
        if self._ring is not None:
            self.take_edits()  # while samples are of the memory where the parameters were
            self.take_noted_edits()
        changed = super().follow()
        own = [pair for pair in self.pairs if pair.is_offloaded]
        if not own:
            return changed
        rule, device = rule_of(self.optimizer), own[0].target.device
        if self._ring is None or self._ring.device != device:
            self._ring = Ring(device)
            self._looks = None if self.masters.budget == 0 else Looks(self, device)
        for pair in own:
            arena = _host_arena(pair)
            for key in rule.keys(self.optimizer.param_groups[pair.group]) if rule else ():
                arena.reserve(key)  # on the training thread, before the first step
        self._guard_state()
        self._put_looks()
        return changed

    def _guard_state(self) -> None:
        state = self.optimizer.state
        if not isinstance(state, WaitingState) and self._ring is not None:
            self.optimizer.state = WaitingState(self._before_read, state)

    def load_state(self, state_dict: dict[str, Any], masters: dict[int, Any]) -> None:
        self.rest()
        super().load_state(state_dict, masters)
        for pair in self.pairs:
            pair.is_edited_since = False
        self._guard_state()

    def _before_read(self) -> None:
        with self.lock:  # another thread waits for the step
            is_read_within = self.is_stepping
        if not is_read_within:
            self.rest()

    def size_of(self, pair: ParameterPair) -> int:
        rule, group = rule_of(self.optimizer), self.optimizer.param_groups[pair.group]
        keys = 2 if rule is None else len(rule.keys(group))
        return 4 * pair.target.numel() * (keys + self.masters.takes(pair.target))

    def _cut(self, ordered: list[ParameterPair]) -> Iterator[list[ParameterPair]]:
        """Parts that lie in one host arena each, then the others."""
        own = [pair for pair in ordered if pair.is_offloaded]
        limit = self._limit = _block_length(sum(pair.target.numel() for pair in own))
        own.sort(key=lambda pair: pair.slot)
        arenas: dict[Any, list[ParameterPair]] = {}
        for pair in own:
            arenas.setdefault(pair.arena, []).append(pair)
        for mine in arenas.values():
            some: list[ParameterPair] = []
            for pair in mine:
                if some:
                    last, begin = some[-1], pair.arena.offsets[some[0].slot]
                    is_next = (pair.slot, pair.group) == (last.slot + 1, last.group)
                    if not is_next or pair.arena.end(pair.slot) - begin > limit:
                        yield some
                        some = []
                some.append(pair)
            yield some
        yield from super()._cut([pair for pair in ordered if not pair.is_offloaded])

    def _split(self) -> None:
        self.rest()  # other stretches know nothing of copies under way
        super()._split()
        self._stretches = {
            part: list(self._stretches_of(part)) for part in self.parts if is_offloaded(part)
        }

    @property
    def _slot_length(self) -> int:
        """Elements of a slot: as many as the largest stretch needs."""
        every = chain.from_iterable(self._stretches.values())
        lengths = (len(each.arena.memory) * (each.length + ALIGNED) for each in every)
        return max(lengths, default=0)

    def _stretches_of(self, part: Part) -> Iterator[Stretch]:
        pair, arena, limit = part.pairs[0], _host_arena(part.pairs[0]), self._limit
        length = pair.target.numel()
        if len(part.pairs) > 1 or length <= limit or not is_dense(pair.target):
            yield Stretch(part, arena, range(len(part.pairs)), None)
            return
        for begin in range(0, length, limit):
            yield Stretch(part, arena, range(1), slice(begin, min(begin + limit, length)))

    def _move_entry(self, pair: ParameterPair, entry: dict[str, Any]) -> None:
        """Move state to its places in host memory; the numbers of :data:`SCALARS` go where the
        optimizer reads them."""
        if not pair.is_offloaded:
            super()._move_entry(pair, entry)
            return
        group = self.optimizer.param_groups[pair.group]
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                continue
            value = local(value)
            if is_moved(key, value, pair.target):
                (home,) = pair.arena.allocate(range(pair.slot, pair.slot + 1), key)
                if place_of(value) != place_of(home):
                    self.rest()
                    home.copy_(exact(key, value, group))
                    entry[key] = home
            elif key in SCALARS and group.get("fused"):
                entry[key] = value.to(pair.target.device)
            else:
                entry[key] = value

    def keys_of(self, stretch: Stretch) -> list[str]:
        """What there is of it in host memory."""
        state, found = self.optimizer.state, dict[str, None]()
        for place in stretch.places:
            pair = stretch.part.pairs[place]
            if pair.is_master:
                found[MASTER] = None
            found.update(dict.fromkeys(dict.get(state, pair.param) or ()))
        return [key for key in stretch.arena.memory if key in found]

    # Copies.

    def rest(self) -> None:
        """Let all be at rest in host memory, and the newest there. Waits for copies down."""
        with self.lock:
            self.drop()
            if self._ring is not None:
                self._ring.release_free()
                self._ring.settle()

    def take_noted_edits(self) -> None:
        self.rest()
        for pair in self.pairs:
            if pair.is_edited_since:
                pair.refresh()
                pair.is_edited_since = False

    def drop(self) -> None:
        """Let go what came up and was not stepped."""
        with self.lock:
            for each in self._loaded.values():
                self.ring.release(each.slot)
            self._loaded.clear()

    @property
    def ring(self) -> Ring:
        """Where some state rests in host memory."""
        assert self._ring is not None
        return self._ring

    @property
    def has_loaded_early(self) -> bool:
        """Some stretches are up, and no step has begun."""
        return bool(self._loaded)

    def _load(self, slot: Slot, stretch: Stretch) -> None:
        ring = self.ring
        self._loaded[stretch] = Loaded(slot, stretch.arena.versions)  # first: Ctrl-C may come
        if slot in ring.free:
            ring.free.remove(slot)
        ring.load(slot, stretch, stretch.homes(stretch.keys))

    def _put_looks(self) -> None:
        # Without a model nobody would drop what came up in vain before the next forward.
        if self._looks is not None and self._models:
            trained = [pair.param for pair in self.ordered if pair.param.requires_grad]
            self._looks.put(trained, self._models)

    def watch(self, model: Module) -> None:
        """``model`` has parameters of the optimizer."""
        self._models.add(model)
        self._put_looks()

    def before_backward(self, is_last: bool) -> None:
        """A backward is about to begin, as :class:`Stepper` says."""
        if self._looks is not None:
            self._looks.is_last = is_last

    def before_forward(self, counts: bool) -> None:
        """A watched model is about to run; ``counts``: not because a window is run again."""
        if self._looks is not None:
            self._looks.before_forward(counts)

    @torch.no_grad()
    def come_up(self, left: int) -> None:
        """Load stretches in the order of the step while slots have at most ``left`` bytes, without
        those that the step takes for a moment: gradients in float32, and what only a fused kernel
        does without."""
        ring, length = self.ring, self._slot_length
        ring.release_smaller(length)
        left -= 4 * length * (1 if all(g.get("fused") for g in self.optimizer.param_groups) else 4)
        for stretch in chain.from_iterable(self._stretches.values()):
            if stretch not in self._loaded:
                if not ring.free and ring.held + 4 * length > left:
                    return
                stretch.keys = self.keys_of(stretch)
                if stretch.keys:
                    self._load(ring.free[0] if ring.free else ring.make(length), stretch)

    # The step.

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        self.is_stepping = True
        try:
            self._guard_state()
            super().prepare(grads)
            if self._ring is not None:
                self._prepare_ring(self._ring, grads)
        except BaseException:
            self.give_back_state()
            raise

    def _prepare_ring(self, ring: Ring, grads: Sequence[Tensor | None]) -> None:
        """Say which stretches are stepped, in which order, and make the slots that they lack."""
        if self._looks is not None:
            self._looks.before_step()
        steps: list[Stretch] = []
        for part, some in self._stretches.items():
            if any(grad is not None for grad in grads[part.start : part.end]):
                for stretch in some:
                    stretch.keys = self.keys_of(stretch)
                steps.extend(stretch for stretch in some if stretch.keys)
        wanted = set(steps)
        for stretch, up in list(self._loaded.items()):
            is_current = up.versions == stretch.arena.versions and stretch in wanted
            if not is_current or [*up.slot.views] != stretch.keys:
                ring.free.append(self._loaded.pop(stretch).slot)
        self._queue = deque(each for each in steps if each not in self._loaded)
        length = self._slot_length
        ring.release_smaller(length)
        held = len(ring.free) + len(self._loaded)
        for number in range(held, min(COUNT, len(steps))):
            try:
                ring.free.append(ring.make(length))
            except torch.OutOfMemoryError:
                if number < 1:
                    raise
                if ring.free and number > 1:  # the step itself needs some memory, too
                    ring.release(ring.free[-1])
                    ring.free.pop()
                break  # a smaller ring: the same numbers, with less at once

    def give_back_state(self) -> None:
        super().give_back_state()
        if self.is_stepping:
            self._queue.clear()
            if self._loaded:  # the step has failed
                self.rest()
            self._spot_check.note()
            for pair in self._unstored:  # the step has failed: their masters are of before
                self.refresh(pair)
            self._unstored = []
            self._end_window()
        self.is_stepping = False

    def _end_window(self) -> None:
        self.drop()
        if self._ring is None:
            return
        if self._looks is None:
            self._ring.release_free()
        else:
            self._looks.after_step(self._ring)

    def skip(self) -> None:
        """A window without a step: what came up is dropped, and nothing stored."""
        with self.lock:
            if self._looks is not None:
                self._looks.before_step()
            self._end_window()

    def step_part(
        self, part: Part, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> None:
        if part not in self._stretches:
            super().step_part(part, grads, deferred)
            return
        given, done = list(grads), set[int]()
        for place, (pair, grad) in enumerate(zip(part.pairs, grads, strict=True)):
            if grad is not None and grad.stride() != pair.arena.strides[pair.slot]:
                (whole,) = self.bring([pair], [grad], deferred)
                assert whole is not None
                size, stride = pair.target.shape, pair.arena.strides[pair.slot]
                given[place] = torch.empty_strided(
                    size, stride, dtype=whole.dtype, device=whole.device
                ).copy_(whole)
                done.add(place)
        before = [dict(self.copy.state.get(pair.stepped) or {}) for pair in part.pairs]
        for stretch in self._stretches[part]:
            self._step(stretch, given, done, deferred, before)
        for pair, grad in zip(part.pairs, grads, strict=True):
            pair.is_edited_since = pair.is_edited_since and grad is None

    def _step(
        self,
        stretch: Stretch,
        grads: Sequence[Tensor | None],
        done: set[int],
        deferred: DeferredUnscale,
        before: Sequence[dict[str, Any]],
    ) -> None:
        """Update one stretch by the optimizer's own step. ``done``: the places of gradients that
        nothing is deferred for. ``before``: each parameter's state before this step."""
        places = [place for place in stretch.places if grads[place] is not None]
        if not places:
            return
        ring, keys = self._ring, stretch.keys
        assert ring is not None
        views: dict[str, Tensor] = {}
        if keys:
            while self._queue and ring.free:
                self._load(ring.free[0], self._queue.popleft())
            slot = self._loaded[stretch].slot
            ring.begin(slot)
            views = slot.views
        pairs = [stretch.part.pairs[place] for place in places]
        params = [self._stepped_in(stretch, pair, views) for pair in pairs]
        piece = stretch.piece
        found = [grad for place in places if (grad := grads[place]) is not None]
        pieces = [grad if piece is None else flat(grad)[piece] for grad in found]
        final: list[Tensor | None] = list(pieces)
        due = [i for i, place in enumerate(places) if place not in done]
        brought = self.bring([pairs[i] for i in due], [pieces[i] for i in due], deferred)
        for i, grad in zip(due, brought, strict=True):
            final[i] = grad
        entries = [before[place] for place in places]
        state = self._state_in(stretch, pairs, params, entries, views)
        given = {p: dict(own) for p, own in state.items()}
        self._call(params, final, pairs[0].group, state)
        for pair, p, entry in zip(pairs, params, entries, strict=True):
            if p in state:
                self._keep(stretch, pair, p, entry, given.get(p, {}), state[p], views)
        if pairs[0].is_master:
            self._unstored = pairs
            targets = [pair.target if piece is None else flat(pair.target)[piece] for pair in pairs]
            torch._foreach_copy_(targets, [p.detach() for p in params])
        if keys:
            ring.store(slot, stretch, stretch.homes(keys))
            del self._loaded[stretch]
        self._unstored = []

    def _stepped_in(
        self, stretch: Stretch, pair: ParameterPair, views: dict[str, Tensor]
    ) -> Tensor:
        """What is stepped of one parameter: its memory, or its master in a slot."""
        target = pair.target if stretch.piece is None else flat(pair.target)[stretch.piece]
        if not pair.is_master:
            return pair.stepped if stretch.piece is None else nn.Parameter(target)
        master = stretch.view(views[MASTER], pair)
        if pair.is_edited_since:
            master.copy_(with_edits(master, target))
        return nn.Parameter(master)

    def _state_in(
        self,
        stretch: Stretch,
        pairs: Sequence[ParameterPair],
        params: Sequence[Tensor],
        entries: Sequence[dict[str, Any]],
        views: dict[str, Tensor],
    ) -> dict[Any, dict[str, Any]]:
        """State for one call of the step: views of the slot, and numbers."""
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        for pair, p, entry in zip(pairs, params, entries, strict=True):
            own = {}
            for key, value in entry.items():
                if key in views:
                    value = stretch.view(views[key], pair)
                elif stretch.piece is not None and isinstance(value, Tensor):
                    value = value.clone()  # each piece counts the step for itself
                own[key] = value
            if own:
                state[p] = own
        return state

    def _call(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        number: int,
        state: dict[Any, dict[str, Any]],
    ) -> None:
        copy, groups, states = self.copy, self.copy.param_groups, self.copy.state
        try:
            copy.param_groups = [{**groups[number], "params": list(params)}]
            copy.state = state
            # Apart: torch's fused SGD takes no momentum beside parameters that have none yet.
            new = {
                p for p in params if any(v is None for v in (state.get(p) or {"": None}).values())
            }
            for some in filter(None, (new, {*params} - new)):
                for p, grad in zip(params, grads, strict=True):
                    if p in some and grad is not None and grad.dtype is not p.dtype:
                        p.grad_dtype = grad.dtype
                    p.grad = grad if p in some else None
                self.call_step(params)
        finally:
            copy.param_groups, copy.state = groups, states
            for p in params:
                p.grad = None

    def _keep(
        self,
        stretch: Stretch,
        pair: ParameterPair,
        p: Tensor,
        before: dict[str, Any],
        given: dict[str, Any],
        after: dict[str, Any],
        views: dict[str, Tensor],
    ) -> None:
        """Note in a parameter's entry what the step has made new: the first time its tensors, which
        are copied to host memory while the host waits, and each time its numbers.

        Args:
            p: what was stepped, of shape like its tensors of state.
            before: the entry before this step.
            given, after: the state that the step got, and left.
        """
        entry, piece = self.copy.state[pair.stepped], stretch.piece
        for key, value in after.items():
            if key in views and value is given.get(key):
                continue
            if isinstance(value, Tensor) and is_moved(key, value, p):
                (home,) = pair.arena.allocate(range(pair.slot, pair.slot + 1), key)
                if key in views:
                    stretch.view(views[key], pair).copy_(value)
                else:
                    (home if piece is None else flat(home)[piece]).copy_(value)
                if entry.get(key) is None or place_of(entry[key]) != place_of(home):
                    entry[key] = home
            elif piece is None or key not in before:
                entry[key] = value
            elif piece.stop == pair.target.numel():  # each piece has counted the step
                if isinstance(before[key], Tensor):
                    before[key].copy_(value)
                else:
                    entry[key] = value


def _host_arena(pair: ParameterPair) -> HostArena:
    assert isinstance(pair.arena, HostArena)
    return pair.arena


def is_offloaded(part: Part) -> bool:
    return part.pairs[0].is_offloaded


def is_moved(key: str, value: Tensor, like: Tensor) -> bool:
    """Whether a value of state rests in host memory: it has an element for each of a parameter."""
    return key not in SCALARS and value.is_floating_point() and value.shape == like.shape


def ring_bytes(elements: int, keys: int) -> int:
    """Bytes of the slots for so many elements, of which each has ``keys`` float32 numbers."""
    return 4 * keys * min(elements, COUNT * _block_length(elements))


def _block_length(elements: int) -> int:
    """Elements of a stretch, of so many in all; registers end there."""
    length = min(max(elements // BLOCKS, SMALLEST_BLOCK), DEVICE_BLOCK)
    return length // ALIGNED * ALIGNED
