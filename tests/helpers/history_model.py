"""What a training history does to the numbers, in plain Python: no torch, no thread, no device.

Every loss is linear, so the gradient is the data: ``c * (3, 4, 12)`` for a whole number ``c``,
whose norm is ``13 * |c|`` (5 and 12 for the two tensors that hold it). Scales, learning rates and
momentum are powers of two: a product with one of them is exact, so each line below rounds once, in
:func:`f32`. The real thing must then give the same bits.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from history_ops import Setup

DIRECTION = (3.0, 4.0, 12.0)
START = (1.0, -2.0, 0.5)
LR = 2.0**-8
TOO_LARGE = 65520.0
"""From here on float16 has inf."""


def f32(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def f16(value: float) -> float:
    """The nearest float16."""
    return float(struct.unpack("e", struct.pack("e", value))[0])


class Optimizer:
    """SGD with momentum over three numbers, its schedule, and what the model shows of them."""

    def __init__(self) -> None:
        self.w = self.shown = list(START)
        self.hidden: list[float] | None = None
        """What a fence has taken from the model, until the next training forward."""
        self.momentum: list[float] | None = None
        self.grad: list[float] | None = None
        self.bad = False
        """Its gradients overflowed, or a clip of several has said so."""
        self.nonfinite = False
        """They do hold an inf or a NaN."""
        self.unscaled = False
        """Somebody has looked at its gradients in this window; a check takes their norm once."""
        self.skipped = False
        self.position = 0
        self.steps = 0

    @property
    def lr(self) -> float:
        return float(LR * 2.0 ** -(self.position % 3))

    def norm_squared(self) -> float:
        return sum(g * g for g in self.grad or ())

    def publish(self, again: bool) -> None:
        """``again``: the next training forward is to see what was shown."""
        if again and self.shown is not self.w:
            self.hidden = self.shown
        self.shown = self.w

    def go_on(self) -> bool:
        """A training forward begins; whether something was hidden."""
        hidden, self.hidden = self.hidden, None
        self.shown = hidden or self.shown
        return hidden is not None

    def start_over(self) -> None:
        """Stepped by another from here on."""
        self.steps, self.hidden = 0, None

    def preview(self, momentum: float) -> list[float]:
        """The update to come, in two additions: what is known of it, and its gradient."""
        assert self.grad is not None
        known = self.w
        if momentum and self.momentum is not None:
            rate = self.lr * momentum
            known = [f32(w - rate * m) for w, m in zip(known, self.momentum, strict=True)]
        return [f32(w - self.lr * g) for w, g in zip(known, self.grad, strict=True)]

    def update(self, momentum: float, stale: bool, compensation: str) -> None:
        """The model sees it one step late, if it is ``stale``, and what is shown until then."""
        assert self.grad is not None
        if compensation == "preview" and momentum and self.momentum is None:
            stale = False  # nothing is known of a first update
        self.publish(again=False)  # the update before this one, if it was held back
        self.hidden = None
        if stale and compensation == "preview":
            self.shown = self.preview(momentum)
        step = self.grad
        if momentum:
            old = self.momentum or [0.0] * 3
            step = self.momentum = [f32(m * momentum + g) for m, g in zip(old, step, strict=True)]
        self.w = [f32(w - self.lr * s) for w, s in zip(self.w, step, strict=True)]
        self.steps += 1
        if not stale:
            self.publish(again=False)

    def double_momentum(self) -> None:
        if self.momentum is not None:
            self.momentum = [m * 2.0 for m in self.momentum]

    def zero(self, to_none: bool) -> None:
        self.grad = None if to_none or self.grad is None else [0.0] * 3
        self.bad = self.nonfinite = False


@dataclass
class Window:
    """One record."""

    scale: float
    next_scale: float
    skipped: bool
    norm: float | None
    lr: list[float]


class Refused(Exception):  # noqa: N818
    """Ours raises ``OrderError`` here."""


class Model:
    """A whole training run."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.mode, self.offload, self.warmup = setup.mode, setup.offload, setup.warmup
        self.compensation = setup.compensation
        self.optimizers = [Optimizer() for _ in range(setup.optimizers)]
        self.scale, self.good, self.bad_run = setup.init_scale, 0, 0
        self.counter = 0
        """Micro-batches, as Accelerate counts them."""
        self.attached = True
        self.windows: list[Window] = []
        self.new_window()

    # One window.

    def new_window(self) -> None:
        self.phase, self.stepped, self.found = "new", set[int](), False
        self.norms: dict[tuple[int, ...], float] = {}
        self.clipped: set[tuple[int, ...]] = set()
        self.before = (self.scale, self.good, self.bad_run)
        for own in self.optimizers:
            own.unscaled = False

    def start_over(self, i: int) -> None:
        """Its gradients were given up after a look at them: nothing that was seen counts."""
        own = self.optimizers[i]
        own.bad = own.unscaled = False
        self.norms = {ids: norm for ids, norm in self.norms.items() if i not in ids}
        self.clipped &= set(self.norms)

    def micro_batch(self, is_last: bool) -> bool:
        """Whether this micro-batch ends its window."""
        if self.setup.sync_with_dataloader and is_last:
            self.counter = 0
            return True
        self.counter += 1
        return self.counter % self.setup.accumulation == 0

    def backward(self, rows: Iterable[Sequence[float]], used: Iterable[int]) -> None:
        """One backward of the sum of the losses of ``rows``, for the models in ``used``."""
        if self.phase == "closed":
            self.new_window()
        self.phase = "open"
        for i, own in enumerate(self.optimizers):
            if own.unscaled and not own.nonfinite and not any(own.grad or ()):
                self.start_over(i)
        rows = list(rows)
        for i in used:
            values = [row[i] for row in rows]
            total, own = sum(values), self.optimizers[i]
            own.grad = [
                g + total * d for g, d in zip(own.grad or [0.0] * 3, DIRECTION, strict=True)
            ]
            for factor in (1.0, *(12.0 * v for v in values), 12.0 * total):
                if not abs(self.scale * factor) < TOO_LARGE:  # NaN too
                    own.bad = own.nonfinite = True

    def clip(self, which: Sequence[int], limit: float) -> float:
        """``clip_grad_norm_`` of these optimizers' parameters; the norm before."""
        some = [i for i in which if self.optimizers[i].grad is not None]
        chosen = [self.optimizers[i] for i in some]
        for own in chosen:
            own.unscaled = True
        if any(own.bad for own in chosen):
            for own in chosen:
                own.bad = True
            return math.inf
        norm = f32(math.sqrt(sum(own.norm_squared() for own in chosen)))
        factor = min(
            1.0, f32(f32(1.0 / f32(norm + f32(1e-6))) * f32(limit))
        )  # torch: reciprocal first
        for own in chosen:
            own.grad = [f32(g * factor) for g in own.grad or ()]
        if some:
            self.note(tuple(some), norm)
        return norm

    def note(self, some: tuple[int, ...], norm: float) -> None:
        """On record is the norm before the first clip."""
        for ids in list(self.norms):
            if set(ids).isdisjoint(some):
                continue
            if ids in self.clipped and set(some) <= set(ids):
                return
            del self.norms[ids]
        self.norms[some] = norm
        self.clipped.add(some)

    def measure(self, i: int) -> None:
        """A check that takes a norm along: of what is stepped by an engine."""
        own = self.optimizers[i]
        engine = self.mode != "sync" or self.offload != "none"
        known = any(i in ids for ids in self.norms)
        if engine and not (known or own.bad or own.unscaled or own.grad is None):
            self.norms[(i,)] = f32(math.sqrt(own.norm_squared()))

    def step(self, i: int) -> None:
        """One optimizer at the end of a window."""
        own = self.optimizers[i]
        own.skipped = False
        if own.grad is None:
            return
        if self.phase == "closed" and i in self.stepped:
            own.skipped = True
            raise Refused
        if self.phase != "new":
            self.close(i)
        own.skipped = own.bad
        if own.bad:
            own.publish(again=False)
            own.hidden = None
            return
        stale, kind = self.is_delayed and own.steps >= self.warmup, self.shows
        own.update(self.setup.momentum, stale, kind if own.steps + 1 >= self.warmup else "none")

    def close(self, i: int) -> None:
        """The verdict: however many optimizers step, the scale moves once, from where it was."""
        first = self.phase == "open"
        if first:
            self.before = (self.scale, self.good, self.bad_run)
        self.phase = "closed"
        self.stepped.add(i)
        self.measure(i)
        own = self.optimizers[i]
        self.found = self.found or own.bad
        self.scale, self.good, self.bad_run = self.advance(*self.before)
        if not self.attached:
            return
        if first:
            self.windows.append(Window(self.before[0], 0.0, False, None, []))
        window = self.windows[-1]
        window.next_scale, window.skipped = self.scale, self.found
        window.norm = math.hypot(*self.norms.values()) if self.norms else None
        window.lr.append(own.lr)

    def advance(self, scale: float, good: int, bad_run: int) -> tuple[float, int, int]:
        patience = self.setup.hysteresis if self.attached else 0
        if self.found:
            bad_run += self.attached  # stock keeps no such count
            return self.bounded(scale * 0.5 if bad_run >= patience else scale), 0, bad_run
        if good + 1 == self.setup.growth_interval:
            return self.bounded(scale * 2.0), 0, 0
        return self.bounded(scale), good + 1, 0

    def bounded(self, scale: float) -> float:
        if self.setup.bounds is None or not self.attached:
            return scale
        low, high = self.setup.bounds
        return min(max(scale, low), high)

    # What happens between windows.

    @property
    def is_delayed(self) -> bool:
        return self.attached and self.mode == "delayed"

    @property
    def shows(self) -> str:
        """What the model is given of an update that is late."""
        if not self.is_delayed:
            return "none"
        return "preview" if self.compensation == "auto" else self.compensation

    def publish(self, i: int | None = None) -> None:
        """A fence, of one optimizer or of all."""
        for own in self.optimizers if i is None else [self.optimizers[i]]:
            own.publish(again=self.shows != "none")

    def switch(self, mode: str, offload: str, warmup: int, compensation: str) -> None:
        """Detach, then attach with these settings (mode ``stock``: detach)."""
        if self.phase == "open":
            self.give_up_window()
        self.publish()
        if self.setup.stock != "none":
            self.bad_run = 0
        self.attached = mode != "stock"
        if self.attached:
            self.mode, self.offload, self.warmup = mode, offload, warmup
            self.compensation, self.scale = compensation, self.bounded(self.scale)
        for own in self.optimizers:
            own.start_over()
        self.new_window()

    def give_up_window(self) -> None:
        """The gradients are dropped, and what was scaled with them."""
        for own in self.optimizers:
            own.zero(to_none=True)
        self.new_window()

    def saved(self) -> Model:
        self.publish()
        return copy.deepcopy(self)

    def restore(self, saved: Model, *, fresh: bool, counter: bool) -> None:
        """``fresh``: in a new process. ``counter``: Accelerate's own counter came along."""
        self.give_up_window()
        for own, old in zip(self.optimizers, saved.optimizers, strict=True):
            own.w = own.shown = old.w
            own.momentum, own.position = old.momentum, old.position
            own.skipped, own.steps = own.skipped and not fresh, 0 if fresh else own.steps
        self.attached = self.attached or fresh
        for own, old in zip(self.optimizers, saved.optimizers, strict=True):
            own.hidden = old.hidden if self.shows != "none" else None
        self.scale, self.good = self.bounded(saved.scale), saved.good
        self.bad_run = saved.bad_run if self.attached else 0
        self.counter = saved.counter if counter else 0 if fresh else self.counter
        self.new_window()
