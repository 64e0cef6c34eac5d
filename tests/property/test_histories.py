"""Random histories of a training equal a reference that knows nothing of us, bit for bit.

Two kinds: training through an accelerator or an ``AsyncOptimizer`` beside a loop in plain torch
(``history_operations.py``), and calls on our scaler beside torch's (``history_scaler.py``).
``HISTORIES=6000 pytest tests/property/test_histories.py`` plays more of each; ``make soak``, for an
hour.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import history_operations
import history_scaler
import pytest
from histories import INF, Call, Found, Kind, quiet, run
from history_operations import CHOICES, IN_PLACE, MODES, play, possible
from history_reference import LAYERS, Setup

from accel_scaler.scaling.update_rule import Rule

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if "HISTORIES" in os.environ else 300),
]

LEAST = 3
"""Each event happens so often: the histories went everywhere."""

TRAINING = (
    *(name for name in CHOICES if name != "change_thread"),
    *("overflow", "several micro-batches", "stepped", "skipped", "failed", "growth"),
    *(f"zeroed: {how}" for how in ("none", "zeros", "model none", "model zeros", *IN_PLACE)),
    *("records in a file", "unfrozen", "clipped in parts", "written past autograd", "sat out"),
    *("brought to a new scale", "submitted", "backward in a thread", "to sync", "to overlap"),
    *("loaded by Accelerate", "saved inside a window", "attached", "raw"),
    *("precision fp16", "precision bf16", "precision no", "bfloat16 in place"),
    *("spike", "stepped on NaN", "run again", "not run again", "run again in vain"),
)
SCALER = (
    *("scale", "unscale_", "step", "update", "set_scale", "exchange", "iteration", "grew", "fell"),
    *("replace by resume", "replace by pickle", "replace by deepcopy"),
    *("unscale_ raised RuntimeError", "unscale_ raised AssertionError"),
    *("step raised RuntimeError", "step raised AssertionError"),
    *("step_with_closure raised RuntimeError", "update raised AssertionError"),
    "replace raised AssertionError",
)
KINDS: dict[str, tuple[Kind, int, tuple[str, ...]]] = {
    "training": (history_operations.KIND, 160, TRAINING),
    "scaler": (history_scaler.KIND, 400, SCALER),
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


# Histories that have shown a fault.

BACKWARD: Call = ("backward", {"used": LAYERS, "bad": False})
SOME: Call = ("backward", {"used": ("outer", "inner"), "bad": False})
OVERFLOW: Call = ("backward", {"used": LAYERS, "bad": True})
STEP: Call = ("step", {"zero": "none", "fails": None, "read_by": "synchronize"})
SUBMIT: Call = ("by_hand", {"limit": 0.125, "submitted": True})
STATES: Call = ("state_dict", {})
BACK: Call = ("go_back", {"model_first": False})
CLIP: Call = ("clip_norm", {"limit": 0.125, "kind": 2.0})
UNSCALED: dict[str, Any] = {"precision": "bf16", "masters": "fp32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "a spike that was clipped": {"limit": 0.5},
    "a spike before an overflow": {"limit": 0.5, "hysteresis": 2},
    "trained in stock after a spike": {**UNSCALED, "limit": 0.5, "stock": True},
    "clipped and given up": UNSCALED,
    "state emptied after the first update": {"optimizer": "fused adamw"},
    "state dropped after the first update": {"optimizer": "fused adamw"},
    "moved, where a kernel is called for the model's own memory": {"optimizer": "fused adamw"},
    "saved with masters, some never stepped, loaded in place": {
        **{"precision": "bf16", "dtype": "bfloat16", "optimizer": "adamw"}
    },
    "clipped in parts, for masters": UNSCALED,
    "the same gradients stepped twice": UNSCALED,
    "one optimizer sits out before a backward by hand, clipped": {**UNSCALED, "two": True},
    "all clipped, then one optimizer, beside another one's NaN": {**UNSCALED, "two": True},
}
"""Of these histories."""
SHOWN: dict[str, list[Call]] = {
    "moved between a load and the next step": [
        *(BACKWARD, STEP, ("save", {}), BACKWARD, STEP, BACK),
        *(("move", {"how": "apply", "which": 0}), STATES),
    ],
    "closed while a submitted function is due": [
        *(BACKWARD, SUBMIT, ("reopen", {"mode": "overlap"}))
    ],
    "evaluated after the very first step": [*(BACKWARD, STEP, ("evaluate", {"training": True}))],
    "back to where nothing had been stepped": [
        *(("save", {}), BACKWARD, STEP, BACK, BACKWARD, STEP, STATES)
    ],
    "frozen while the order of the forward is learnt": [
        *(BACKWARD, STEP, ("freeze", {"part": "gain"}))
    ],
    "frozen for two windows, between them saved and loaded": [
        *(BACKWARD, STEP, ("freeze", {"part": "inner"}), BACKWARD, STEP, ("save", {})),
        *(BACKWARD, STEP, BACK, ("freeze", {"part": "inner"}), BACKWARD, STEP, STATES),
    ],
    "a layer clipped, then all, then the layer again": [
        BACKWARD,
        ("clip_norm", {"limit": 0.01, "kind": 2.0, "parts": ("inner", "", "inner")}),
        *(STEP, BACKWARD, STEP, STATES),
    ],
    "written through .data after a step": [
        *(BACKWARD, STEP, ("edit", {"which": 1, "how": "data zero"}), BACKWARD, STEP, STATES)
    ],
    "written through .data where there was no gradient": [
        *(BACKWARD, STEP, SOME, STEP, ("edit", {"which": 0, "how": "data clamp"})),
        *(BACKWARD, STEP, BACKWARD, STEP, STATES),
    ],
    "zeroed with set_to_none, then without": [BACKWARD, STEP, ("zero_grad", {"how": "zeros"})],
    "a window without gradients after one that was skipped": [OVERFLOW, STEP, STEP],
    "one parameter overflows, and all are unscaled": [
        *(("backward", {"used": ("gain",), "bad": True}), BACKWARD),
        ("unscale", {"how": "accelerator"}),
    ],
    "an overflow in torch's own loop": [
        *(BACKWARD, STEP, OVERFLOW, ("by_hand", {"limit": 0.125, "submitted": False})),
        ("read", {"which": 0, "how": "an operation"}),
    ],
    "saved, a model loaded after its optimizer": [
        *(BACKWARD, STEP, BACKWARD, STEP, ("save", {}), BACKWARD, STEP, BACK, BACKWARD, STEP)
    ],
    "loaded, written through .data and saved": [
        *(BACKWARD, STEP, ("save", {}), BACK, ("edit", {"which": 1, "how": "data clamp"}), STATES)
    ],
    "state replaced after the first update": [
        *(BACKWARD, STEP, ("replace_state", {"how": "doubled"}), BACKWARD, STEP, BACKWARD),
    ],
    "state emptied after the first update": [
        *(BACKWARD, STEP, ("replace_state", {"how": "emptied"}), BACKWARD, STEP, STATES),
    ],
    "state dropped after the first update": [
        *(BACKWARD, STEP, ("replace_state", {"how": "dropped"}), BACKWARD, STEP, STATES),
    ],
    "moved, where a kernel is called for the model's own memory": [
        *(BACKWARD, STEP, BACKWARD, STEP, ("move", {"which": 0, "how": "one"})),
        *(BACKWARD, STEP, STATES),
    ],
    "saved with masters, some never stepped, loaded in place": [
        *(SOME, STEP, ("save", {}), ("reopen", {"mode": "sync"}), BACK, BACKWARD, STEP, STATES)
    ],
    "a spike that was clipped": [BACKWARD, ("clip_value", {"limit": 2.0**-5}), STEP, STATES],
    "a spike before an overflow": [BACKWARD, STEP, OVERFLOW, STEP],
    "trained in stock after a spike": [
        *(BACKWARD, STEP, ("train_in_stock", {"steps": 3, "bad": False}))
    ],
    "clipped and given up": [
        *(BACKWARD, CLIP, ("drop", {"to_none": False, "used": LAYERS}), STEP, STATES)
    ],
    "clipped in parts, for masters": [
        *(BACKWARD, ("clip_norm", {"limit": 0.125, "kind": INF, "parts": ("inner", "outer")})),
        *(STEP, STATES),
    ],
    "the same gradients stepped twice": [
        *(BACKWARD, ("step", STEP[1] | {"zero": "nothing"}), STEP, STATES)
    ],
    "one optimizer sits out before a backward by hand, clipped": [
        *(BACKWARD, ("step", STEP[1] | {"sits_out": 0})),
        *(("backward", BACKWARD[1] | {"plain": True}), CLIP, STEP, STATES),
    ],
    "all clipped, then one optimizer, beside another one's NaN": [
        *(("backward", {"used": ("gain",), "bad": True}), BACKWARD),
        *(("clip_norm", CLIP[1] | {"parts": ("", "outer")}), STEP, STATES),
    ],
    "a function beside a frozen parameter, saved": [
        *(("freeze", {"part": "inner.weight"}), BACKWARD, SUBMIT, STATES)
    ],
    "a new group, then a window without gradients": [
        *(BACKWARD, STEP, ("add_group", {}), STEP, BACKWARD, STEP, STATES)
    ],
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attached", [False, True], ids=["raw", "attached"])
def test_histories_that_have_shown_a_fault(name: str, mode: str, attached: bool) -> None:
    with quiet():
        for dtype in ("float32", "float16"):
            given: Any = {"mode": mode, "attached": attached, "dtype": dtype}
            play(possible(Setup(**{**given, **SETTINGS.get(name, {})})), SHOWN[name])
