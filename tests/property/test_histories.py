"""Random histories of a training equal a reference that knows nothing of us, bit for bit.

Three kinds: through Accelerate beside a model in plain Python (``history_model.py``), asynchronous
training beside plain torch (``history_twin.py``), calls on our scaler beside torch's.
``HISTORIES=6000 pytest tests/property/test_histories.py`` plays more of each; ``make soak``, for an
hour.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import history_async
import history_play
import history_scaler
import pytest
from histories import INF, NAN, Call, Found, Kind, quiet, run
from history_async import LAYERS
from history_ops import Detach, Epoch, Micro, Op, Restore, Save, Setup, Switch
from history_twin import Setup as Async

from accel_scaler.scaling.update_rule import Rule

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if "HISTORIES" in os.environ else 300),
]

LEAST = 3
"""Each event happens so often: the histories went everywhere."""

ACCELERATE = (
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
    *("zeroed: foreach", "zeroed: views"),
    *("restored", "restored, fresh", "detached", "boundary in stock", "attached again"),
    *(f"to {a} from {b}" for a in ("sync", "overlap", "delayed") for b in ("sync", "overlap")),
    *("to sync from delayed", "to overlap from delayed", "to delayed from delayed"),
    "shown again",
)
ASYNC = (
    *(name for name in history_async.CHOICES if name != "torch_loop"),
    *("overflow", "several micro-batches", "stepped", "skipped", "failed", "refused"),
    *("zeroed: none", "zeroed: zeros", "zeroed: model none", "zeroed: model zeros"),
    *("shown: preview", "shown again", "not late: a first update"),
    *("unfrozen", "clipped in parts", "written past autograd", "sat out", "brought to a new scale"),
)
SCALER = (
    *("scale", "unscale_", "step", "update", "set_scale", "exchange", "iteration", "grew", "fell"),
    *("replace by resume", "replace by pickle", "replace by deepcopy"),
    *(
        "scale_what_is_no_tensor raised ValueError",
        "set_scale_to_a_bad_tensor raised AssertionError",
    ),
    *("unscale_ raised RuntimeError", "unscale_ raised AssertionError"),
    *("step raised RuntimeError", "step raised AssertionError"),
    *("step_with_closure raised RuntimeError", "update raised AssertionError"),
    "replace raised AssertionError",
)
KINDS: dict[str, tuple[Kind, int, tuple[str, ...]]] = {
    "accelerate": (history_play.KIND, 160, ACCELERATE),
    "async": (history_async.KIND, 160, ASYNC),
    "scaler": (history_scaler.KIND, 800, SCALER),
}


@pytest.mark.parametrize("name", KINDS)
def test_random_histories_equal_their_reference(name: str) -> None:
    kind, count, events = KINDS[name]
    seen: Counter[str] = Counter()
    for number in range(int(os.environ.get("HISTORIES", count))):
        run(kind, str(number), seen)
    assert {event: seen[event] for event in events if seen[event] < LEAST} == {}


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_rule_is_found_and_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shortest history that shows it."""
    monkeypatch.setattr(Rule, "advance", lambda self, state, found_inf: state)
    kind = KINDS[name][0]

    def runs() -> None:
        for number in range(20):
            run(kind, str(number), Counter())

    with pytest.raises(Found, match="shortened from") as found:
        runs()
    short, _, long = str(found.value).partition("shortened from")
    assert "play(" in short
    assert short.count("\n    ") < int(long)


# Histories that have shown a fault, and some that can be told.

ROWS = ((5.0, -4.0, 3.0), (1.0, 8.0, 2.0), (3.0, 3.0, 0.0))
TOLD: dict[str, tuple[Setup, list[Op]]] = {
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
    "saved with something shown, loaded into stock, and saved where nothing is": (
        Setup(mode="delayed", stock="kwargs"),
        [
            *(Epoch(rows=ROWS), Save(by_hand=True), Epoch(rows=ROWS), Detach(), Restore()),
            *(Switch(mode="delayed"), Save(by_hand=True)),
            *(Epoch(rows=ROWS), Restore(), Epoch(rows=ROWS)),
        ],
    ),
    "sync, overlap, delayed, stock, and back": (
        Setup(stock="kwargs", telemetry=True, worker="lazy"),
        [
            *(Epoch(rows=ROWS), Switch(mode="overlap"), Epoch(rows=ROWS)),
            *(Switch(mode="delayed", warmup=1), Epoch(rows=ROWS), Detach(), Epoch(rows=ROWS)),
            *(Switch(offload="cpu"), Epoch(rows=ROWS)),
        ],
    ),
}


