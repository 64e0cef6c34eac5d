"""Random histories of asynchronous training beside the same in plain torch, bit for bit.

The worker is the lazy one: it updates a part only when somebody waits for it, so a wait that is
missing shows every time. Losses, scale, learning rates and gradients are compared after each
call; parameters, masters and optimizer state where somebody looks.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from async_looking_support import Looking
from async_pair_support import FAULT, Attached, Raw, lazy_everywhere
from async_twin_support import LAYERS, Setup, Twin
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from references import OPTIMIZERS

from accel_scaler.async_optimizer import replica as replica_module

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # to shrink a failure takes minutes: add Phase.shrink by hand
)

FORWARDS = ("plain", "plain", "plain", "overflow", "unused", "two")
ENDINGS = ("step", "step", "clip", "value", "zeros", "submit", "submit", "torch_loop", "fails")
AFTERS = (
    *("nothing", "nothing", "nothing", "read", "edit", "move", "freeze", "evaluate"),
    *("go_back", "add_group", "scheduler_step", "reopen", "save", "state_dict", "collect"),
    *("copy_all", "go_on_in_a_fresh_pair", "step again", "lr"),
)
ITERATIONS = st.tuples(*map(st.sampled_from, (FORWARDS, ENDINGS, AFTERS)))
"""How gradients come about, what the window ends with, what happens after it."""


class History(Looking):
    """Each rule is one thing that a user may do, on both sides."""

    @initialize(
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        dtypes=st.sampled_from(["float32", "float16", "both"]),
        prompt=st.sampled_from([0, 0, 3]),
        split=st.booleans(),
        parts=st.booleans(),
        saved=st.booleans(),
        calls=st.lists(ITERATIONS, min_size=8, max_size=14),
    )
    def start(
        self,
        kind: str,
        dtypes: str,
        prompt: int,
        split: bool,
        parts: bool,
        saved: bool,
        calls: list[tuple[str, str, str]],
    ) -> None:
        low, full = torch.float16, torch.float32
        setup = Setup(
            self.mode,
            self.offload,
            kind,
            {"float32": (full,) * 3, "float16": (low,) * 3, "both": (low, full, full)}[dtypes],
            prompt,
            split and self.attached,
        )
        type(self).runs += 1
        torch.manual_seed(0)
        replica_module.SMALLEST_PART = 1 if parts else 1 << 19
        FAULT.arm(None)
        self.clips: list[str] = []
        self.saved: Any = None
        self.count = 0
        self.twin, self.ours = Twin(setup), (Attached if self.attached else Raw)(setup)
        self.inner_schedule = prompt == 0
        self.schedule()
        if saved:
            self.save()
        # Hypothesis chooses rules unevenly, few of most kinds; this gives every run a mixture.
        for call in calls:
            self.iteration(call)

    @rule(call=ITERATIONS)
    @precondition(lambda self: not self.clips)
    def iteration(self, call: tuple[str, str, str]) -> None:
        """A window, how it ends, and one more thing after it."""
        forward, ending, after = call
        self.backward(["gain"] if forward == "unused" else LAYERS, forward == "overflow")
        if forward == "two":
            self.backward(LAYERS, overflow=False)
        self.all_is_the_same()
        ready = self.is_open() and self.has_gradients()
        if ending == "clip" and ready:
            self.clip_norm(0.125, 2.0)
        if ending == "value" and ready and self.attached:
            self.clip_value(2.0**-6)
        if ending in ("submit", "torch_loop") and ready and not self.attached:
            getattr(self, ending)(0.125)
        else:
            fails = 2 if ending == "fails" else None
            zeros = ending == "zeros" or after == "step again"
            self.step("zeros" if zeros else "none", fails, "synchronize")
        self.all_is_the_same()
        self.after(after)
        self.all_is_the_same()

    def after(self, name: str) -> None:
        if name == "read":
            self.read(0)
        elif name in ("edit", "move"):
            getattr(self, name)(which=1, how={"edit": "mul", "move": "apply"}[name])
        elif name == "freeze":
            self.freeze(0)
        elif name == "lr":
            self.change_lr(number=1, lr=0.03, inner=True)
        elif name == "step again":
            self.zero_grad("zeros")
            self.step("model none", None, "synchronize")
        elif name == "evaluate":
            self.evaluate(training=True)
        elif name == "go_back" and self.saved is not None:
            self.go_back(model_first=False)
        elif name == "add_group" and len(self.twin.net.extra) < 2:
            self.add_group()
        elif name in ("scheduler_step", "reopen", "save", "state_dict", "collect"):
            getattr(self, name)()
        elif not self.attached and name == "copy_all":
            self.copy_all(stay=False)
        elif not self.attached and name == "go_on_in_a_fresh_pair":
            self.go_on_in_a_fresh_pair()

    @invariant()
    def all_is_the_same(self) -> None:
        """What can be seen without waiting for anything."""
        if self.ours is None:
            return
        assert self.ours.scaler.get_scale() == self.twin.scale
        assert self.ours.scaler.state_dict()["_growth_tracker"] == self.twin.good
        for mine, other in zip(self.ours.optimizers, self.twin.optimizers, strict=True):
            rates = [group["lr"] for group in mine.param_groups]
            assert rates == [group["lr"] for group in other.param_groups]
        for p, q in self.pairs if not self.clips else ():
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert torch.equal(p.grad.nan_to_num(7.0), q.grad.nan_to_num(7.0))  # type: ignore[union-attr]

    def teardown(self) -> None:
        if self.ours is None:
            return
        try:
            if sys.exc_info()[0] is None:  # nothing has failed yet
                self.clips = []
                self.synchronize()
                self.state_dict()
        finally:
            self.ours.close()
            self.ours = None


EVENTS = (
    *("backward", "overflow", "several micro-batches", "clip_norm", "stepped", "skipped"),
    *("failed", "lr", "scheduler", "read", "evaluation", "synchronize", "edit", "move"),
    *("freeze", "add_param_group", "gc", "state_dict", "save", "go back", "reopen"),
    *("zero_grad none", "zero_grad zeros", "zero_grad model none"),
)
OF_ATTACHED = ("clip_value", "refused")
OF_RAW = ("submit", "torch's loop", "fresh pair", "copy")
MODES = [("overlap", "none"), ("overlap", "cpu"), ("delayed", "none"), ("delayed", "cpu")]
EXAMPLES, STEPS, LEAST = 56, 8, 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attached", [False, True], ids=["raw", "attached"])
@pytest.mark.parametrize(("mode", "offload"), MODES)
def test_histories_are_those_of_plain_torch(mode: str, offload: str, attached: bool) -> None:
    class Machine(History):
        seen: ClassVar[Counter[str]] = Counter()

    Machine.mode, Machine.offload, Machine.attached = mode, offload, attached
    with lazy_everywhere():
        run_state_machine_as_test(
            Machine,
            settings=settings(QUIET, max_examples=EXAMPLES, stateful_step_count=STEPS),
        )
    assert Machine.runs >= EXAMPLES
    for event in (*EVENTS, *(OF_ATTACHED if attached else OF_RAW)):
        assert Machine.seen[event] >= LEAST, (event, Machine.seen)


FOUND: dict[str, tuple[list[tuple[str, str, str]], list[tuple[str, dict[str, Any]]]]] = {
    "moved between a load and the next step": (
        [("plain", "step", "save"), ("plain", "step", "go_back")],
        [("move", {"how": "apply", "which": 0}), ("state_dict", {})],
    ),
    "closed while a submitted function is due": ([("plain", "submit", "reopen")], []),
    "evaluated after the very first step": ([("plain", "step", "evaluate")], []),
    "back to where nothing had been stepped": (
        [("plain", "step", "go_back"), ("plain", "step", "nothing")],
        [("state_dict", {})],
    ),
    "a group that no step has seen yet, copied": ([("plain", "step", "add_group")], [("copy", {})]),
    "frozen while the order of the forward is learnt": ([("plain", "step", "freeze")], []),
    "zeroed with set_to_none, then without": (
        [("plain", "step", "nothing")],
        [("zero_grad", {"how": "zeros"})],
    ),
    "a window without gradients after one that was skipped": (
        [("overflow", "step", "nothing")],
        [("step", {"zero": "none", "fails": None, "told": "synchronize"})],
    ),
    "an overflow in torch's own loop": (
        [("plain", "step", "nothing"), ("overflow", "torch_loop", "read")],
        [],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize(("mode", "offload"), MODES)
@pytest.mark.parametrize("attached", [False, True], ids=["raw", "attached"])
@pytest.mark.parametrize("dtypes", ["float32", "float16"])
def test_histories_that_have_shown_a_fault(
    name: str, mode: str, offload: str, attached: bool, dtypes: str
) -> None:
    class Machine(History):
        seen: ClassVar[Counter[str]] = Counter()

    Machine.mode, Machine.offload, Machine.attached = mode, offload, attached
    calls, rest = FOUND[name]
    with lazy_everywhere():
        machine = Machine()
        try:
            machine.start("sgd", dtypes, 0, False, True, name.startswith("back"), calls)
            for method, arguments in rest:
                if method == "copy":
                    machine.after("copy_all")
                else:
                    getattr(machine, method)(**arguments)
                machine.all_is_the_same()
        finally:
            machine.teardown()
