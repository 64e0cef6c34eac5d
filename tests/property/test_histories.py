"""Random training histories through Accelerate equal a model in plain Python, bit for bit.

``history_model.py`` says what must happen, ``history_world.py`` does it, ``history_ops.py`` draws
what to do, ``history_play.py`` brings them together.
``HISTORIES=6000 pytest tests/property/test_histories.py`` plays more of them; ``make soak``,
an hour.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter

import pytest
from history_model import START, Model, f16, f32
from history_ops import (
    INF,
    NAN,
    Detach,
    Epoch,
    Micro,
    Op,
    Restore,
    Save,
    Setup,
    Switch,
    as_test,
    draw_history,
    shortest,
)
from history_play import WORKERS, play

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if "HISTORIES" in os.environ else 300),
]

EACH = int(os.environ.get("HISTORIES", "360")) // len(WORKERS)
LEAST = 5
EVENTS = (
    *("window", "boundary", "off the boundary", "skipped", "one of them skipped", "grew"),
    *("no clip", "clip each", "clip all", "clip first", "unscale", "refused", "no backward"),
    *("backward in threads", "in another thread", "peeked", "one model idle", "short batch"),
    *("inf or nan in the data", "iterable", "a last, partial window", "stop"),
    *("epoch ended inside a window", "saved inside a window", "saved with an update held back"),
    *("save", "save by hand", "evaluate", "synchronize", "state_dict", "records in a file"),
    *("read beside", "scaled by hand", "unscaled by hand, wrapped", "unscaled by hand, prepared"),
    *("dropped all", "dropped one", "dropped after no clip", "dropped after clip each"),
    *("dropped after clip all", "dropped after unscale", "replace state"),
    *("zeroed: none", "zeroed: zeros", "zeroed: model", "zeroed: by hand", "zeroed: data"),
    "zeroed: foreach",
    *("restored", "restored, fresh", "detached", "boundary in stock", "attached again"),
    *(f"to {a} from {b}" for a in ("sync", "overlap", "delayed") for b in ("sync", "overlap")),
    *("to sync from delayed", "to overlap from delayed", "to delayed from delayed"),
)


def said(setup: Setup, ops: list[Op], worker: str, seed: int, error: Exception) -> str:
    """The shortest history that fails like this one."""

    def fails(setup: Setup, ops: list[Op]) -> bool:
        try:
            play(setup, ops, worker)
        except type(error):
            return True
        except Exception:
            return False
        return False

    return f"seed {seed}, worker {worker!r}: {error}\n{as_test(*shortest(setup, ops, fails))}"


@pytest.mark.parametrize("worker", WORKERS)
def test_random_histories_equal_the_model(worker: str) -> None:
    seen: Counter[str] = Counter()
    first = EACH * list(WORKERS).index(worker)
    for seed in range(first, first + EACH):
        setup, ops = draw_history(random.Random(seed))
        try:
            play(setup, ops, worker, seen)
        except Exception as error:
            raise AssertionError(said(setup, ops, worker, seed, error)) from error
    # The histories went everywhere.
    assert seen["histories"] == EACH
    assert {event: seen[event] for event in EVENTS if seen[event] < LEAST} == {}


ROWS = ((5.0, -4.0, 3.0), (1.0, 8.0, 2.0), (3.0, 3.0, 0.0))
FOUND: dict[str, tuple[Setup, list[Op]]] = {
    "the scale fell, then another mode, its init_scale in our settings": (
        Setup(stock="config"),
        [Epoch(rows=((-6.0, 8.0, 4.0),)), Switch()],
    ),
    "restored in a new process, then at once another mode": (
        Setup(stock="config"),
        [
            Epoch(rows=((-6.0, 5.0, 5.0),), script=(Micro(after="save by hand"),)),
            Restore(fresh=True),
            Switch(),
        ],
    ),
    "zeroed to zeros, restored, zeroed to zeros with nothing in it": (
        Setup(mode="delayed"),
        [
            Epoch(rows=ROWS[:1], zeroes="zeros", script=(Micro(after="save by hand"),)),
            Restore(),
            Epoch(rows=ROWS[:2], zeroes="zeros", script=(Micro(used=()), Micro(used=(1,)))),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_histories_that_have_shown_a_fault(name: str) -> None:
    play(*FOUND[name])


SPOKEN: dict[str, tuple[Setup, list[Op]]] = {
    "an epoch that ends inside a window, which the next one goes on with": (
        Setup(accumulation=2, sync_with_dataloader=False),
        [Epoch(rows=ROWS), Epoch(rows=ROWS, iterable=True)],
    ),
    "a last window with less in it, that overflows": (
        Setup(optimizers=2, accumulation=2),
        [Epoch(rows=(*ROWS[:2], (INF, 1.0, 0.0))), Epoch(rows=ROWS)],
    ),
    "one optimizer with NaN, one idle, one fine": (
        Setup(optimizers=3, shared=True, mode="delayed"),
        [Epoch(rows=((NAN, 1.0, 2.0),), script=(Micro(used=(0, 2)),)), Epoch(rows=ROWS)],
    ),
    "a window without gradients, and one of zeros, which is refused": (
        Setup(mode="overlap"),
        [Epoch(rows=ROWS, zeroes="zeros", script=(Micro(), Micro(used=())))],
    ),
    "saved with an update held back, restored elsewhere": (
        Setup(mode="delayed", offload="cpu"),
        [Epoch(rows=ROWS), Save(), Epoch(rows=ROWS), Restore(fresh=True), Epoch(rows=ROWS)],
    ),
    "sync, overlap, delayed, stock, and back": (
        Setup(stock="kwargs", telemetry=True),
        [
            *(Epoch(rows=ROWS), Switch(mode="overlap"), Epoch(rows=ROWS)),
            *(Switch(mode="delayed", warmup=1), Epoch(rows=ROWS), Detach(), Epoch(rows=ROWS)),
            *(Switch(offload="cpu"), Epoch(rows=ROWS)),
        ],
    ),
}


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("name", SPOKEN)
def test_histories_that_can_be_told(name: str, worker: str) -> None:
    assert play(*SPOKEN[name], worker)["histories"] == 1


def test_the_model_does_the_sums_of_a_sheet_of_paper() -> None:
    model = Model(Setup(optimizers=2, accumulation=2, growth_interval=1))
    one, two = model.optimizers
    assert not model.micro_batch(is_last=False)
    model.backward([(1.0, 4.0)], [0, 1])
    assert model.micro_batch(is_last=False)
    model.backward([(2.0, 1.0), (1.0, 1.0)], [0, 1])
    assert (one.grad, two.grad) == ([12.0, 16.0, 48.0], [18.0, 24.0, 72.0])
    assert model.clip([0], 26.0) == 52.0  # 4 * 13; so half of it is left
    assert one.grad == [6.0, 8.0, 24.0]
    two.bad = True
    model.step(0)
    assert (one.skipped, model.scale) == (False, 2048.0)
    model.step(1)
    assert (two.skipped, model.scale, model.good) == (True, 512.0, 0)  # one verdict, from 1024
    assert one.w == [w - g / 256 for w, g in zip(START, (6.0, 8.0, 24.0), strict=True)]
    assert two.w == list(START)
    (window,) = model.windows
    assert (window.scale, window.next_scale, window.skipped) == (1024.0, 512.0, True)
    assert (window.norm, window.lr) == (52.0, [2.0**-8, 2.0**-8])


def test_the_model_rounds_as_the_formats_do() -> None:
    assert f32(1.0 + 2.0**-24) == 1.0  # a tie, to even
    assert f32(1.0 + 3 * 2.0**-24) == 1.0 + 2.0**-22
    assert f16(1.0 + 2.0**-11) == 1.0
    assert f16(65519.0) == 65504.0
    assert math.isnan(f32(math.nan))


def test_an_update_held_back_shows_at_the_next_boundary() -> None:
    model = Model(Setup(mode="delayed", momentum=0.0))
    (own,) = model.optimizers
    for c in (1.0, 1.0):
        before = own.w
        model.micro_batch(is_last=False)
        model.backward([(c,)], [0])
        model.step(0)
        assert own.shown == before != own.w
        own.zero(to_none=True)
    assert model.saved().optimizers[0].shown == own.w


def test_a_failing_history_becomes_short_and_can_be_pasted() -> None:
    setup, ops = draw_history(random.Random(11))

    def fails(setup: Setup, ops: list[Op]) -> bool:
        epochs = [op for op in ops if isinstance(op, Epoch)]
        bad = any(not math.isfinite(v) for op in epochs for row in op.rows for v in row)
        return bad and any(isinstance(op, Save) for op in ops)

    ops = [*ops, Epoch(rows=(*ROWS, (1.0, -INF, 2.0)), batch=2), Save(by_hand=True), Detach()]
    less = shortest(setup, ops, fails)
    assert less == (Setup(), [Epoch(rows=((1.0, -INF, 2.0),)), Save()])
    text = as_test(*less)
    assert text == "play(Setup(), [\n    Epoch(rows=((1.0, -INF, 2.0),)),\n    Save(),\n])"
    names = {"play": lambda *a: a, **{k: v for k, v in globals().items() if k[0].isupper()}}
    assert eval(as_test(setup, ops), names) == (setup, ops)
