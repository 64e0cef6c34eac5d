"""The operations of a random training history through Accelerate, and how they are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from histories import INF, NAN, Short

Row = tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Setup(Short):
    """What a user chooses before the first step."""

    optimizers: int = 1
    shared: bool = False
    """One model for all optimizers; else one each."""
    accumulation: int = 1
    sync_with_dataloader: bool = True
    momentum: float = 0.5
    fused: bool = False
    init_scale: float = 1024.0
    growth_interval: int = 2
    hysteresis: int = 1
    bounds: tuple[float, float] | None = None
    stock: str = "none"
    """A stock scaler: ``none``; ``kwargs``, the settings are its; ``config``, they are ours."""
    mode: str = "sync"
    offload: str = "none"
    warmup: int = 0
    compensation: str = "none"
    telemetry: bool = False
    worker: str = "free"
    """The optimizer thread is itself (``free``), in many ``parts``, or waits until somebody waits
    (``lazy``)."""


@dataclass(frozen=True, repr=False)
class Micro(Short):
    """What the script does with one micro-batch."""

    used: tuple[int, ...] = (0, 1, 2)
    """Models with a loss in it; none: no backward."""
    threads: bool = False
    """A thread, and a backward, for each row."""
    peek: bool = False
    """Another thread reads scale, history and the scaler's state."""
    end: str = ""
    """At a boundary: ``clip each``, ``clip all``, ``clip first``, ``unscale``."""
    limit: float = 16.0
    plain: bool = False
    """``scaler.scale(loss).backward()`` instead of ``accelerator.backward(loss)``."""
    by_hand: str = ""
    """At a boundary, first of all: ``scaler.unscale_`` of the ``wrapped`` optimizers, or of the
    ``prepared`` ones."""
    drop: str = ""
    """At a boundary, after the end: the gradients of ``all``, or of ``one``, are given up and made
    again, and the end is done again."""
    after: str = ""
    """``save``, ``save by hand``, ``evaluate``, ``synchronize``, ``state_dict``, ``stop``;
    ``replace state``, of the optimizers: another tensor, twice the old one."""


@dataclass(frozen=True, repr=False)
class Epoch(Short):
    """A data set is read, once through. Each row holds a number for each model."""

    rows: tuple[Row, ...] = ()
    batch: int = 1
    iterable: bool = False
    """Of unknown length."""
    thread: bool = False
    """The training thread is another one than the main thread."""
    reader: bool = False
    """One more thread reads parameters, state dicts and the scaler's state all along."""
    zeroes: str = "none"
    """How gradients are zeroed: by the optimizer, to ``none`` or ``zeros``; ``model``, to none;
    ``by hand``, ``data``, ``foreach``, ``views``: to zeros, past it."""
    script: tuple[Micro, ...] = ()
    """For micro-batches beyond it: ``Micro()``."""

    def micro(self, number: int) -> Micro:
        return self.script[number] if number < len(self.script) else Micro()

    @property
    def groups(self) -> list[tuple[Row, ...]]:
        return [self.rows[n : n + self.batch] for n in range(0, len(self.rows), self.batch)]


@dataclass(frozen=True, repr=False)
class Switch(Short):
    """Detach, and attach with another mode."""

    mode: str = "sync"
    offload: str = "none"
    warmup: int = 0
    compensation: str = "none"


@dataclass(frozen=True, repr=False)
class Detach(Short):
    """Train on in stock until the next :class:`Switch`."""


@dataclass(frozen=True, repr=False)
class Save(Short):
    by_hand: bool = False


@dataclass(frozen=True, repr=False)
class Restore(Short):
    """What was saved last. ``fresh``: into a new accelerator, new models, new optimizers."""

    fresh: bool = False
    model_first: bool = True
    """By hand: in which order."""


Op = Epoch | Switch | Detach | Save | Restore

# How a history is drawn. Small numbers of rows, many endings: what matters are the boundaries.