@pytest.mark.parametrize("compensation", ["none", "preview"])
@pytest.mark.parametrize("name", TOLD)
def test_histories_through_accelerate(name: str, compensation: str) -> None:
    setup, ops = TOLD[name]
    history_play.play(replace(setup, compensation=compensation), ops)


BACKWARD: Call = ("backward", {"used": LAYERS, "bad": False})
SOME: Call = ("backward", {"used": ("outer", "inner"), "bad": False})
OVERFLOW: Call = ("backward", {"used": LAYERS, "bad": True})
STEP: Call = ("step", {"zero": "none", "fails": None, "told": "synchronize"})
STATES: Call = ("state_dict", {})
BACK: Call = ("go_back", {"model_first": False})
SHOWN: dict[str, list[Call]] = {
    "moved between a load and the next step": [
        *(BACKWARD, STEP, ("save", {}), BACKWARD, STEP, BACK),
        *(("move", {"how": "apply", "which": 0}), STATES),
    ],
    "closed while a submitted function is due": [
        *(BACKWARD, ("submit", {"most": 0.125}), ("reopen", {})),
    ],
    "evaluated after the very first step": [
        *(BACKWARD, STEP, ("evaluate", {"training": True, "aside": False})),
    ],
    "back to where nothing had been stepped": [
        *(("save", {}), BACKWARD, STEP, BACK, BACKWARD, STEP, STATES),
    ],
    "frozen while the order of the forward is learnt": [
        *(BACKWARD, STEP, ("freeze", {"part": "gain"})),
    ],
    "frozen for two windows, between them saved and loaded": [
        *(BACKWARD, STEP, ("freeze", {"part": "inner"}), BACKWARD, STEP, ("save", {})),
        *(BACKWARD, STEP, BACK, ("freeze", {"part": "inner"}), BACKWARD, STEP, STATES),
    ],
    "a layer clipped, then all, then the layer again": [
        BACKWARD,
        ("clip_norm", {"most": 0.01, "kind": 2.0, "parts": ("inner", "", "inner")}),
        *(STEP, BACKWARD, STEP, STATES),
    ],
    "one memory of two": [("tie", {"which": 0}), BACKWARD, STEP, BACKWARD, STEP, STATES],
    "written through .data after a step": [
        *(BACKWARD, STEP, ("edit", {"which": 1, "how": "data zero"}), BACKWARD, STEP, STATES),
    ],
    "written through .data where there was no gradient": [
        *(BACKWARD, STEP, SOME, STEP, ("edit", {"which": 0, "how": "data clamp"})),
        *(BACKWARD, STEP, BACKWARD, STEP, STATES),
    ],
    "zeroed with set_to_none, then without": [BACKWARD, STEP, ("zero_grad", {"how": "zeros"})],
    "a window without gradients after one that was skipped": [OVERFLOW, STEP, STEP],
    "an overflow in torch's own loop": [
        *(BACKWARD, STEP, OVERFLOW, ("torch_loop", {"most": 0.125})),
        ("read", {"which": 0, "aside": False}),
    ],
    "a first update of some parameters, behind one that is late": [
        *(SOME, STEP, SOME, STEP, BACKWARD, STEP, BACKWARD),
    ],
    "saved with something shown, a model loaded after its optimizer": [
        *(BACKWARD, STEP, BACKWARD, STEP, ("save", {}), BACKWARD, STEP, BACK, BACKWARD, STEP),
    ],
    "a function beside a frozen parameter, saved": [
        *(("freeze", {"part": "inner.weight"}), BACKWARD, ("submit", {"most": 0.125}), STATES),
    ],
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_an_overflow_after_another_optimizers_update_is_not_run_again(
    optimizer: str, offload: str
) -> None:
    """Its parameters were read, so that what was shown of them was lost."""
    setup = Async(
        mode="delayed",
        offload=offload,
        attached=True,
        optimizer=optimizer,
        dtype="float16",
        compensation="preview",
        two=True,
        finds=True,
    )
    bad: Call = ("backward", {"used": ("gain",), "bad": True})
    with quiet():
        history_async.play(setup, [BACKWARD, STEP, bad, BACKWARD, STEP])
        history_async.play(setup, [BACKWARD, STEP, bad, BACKWARD, STEP, BACKWARD, STEP])


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("attached", [False, True], ids=["raw", "attached"])
def test_asynchronous_histories_that_have_shown_a_fault(
    name: str, mode: str, attached: bool
) -> None:
    with quiet():
        for offload in ("none", "cpu"):
            for dtype in ("float32", "float16"):
                setup = Async(mode=mode, offload=offload, attached=attached, dtype=dtype)
                history_async.play(setup, SHOWN[name])
                if mode == "delayed":
                    history_async.play(replace(setup, compensation="preview"), SHOWN[name])
