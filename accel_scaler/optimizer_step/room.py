"""How much device memory slots may take, so that the peak of the run does not rise.

Note [Room beside forward and backward]
---------------------------------------
The forward fills memory up to a peak, the backward gives it back. A look at some moments of both
notes what the run itself has allocated then, ``own``, and all that was allocated from there to the
next look, ``made``, freed or not. In between the run cannot have more than ``own + made``, whatever
its kernels take for a moment. What that leaves below the peak is room for slots:

- from the end of a step, and in the forward, until the next look, where more of them are let go;
- in the backward until the step, so the largest sum from a look to the step counts.

This is so for a window no larger than one before: looks keep the largest numbers, and in a larger
window there is no room. The peak is the allocator's own number, never reset here, since scripts
read it, too. It is read while no slot is up, which is so in the first window. Where it rises later,
though the window is no larger, so much less is left to slots from then on.
"""

from __future__ import annotations

from ..devices import memory_use
from .ring import Ring

STEP, AFTER = -1, -2
"""The looks at the begin of the step, and at its end."""

TOLERANCE = 256
"""A window is larger than one before if at some look it has more by this part of the peak: a script
may keep its losses."""


class Room:
    """Measures the memory of a ring's device in each window."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._peak = self._reserve = 0
        """Bytes: of the run's peak, and of its rises while slots were up."""
        self._own: dict[int, int] = {}
        """The most that the run itself had allocated at each look."""
        self._most: dict[int, int] = {}
        """The most that it may have had from each look to the next one."""
        self._ahead: dict[int, int] = {}
        """The most that it may have had from each look of the backward to the step."""
        self._order: list[int] = []
        """The looks of this forward and backward."""
        self._last: tuple[int, int, int] | None = None
        """The last look, unless some were left out since: its number, what the run itself had
        allocated, all it ever had."""
        self._is_larger = False
        """This window is larger than any before."""

    def left(self, look: int, until_step: bool = False) -> int:
        """The bytes that slots may have until the next look, or until the step.

        Args:
            look: the number of this moment, the same in each window.
        """
        most = (self._ahead if until_step else self._most).get(look)
        is_known = self._note(look)
        return self._peak - self._reserve - most if is_known and most is not None else 0

    def _note(self, look: int) -> bool:
        """Note a moment; False: nothing is known, or too little."""
        use = memory_use(self._ring.device)
        if use is None:
            return False
        own, ever = use.now - self._ring.held, use.ever - self._ring.made
        if self._last is not None:
            before, had, until = self._last
            self._most[before] = max(had + ever - until, self._most.get(before, 0))
        known = self._own.get(look, own)
        self._is_larger = self._is_larger or own > known + self._peak // TOLERANCE
        self._own[look] = max(own, self._own.get(look, 0))
        self._order.append(look)
        self._last = look, own, ever
        return not self._is_larger

    def knows(self, look: int) -> bool:
        """Whether a look at this moment would teach nothing."""
        return look in self._most and not self._is_larger

    def leave_out(self) -> None:
        """A moment is not looked at, so nothing is known of what was allocated until the next."""
        self._last = None

    def begin(self) -> None:
        """A forward begins."""
        self._order = []

    def end(self) -> None:
        """The step begins, or the window is skipped."""
        if not self._order:
            return
        self._note(STEP)
        most = self._own[STEP]
        for look in reversed(self._order[:-1]):
            most = max(most, self._most.get(look, 0))
            self._ahead[look] = most
        self.begin()

    def after_step(self) -> int:
        """The step has ended; as :meth:`left`."""
        use = memory_use(self._ring.device)
        if use is not None and use.peak > self._peak + self._reserve:
            if self._is_larger or not self._peak:
                self._peak = use.peak
            else:
                self._reserve = use.peak - self._peak
        self._is_larger, self._last = False, None
        return self.left(AFTER)