ENDS = ("", "", "clip each", "clip each", "clip all", "clip first", "unscale")
AFTER = ("", "", "", "", "save", "save by hand", "evaluate", "synchronize", "state_dict", "stop")
AFTER = (*AFTER, "replace state")
LIMITS = (2.0, 16.0, 0.7, 1e6)
VALUES = (0.0, 1.0, 1.0, -1.0, 2.0, 3.0, -4.0, 4.0, 5.0, -6.0, 8.0)
MODES = ("sync", "overlap", "delayed")
COMPENSATIONS = ("none", "preview", "preview", "auto")
DEFAULT_USED = (0, 1, 2)


def draw_setup(r: random.Random) -> Setup:
    """Someone's choices."""
    return Setup(
        optimizers=r.choice((1, 1, 2, 2, 3)),
        shared=r.random() < 0.4,
        accumulation=r.choice((1, 2, 2, 3, 4)),
        sync_with_dataloader=r.random() < 0.6,
        momentum=r.choice((0.0, 0.5, 0.5)),
        fused=r.random() < 0.3,
        init_scale=r.choice((256.0, 1024.0, 1024.0, 2048.0, 65536.0)),
        growth_interval=r.choice((1, 2, 2, 3)),
        hysteresis=r.choice((1, 1, 2)),
        bounds=r.choice((None, None, (128.0, 2.0**17))),
        stock=r.choice(("none", "kwargs", "config")),
        mode=r.choice(MODES),
        offload=r.choice(("none", "none", "cpu")),
        warmup=r.choice((0, 0, 2)),
        compensation=r.choice(COMPENSATIONS),
        telemetry=r.random() < 0.3,
        worker=r.choice(("free", "parts", "lazy")),
    )


def draw_micro(r: random.Random) -> Micro:
    used = r.choice((DEFAULT_USED,) * 6 + ((0,), (1,), (0, 2), ()))
    return Micro(
        used=used,
        threads=r.random() < 0.15,
        peek=r.random() < 0.15,
        end=r.choice(ENDS),
        limit=r.choice(LIMITS),
        plain=r.random() < 0.2,
        by_hand=r.choice(("", "", "", "", "wrapped", "prepared")),
        drop=r.choice(("", "", "", "", "", "all", "one")),
        after=r.choice(AFTER),
    )


def draw_row(r: random.Random) -> Row:
    row = [r.choice(VALUES) for _ in range(3)]
    if r.random() < 0.06:
        row[r.randrange(3)] = r.choice((INF, -INF, NAN))
    return tuple(row)


ZEROES = ("model", "by hand", "data", "foreach", "views")


def draw_epoch(r: random.Random) -> Epoch:
    rows = tuple(draw_row(r) for _ in range(r.choice((0, 1, 3, 4, 5, 7, 8))))
    batch = r.choice((1, 1, 2, 3))
    count = -(-len(rows) // batch)
    return Epoch(
        rows=rows,
        batch=batch,
        iterable=r.random() < 0.4,
        thread=r.random() < 0.15,
        reader=r.random() < 0.15,
        zeroes=r.choice(("none", "none", "zeros", *ZEROES)),
        script=tuple(draw_micro(r) for _ in range(count)),
    )


def draw_switch(r: random.Random) -> Switch:
    places, warmups = ("none", "none", "cpu"), (0, 0, 2)
    return Switch(r.choice(MODES), r.choice(places), r.choice(warmups), r.choice(COMPENSATIONS))


def draw_op(r: random.Random) -> Op:
    kind = r.random()
    if kind < 0.56:
        return draw_epoch(r)
    if kind < 0.70:
        return draw_switch(r)
    if kind < 0.77:
        return Detach()
    if kind < 0.86:
        return Save(by_hand=r.random() < 0.5)
    return Restore(fresh=r.random() < 0.5, model_first=r.random() < 0.5)


def draw_history(r: random.Random, most: int = 9) -> tuple[Setup, list[Op]]:
    """Three operations at least, the first of them an epoch; now and then some time in stock."""
    setup, count = draw_setup(r), r.randrange(2, most)
    ops = [draw_epoch(r), *(draw_op(r) for _ in range(count))]
    if r.random() < 0.25:
        setup = replace(setup, fused=False, stock=r.choice(("kwargs", "config")))
        at = r.randrange(1, len(ops) + 1)
        ops[at:at] = [Detach(), draw_epoch(r), draw_switch(r), draw_epoch(r)]
    return setup, ops
