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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import Optimizer

from ..scaling import DeferredUnscale, parameters_of
from .arena import ALIGNED, flat, is_dense, laid_out, place_of
from .blocks import DEVICE_BLOCK, rule_of
from .host_memory import HostArena, WaitingState
from .looks import Looks
from .masters import MASTER, MasterRule, ParameterPair, take_edits
from .replica import Part, Replica, exact
from .ring import COUNT, Ring

BLOCKS, SMALLEST_BLOCK = 32, 1 << 20
"""About how many stretches there are, and the elements that one has at least."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state with one number a parameter, which stay where the optimizer reads them."""


class Stretch(Part):
    """A part in one host arena, or a piece of its only parameter: what a slot takes at once."""

    def __init__(self, pairs: list[ParameterPair], start: int, piece: slice | None) -> None:
        super().__init__(pairs, start)
        arena, slots = pairs[0].arena, (pairs[0].slot, pairs[-1].slot)
        assert isinstance(arena, HostArena)
        begin, end = arena.offsets[slots[0]], arena.end(slots[1])
        self.is_last = piece is None or begin + piece.stop == end
        """No other piece of its parameter is stepped after it."""
        if piece is not None:
            begin, end = begin + piece.start, begin + piece.stop
        self.begin, self.length, self.arena, self.piece = begin, end - begin, arena, piece
        self.stored: Any = None
        """The event at the end of its last store."""
        self.keys: list[str] = []
        """What there is of it in host memory, at this step."""
        self.came_up_at: list[int] = []
        """:attr:`versions` when it came up early."""

    @property
    def versions(self) -> list[int]:
        """Versions of its arena's memory: a script may hold a tensor of the state, and write to
        it."""
        return [memory._version for memory in self.arena.memory.values()]

    @property
    def homes(self) -> dict[str, Tensor]:
        """Its host memory, shape (length,) for each key."""
        end = self.begin + self.length
        return {key: self.arena.memory[key][self.begin : end] for key in self.keys}

    def cut(self, t: Tensor) -> Tensor:
        """Its elements of a tensor that is laid out like a parameter."""
        return t if self.piece is None else flat(t)[self.piece]

    def cut_gradient(self, pair: ParameterPair, grad: Tensor) -> Tensor:
        strides = self.arena.strides[pair.slot]
        return self.cut(grad if grad.stride() == strides else laid_out(grad, strides))

    def view(self, memory: Tensor, pair: ParameterPair) -> Tensor:
        """A parameter's view, or that of its piece, of memory that begins where this does."""
        if self.piece is not None:
            return memory
        return self.arena.view(memory, pair.slot, self.begin)


class OffloadedReplica(Replica):
    """As :class:`Replica`, with state in host memory. Its methods are for the training thread, but
    for :meth:`rest` and reads of state, which wait for a step under way."""

    def __init__(self, optimizer: Optimizer, masters: MasterRule) -> None:
        self._use(torch.device("cpu"))  # until some are to be on another one
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._queue: deque[Stretch] = deque()
        """Stretches of this step that are not loaded yet."""
        self.is_stepping = False
        super().__init__(optimizer, masters)

    def _use(self, device: torch.device) -> None:
        self.ring = Ring(device)
        self._looks = Looks(self, self.ring)

    # Parts, and where they lie.

    def let_go(self) -> None:
        self.rest()
        self._looks.remove()
        if isinstance(self.optimizer.state, WaitingState):
            self.optimizer.state = self.optimizer.state.copy()
        super().let_go()

    def follow(self) -> None:
        self.find_edits()  # while samples are of the memory where the parameters were
        self.rest()
        super().follow()
        rule, own = rule_of(self.optimizer), [pair for pair in self.pairs if pair.is_offloaded]
        if own and own[0].target.device != self.ring.device:
            self._looks.remove()
            self._use(own[0].target.device)
        for pair in own:
            for key in rule.keys(self.optimizer.param_groups[pair.group]) if rule else ():
                pair.arena.allocate(key)  # on the training thread, before the first step
        self._guard_state()
        self._put_looks()

    def _guard_state(self) -> None:
        state = self.optimizer.state
        if not isinstance(state, WaitingState):
            self.optimizer.state = WaitingState(self._before_read, state)

    def load_state(self, state_dict: dict[str, Any]) -> None:
        super().load_state(state_dict)
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

    def _largest_part(self) -> int:
        return _block_length(sum(pair.target.numel() for pair in self.pairs if pair.is_offloaded))

    @property
    def stretches(self) -> list[Stretch]:
        """The parts that pass through the ring, in the order of the step."""
        return [part for part in self.parts if isinstance(part, Stretch)]

    @property
    def _slot_length(self) -> int:
        """Elements of a slot: as many as the largest stretch needs."""
        lengths = (len(each.arena.memory) * (each.length + ALIGNED) for each in self.stretches)
        return max(lengths, default=0)

    def _parts_of(self, pairs: list[ParameterPair], start: int, limit: int) -> Sequence[Part]:
        """One, or the pieces of a large parameter."""
        target = pairs[0].target
        if not pairs[0].is_offloaded:
            return super()._parts_of(pairs, start, limit)
        if len(pairs) > 1 or target.numel() <= limit or not is_dense(target):
            return [Stretch(pairs, start, None)]
        begins = range(0, target.numel(), limit)
        pieces = [slice(begin, min(begin + limit, target.numel())) for begin in begins]
        return [Stretch(pairs, start, piece) for piece in pieces]

    def _moved(self, pair: ParameterPair, key: str, value: Tensor) -> Tensor:
        """State in its place in host memory; the numbers of :data:`SCALARS` go where the optimizer
        reads them."""
        if not pair.is_offloaded:
            return super()._moved(pair, key, value)
        if is_moved(key, value, pair.target):
            home = pair.arena.view(pair.arena.allocate(key), pair.slot)
            if place_of(value) == place_of(home):
                return value
            self.rest()
            return home.copy_(exact(key, value))
        if pair.is_master:  # torch's load casts to the parameter's dtype
            value = exact(key, value)
        is_read_there = key in SCALARS and self.optimizer.param_groups[pair.group].get("fused")
        return value.to(pair.target.device) if is_read_there else value

    def _find_keys(self, stretch: Stretch) -> bool:
        """Look which keys a stretch has in host memory; whether there are any."""
        state = self.optimizer.state
        found = {MASTER} if stretch.pairs[0].is_master else set[str]()
        for pair in stretch.pairs:
            found.update(dict.get(state, pair.param) or ())
        stretch.keys = [key for key in stretch.arena.memory if key in found]
        return bool(stretch.keys)

    # Copies.

    def rest(self) -> None:
        """Let all be at rest in host memory, and the newest there. Waits for copies down."""
        with self.lock:
            self.ring.settle()
            self.ring.drop()
            self.ring.release_free()

    def _put_looks(self) -> None:
        # Without a model nobody would drop what came up in vain before the next forward.
        if self.stretches and self._models and self.masters.budget != 0:
            trained = [pair.param for pair in self.ordered if pair.param.requires_grad]
            self._looks.put(trained, self._models)

    def watch(self, model: Module) -> None:
        if model not in self._models:
            mine = set(map(id, parameters_of(self.optimizer)))
            if not mine.isdisjoint(map(id, Module.parameters(model))):
                self._models.add(model)
                self._put_looks()

    def before_backward(self, is_last: bool) -> None:
        self._looks.is_last = is_last

    @torch.no_grad()
    def come_up(self, left: int) -> None:
        """Load stretches in the order of the step while slots have at most ``left`` bytes, without
        those that the step takes for a moment: gradients in float32, and what only a fused kernel
        does without."""
        ring, length = self.ring, self._slot_length
        ring.release_smaller(length)
        left -= 4 * length * (1 if all(g.get("fused") for g in self.optimizer.param_groups) else 4)
        for stretch in self.stretches:
            if stretch not in ring.loaded:
                if not ring.free and ring.held + 4 * length > left:
                    return
                if self._find_keys(stretch):
                    if not ring.free:
                        ring.make(length)
                    ring.load(stretch)
                    stretch.came_up_at = stretch.versions

    # The step.

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        self.is_stepping = True
        try:
            self._guard_state()
            super().prepare(grads)
            self._looks.before_step()
            self._prepare_ring(self.ring, grads)
        except BaseException:
            self.is_doubtful = self.takes_edits
            self.give_back_state()
            raise

    def _prepare_ring(self, ring: Ring, grads: Sequence[Tensor | None]) -> None:
        """Say which stretches are stepped, in which order, and make the slots that they lack."""
        steps = [
            stretch
            for stretch in self.stretches
            if any(grad is not None for grad in grads[stretch.start : stretch.end])
            and self._find_keys(stretch)
        ]
        wanted = set(steps)
        for stretch in self.stretches if self.takes_edits else ():
            if stretch not in wanted:
                ring.settle()
                for pair in stretch.pairs:
                    pair.refresh()
        for each, slot in list(ring.loaded.items()):
            is_current = each.came_up_at == each.versions and each.keys == [*slot.views]
            if not is_current or each not in wanted:
                ring.free.append(ring.loaded.pop(each))
        self._queue = deque(each for each in steps if each not in ring.loaded)
        length = self._slot_length
        ring.release_smaller(length)
        for number in range(len(ring.free) + len(ring.loaded), min(COUNT, len(steps))):
            try:
                ring.make(length)
            except torch.OutOfMemoryError:
                if number < 1:
                    raise
                if ring.free and number > 1:  # the step itself needs some memory, too
                    ring.release_free(ring.held - 1)
                break  # a smaller ring: the same numbers, with less at once

    def give_back_state(self) -> None:
        super().give_back_state()
        if self.is_stepping:
            self._queue.clear()
            if self.ring.loaded:  # the step has failed
                self.rest()
            self._spot_check.note()
            self._looks.after_step()
        self.is_stepping = False

    def skip(self) -> None:
        """A window without a step: what came up is dropped, and nothing stored."""
        with self.lock:
            self._looks.before_step()
            self.ring.drop()
            self._looks.after_step()

    def step_part(
        self, part: Part, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> None:
        if not isinstance(part, Stretch):
            super().step_part(part, grads, deferred)
            return
        found = [(pair, g) for pair, g in zip(part.pairs, grads, strict=True) if g is not None]
        if not found:
            return
        pairs, ring = [pair for pair, _ in found], self.ring
        views: dict[str, Tensor] = {}
        if part.keys:
            while self._queue and ring.free:
                ring.load(self._queue.popleft())
            views = ring.begin(part)
        if self.takes_edits and MASTER in views:  # here, not on the host's cores
            for pair in part.pairs:
                take_edits(part.view(views[MASTER], pair), part.cut(pair.target))
        final = self.bring(pairs, [part.cut_gradient(*each) for each in found], deferred)
        params = [
            nn.Parameter(part.view(views[MASTER], p) if p.is_master else part.cut(p.target))
            for p in pairs
        ]
        given = [self._state_in(part, pair, views) for pair in pairs]
        filled = zip(params, given, strict=True)
        state = defaultdict(dict, {p: dict(entry) for p, entry in filled if entry})
        self.step_these(params, final, part.group, state)
        for pair, p, entry in zip(pairs, params, given, strict=True):
            if p in state:
                self._keep(part, pair, p, entry, state[p], views)
        if pairs[0].is_master:
            targets = [part.cut(pair.target) for pair in pairs]
            torch._foreach_copy_(targets, [p.detach() for p in params])
        if views:
            ring.store(part)

    def _state_in(
        self, stretch: Stretch, pair: ParameterPair, views: dict[str, Tensor]
    ) -> dict[str, Any]:
        """State for one call of the step: views of the slot, and numbers. Each piece of a parameter
        counts the step for itself, the last one for good."""
        found = dict(self.copy.state.get(pair.stepped) or {})
        for key, value in found.items():
            if key in views:
                found[key] = stretch.view(views[key], pair)
            elif isinstance(value, Tensor) and not stretch.is_last:
                found[key] = value.clone()
        return found

    def _keep(
        self,
        stretch: Stretch,
        pair: ParameterPair,
        p: Tensor,
        given: dict[str, Any],
        after: dict[str, Any],
        views: dict[str, Tensor],
    ) -> None:
        """Note in a parameter's entry what the step has made new: the first time its tensors, which
        are copied to host memory while the host waits, and each time its numbers.

        Args:
            p: what was stepped, of shape like its tensors of state.
            given, after: the state that the step got, and left.
        """
        for key, value in after.items():
            if key in views and value is given.get(key):
                continue
            if isinstance(value, Tensor) and is_moved(key, value, p):
                home = pair.arena.view(pair.arena.allocate(key), pair.slot)
                into = stretch.view(views[key], pair) if key in views else stretch.cut(home)
                into.copy_(value)
                value = home
            if stretch.is_last:
                self.copy.state[pair.stepped][key] = value


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
