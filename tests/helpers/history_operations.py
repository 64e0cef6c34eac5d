"""The operations of the random histories, each done to the package and to plain torch.

On a CPU the worker is the lazy one: it starts a part only when somebody waits for it, so a missing
wait shows every time. Losses, scale, learning rates, gradients and telemetry are compared after
each call; parameters, masters and optimizer state where an operation reads them. On a device
everything is noted without a wait, and compared with the CPU's numbers at the end.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import on
from async_support import one_part_each
from histories import INF, Call, Kind, drawn
from history_package import FAULT, Attached, Raw, lazy_worker
from history_reference import (
    DTYPES,
    FIRST,
    LAYERS,
    LOW,
    NORMS,
    OPTIMIZERS,
    PlainTorch,
    Setup,
    Window,
    double_averages,
)
from references import DECAY
from support import same
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiplicativeLR

from accel_scaler import StepError
from accel_scaler.optimizer_step import blocks as blocks_module
from accel_scaler.optimizer_step import replica as replica_module
from accel_scaler.optimizer_step import spikes

WHOLE = ("",)
EACH = ("gain", "inner.weight", "inner.bias", "outer.weight", "outer.bias")
APART = (("outer",), ("inner", "outer"), EACH)
PARTS = (*APART, ("outer", "outer"), ("inner", "inner.bias"), ("", "outer"))
"""Parameters that are clipped one set after the other, by the beginnings of their names."""
EDITS: dict[str, Callable[[Tensor], object]] = {
    "mul": lambda p: p.mul_(0.75),
    "add": lambda p: p.add_(2.0**-12),
    "copy": lambda p: p.copy_(torch.full_like(p, 0.3)),
    "element": lambda p: p.view(-1)[0].fill_(0.1),
    "data clamp": lambda p: p.data.clamp_(-0.25, 0.25),
    "data copy": lambda p: p.data.copy_(torch.full_like(p.data, 0.3)),
    "data zero": lambda p: p.data.zero_(),
    "data every other": lambda p: p.data.view(-1)[::2].mul_(0.75),
}
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "an operation": lambda p: p + 0,
    "detached": lambda p: p.detach().clone(),
    "in an average": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.25),
}
LIMIT_S = 60.0
WITHIN = ("off_boundary", "read", "state_dict", "evaluate", "edit_gradient")
HARMLESS = (*WITHIN, "backward", "unscale", "clip_norm", "clip_value", "drop", "step")
"""In a window that may be made again; others change what it is made of."""
IN_PLACE = ("by hand", "data", "foreach", "views")
"""Ways to zero gradients past the optimizer and the model."""
MODES = ("sync", "overlap")

CHOICES: dict[str, dict[str, Sequence[Any]]] = {}
"""For each operation what its arguments may be."""


def operation(**choices: Sequence[Any]) -> Callable[[Any], Any]:
    """Register a method of :class:`Player`; it returns False where it means nothing."""

    def register(method: Any) -> Any:
        CHOICES[method.__name__] = choices
        return method

    return register


class Player:
    """Plays operations on ``ours``, the package's side, and on ``plain``, the reference."""

    def __init__(self, setup: Setup, seen: Counter[str], device: str, folder: Path) -> None:
        self.seen, self.device, self.folder = seen, device, folder
        self.attached = setup.attached
        self.clips: list[str] = []
        self.blown = False
        """A gradient of this window has overflowed, and would not if it were made again."""
        self.spoilt, self.versions = False, list[int]()
        """The window cannot be made again."""
        self.saved: Any = None
        self.is_regrouped = False
        self.count = 0
        self.noted: list[tuple[str, Any, Any]] = []
        self.plain = PlainTorch(setup)
        self.file = folder / "run.jsonl" if setup.telemetry else None
        make: Any = Attached if setup.attached else Raw
        self.ours: Any = make(setup, device, self.file and str(self.file))
        self.start_over()

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        if self.setup.retry and self.is_open and name not in HARMLESS:
            return
        if not self.is_open:
            self.ours.net.again = "same"
        if getattr(self, name)(**arguments) is not False:
            self.seen[name] += 1
        self.compare()

    # What both sides share.

    def same(self, what: str, mine: Any, other: Any) -> None:
        """Equal now; on a device at the end, without a wait."""
        if self.device == "cpu":
            assert same(mine, other), f"{what}: got {mine}, expected {other}"
        else:
            copied = [x.detach().clone() if isinstance(x, Tensor) else x for x in (mine, other)]
            self.noted.append((what, *copied))

    def compare(self) -> None:
        """Everything that can be read without waiting for an update."""
        self.same("the scale", self.ours.scaler.get_scale(), self.plain.scale)
        if self.device == "cpu":
            self.same("the growth tracker", self.ours.growth_tracker, self.plain.good)
        for mine, other in zip(self.ours.optimizers, self.plain.optimizers, strict=True):
            rates = [[group["lr"] for group in each.param_groups] for each in (mine, other)]
            self.same("lr", *rates)
        if self.attached:
            self.compare_records()
        self.compare_gradients()

    def compare_gradients(self) -> None:
        for p, q in () if self.clips else self.pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                self.same("a gradient", p.grad.nan_to_num(7.0), q.grad.nan_to_num(7.0))

    def compare_records(self) -> None:
        records = list(self.ours.accelerator.scaler_history.records)
        expected = self.plain.windows[self.first_window :]
        self.same("the number of records", len(records), len(expected))
        for record, window in zip(records[-1:], expected[-1:], strict=True):
            self.seen["growth"] += window.next_scale > window.scale
            norm = None if window.norm is None else record.grad_norm
            scales, lr = (record.scale, record.next_scale), list(record.lr)
            found = Window(*scales, record.skipped, lr, norm, record.spike)
            assert found == window, f"a record: got {found}, expected {window}"

    @property
    def setup(self) -> Setup:
        return self.plain.setup

    @property
    def low(self) -> bool:
        """Some gradients stay as they are, for float32 masters."""
        return not (set(LOW).isdisjoint(self.setup.dtypes) or self.setup.in_place)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.ours.net.parameters(), self.plain.net.parameters(), strict=True))

    @property
    def numbers(self) -> range:
        return range(len(self.plain.owned))

    @property
    def is_open(self) -> bool:
        return self.plain.opened and not self.plain.stepped

    @property
    def may_end(self) -> bool:
        return self.is_open and any(p.grad is not None for p in self.plain.net.parameters())

    @property
    def between(self) -> bool:
        return not self.is_open and not self.clips

    def start_over(self) -> None:
        """From here on this thread trains, other optimizer wrappers, other records."""
        self.plain.usual, self.plain.joined = [[] for _ in self.numbers], set()
        self.first_window = len(self.plain.windows)
        self.schedule()

    def schedule(self) -> None:
        self.schedules = [
            MultiplicativeLR(o.optimizer if self.setup.inner_schedule else o, lambda _: DECAY)
            for o in self.ours.optimizers
        ]

    def chosen(self, part: str) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs whose names begin with ``part``, in the order of the optimizers."""
        named = zip(self.pairs, self.plain.net.named_parameters(), strict=True)
        found = {q: (p, q) for (p, q), (name, _) in named if name.startswith(part)}
        return [found[q] for own in self.plain.owned for q in own if q in found]

    def synchronized(self) -> None:
        for optimizer in self.ours.optimizers:
            optimizer.synchronize()

    def losses(self, used: Sequence[str], penalised: bool = False) -> tuple[Tensor, Tensor]:
        """The same autocast for both; an attached one has its own within."""
        dtype = torch.float16 if self.setup.scaled else torch.bfloat16
        enabled = self.attached and self.setup.precision != "no"
        with torch.autocast(torch.device(self.device).type, dtype, enabled=enabled):
            mine = self.ours.net.loss(self.count, used, penalised)
        with torch.autocast("cpu", dtype, enabled=enabled):
            other = self.plain.net.loss(self.count, used, penalised)
        self.same("the loss", mine, other)
        return mine, other

    # A window.

    @operation(
        used=[LAYERS] * 4 + [("gain",), ("outer", "inner")],
        bad=[False] * 5 + [True],
        plain=(False, False, True),
        thread=[False] * 5 + [True],
        blows=(False, True),
        again=["same"] * 4 + ["other", "raise"],
        penalised=[False] * 5 + [True],
    )
    def backward(
        self,
        used: Sequence[str],
        bad: bool,
        plain: bool = False,
        thread: bool = False,
        blows: bool = False,
        again: str = "same",
        penalised: bool = False,
    ) -> Any:
        """``plain``: ``scaler.scale(loss).backward()``; ``thread``: on a thread of its own;
        ``blows``: a gradient overflows, unless its backward runs again; ``again`` and
        ``penalised``: see ``Net``."""
        if self.clips:
            return False
        net, is_first = self.ours.net, not self.is_open
        again = again if net.again == "same" else net.again
        if is_first:
            grads = [p.grad for p in self.plain.net.parameters()]
            self.spoilt = any(g is not None and bool(g.count_nonzero()) for g in grads)
            self.versions = [p._version for p in self.ours.net.parameters()]
            self.blown = False
        self.count += 1
        aside = thread and self.attached and self.device == "cpu"

        def run() -> bool:
            net.again = "same"
            mine, other = self.losses(used, penalised and not self.setup.retry)
            net.again = again
            if not other.requires_grad:
                return False
            if blows and self.setup.retry and not self.blown:
                self.blow(used)
            self.ours.backward(mine * (INF if bad else 1.0), plain)
            self.plain.backward(other * (INF if bad else 1.0), self.attached and not plain)
            return True

        ran = in_thread(run) if aside else run()
        self.spoilt |= ran and (plain or bad)
        self.seen["overflow"] += bad and ran
        self.seen["several micro-batches"] += ran and not is_first
        self.seen["backward in a thread"] += aside and ran
        return ran

    def blow(self, used: Sequence[str]) -> None:
        trained = (pair for name in used for pair in self.chosen(name) if pair[1].requires_grad)
        for each in next(trained, ()):
            each.register_hook(partial(overflow_once, itertools.count()))
            self.blown = True

    def settle(self, number: int | None = None) -> None:
        """A boundary is about to see what has overflowed; ``number``: of this optimizer alone."""
        if not self.setup.retry or not self.is_open:
            return
        seen = [q for _, q in self.pairs] if number is None else self.plain.owned[number]
        self.spoilt |= self.versions != [p._version for p in self.ours.net.parameters()]
        self.spoilt |= bool(self.plain.stepped)
        while any(q.grad is not None and not q.grad.isfinite().all() for q in seen):
            self.seen["run again"] += not self.spoilt
            self.seen["not run again"] += self.spoilt
            if self.spoilt or not self.plain.may_retry():
                break
            if self.ours.net.again != "same":
                self.seen["run again in vain"] += 1
                self.spoilt = True  # given up: as any overflow
                for q in (q for _, q in self.pairs if q.grad is not None):
                    q.grad.fill_(INF)
                break
            self.plain.retry()

    @operation(limit=(0.125, 0.01))
    def off_boundary(self, limit: float) -> Any:
        """Accelerate accumulates: clip, step and zero_grad do nothing yet; where nothing is scaled
        a clip clips, as stock's."""
        if not self.attached or not self.is_open or self.clips:
            return False
        accelerator, net = self.ours.accelerator, self.plain.net
        grads = {p: g for n in self.numbers for p, g in self.plain.unscaled(n).items()}
        total = torch.nn.utils.get_total_norm([grads[p] for p in net.parameters() if p in grads])
        if not self.setup.scaled:
            total = torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
        accelerator.sync_gradients = False
        try:
            norm = accelerator.clip_grad_norm_(self.ours.net.parameters(), limit)
            if all(bool(g.isfinite().all()) for g in grads.values()) and self.device == "cpu":
                assert float(norm) == pytest.approx(float(total), rel=1e-6)
            for optimizer in self.ours.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        finally:
            accelerator.sync_gradients = True

    @operation(which=range(8), how=("in place", "data", "replaced", "dropped"))
    def edit_gradient(self, which: int, how: str) -> Any:
        p, q = self.pairs[which % len(self.pairs)]
        if not self.is_open or self.clips or q.grad is None:
            return False
        if self.setup.retry and how in ("data", "dropped"):
            return False
        self.spoilt = True
        for each in (p, q):
            assert each.grad is not None
            if how == "in place":
                each.grad[:1] = 0.0
            elif how == "data":
                each.grad.data[:1] = 0.0
            else:
                each.grad = each.grad * 0.5 if how == "replaced" else None

    @operation(how=("accelerator", "inner", "wrapped"))
    def unscale(self, how: str) -> Any:
        """By hand, before a clip or none."""
        if not self.may_end or self.clips or self.low:
            return False
        self.spoilt |= how != "accelerator"
        self.settle()
        for number in self.numbers:
            if all(p.grad is None for p in self.plain.owned[number]):
                continue
            self.ours.unscale(number, how)
            self.plain.unscale(number, self.attached and how == "accelerator")
        for p, q in self.pairs:
            if q in self.plain.final and p.grad is not None:
                expected = self.plain.final[q].nan_to_num(7.0)
                self.same("an unscaled gradient", p.grad.nan_to_num(7.0), expected)
        self.clips.append("unscaled")

    @operation(limit=(0.125, 0.01, 100.0), kind=(2.0, 2.0, INF), parts=(*[WHOLE] * 6, *PARTS))
    def clip_norm(self, limit: float, kind: float, parts: Sequence[str] = WHOLE) -> Any:
        """Clip each of ``parts`` in turn.

        A gradient with a master is multiplied once, by the product of all coefficients. So that
        nothing is rounded, all of these are powers of two from the second clip on.
        """
        if not self.may_end:
            return False
        again = self.clips or parts != WHOLE
        if self.low and self.clips:
            return False
        if any(q.grad is not None for part in parts for _, q in self.chosen(part)):
            self.settle()  # else nothing is looked at
        is_exact = self.low and parts not in (WHOLE, *APART)

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(masters, limit, kind)

        for part in parts:
            mine, order = (list(each) for each in zip(*self.chosen(part), strict=True))
            if not (part or self.clips):
                own = self.plain.net.parameters() if self.attached else self.plain.owned[0]
                mine, order = None, list(own)
            if is_exact:
                limit = self.plain.exact_limit(order, kind)
            norm, other = self.ours.clip_norm(limit, kind, mine), self.plain.clip(order, clip, kind)
            if self.plain.refuse(order, other):
                other = torch.tensor(INF)
            self.same("the norm", norm, other)
            if mine is None and kind == 2.0 and math.isfinite(other) and self.device == "cpu":
                self.plain.norm = float(other)
            self.clips.append("exact" if is_exact else "rounded")
        self.plain.norm = self.plain.norm if parts == WHOLE and not again else None
        self.seen["clipped in parts"] += parts != WHOLE

    @operation(limit=(2.0**-5, 2.0**-9, 8.0))
    def clip_value(self, limit: float) -> Any:
        if not (self.attached and self.may_end):
            return False
        if self.low and not {"exact", "rounded"}.isdisjoint(self.clips):
            return False
        self.settle()

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_value_(masters, limit)

        self.ours.accelerator.clip_grad_value_(self.ours.net.parameters(), limit)
        for own in self.plain.owned:
            if any(p.grad is not None for p in own):
                self.plain.clip(own, clip)
        self.clips.append("value")

    @operation(to_none=(False, True), used=(LAYERS, ("outer",), ("inner", "gain")))
    def drop(self, to_none: bool, used: Sequence[str]) -> Any:
        """Give up gradients that were unscaled or clipped, and make them again."""
        trained = [name for name in used for _, q in self.chosen(name) if q.requires_grad]
        if not self.clips or not self.is_open or not trained:
            return False
        for number in self.numbers:
            self.ours.inners[number].zero_grad(set_to_none=to_none)
            self.plain.zero_grad(number, to_none)
        self.plain.final, self.plain.norm, self.clips = {}, None, []
        self.plain.refused.clear()
        self.plain.losses.clear()
        self.blown = False
        self.spoilt |= not to_none
        return self.backward(used, bad=False)

    @operation(
        zero=("none", "none", "none", "zeros", "model none", "model zeros", "nothing", *IN_PLACE),
        fails=(None,) * 5 + (0, 1, 3),
        read_by=("synchronize", "state_dict", "evaluation"),
        sits_out=(None, 0, 1),
    )
    def step(self, zero: str, fails: int | None, read_by: str, sits_out: int | None = None) -> None:
        """``sits_out``: this optimizer keeps its gradients, if another one steps.

        ``fails``: the part that fails; ``read_by``: who waits for the step then.
        """
        skipped = False
        stepping = [n for n in self.numbers if n != sits_out or self.clips or not self.setup.two]
        may_fail = self.device == "cpu" and self.setup.mode != "sync"
        fails = fails if may_fail else None
        if fails is not None:
            self.synchronized()  # the fault is for this step
        if fails is not None or (self.low and self.clips not in ([], ["rounded"])):
            zero = "none"  # what is left is lost, or scaled and clipped
        # Only then: gradients whose memory others have are copied before the step.
        watched = self.pairs if zero == "views" else []
        views = [p.grad.detach() for p, _ in watched if p.grad is not None]
        for number in stepping:
            optimizer = self.ours.optimizers[number]
            grads = [p.grad for p in self.plain.owned[number] if p.grad is not None]
            is_illegal = (
                number in self.plain.stepped
                if self.plain.opened
                else any(bool(g.count_nonzero()) for g in grads)
            )
            if grads and is_illegal and self.setup.scaled:
                continue
            self.settle(number)
            FAULT.arm(fails)
            optimizer.step()
            done = self.failure(number, read_by) if fails is not None else None
            FAULT.arm(None)
            stepped = self.plain.step(number, fails=done)
            if fails is not None:
                self.synchronized()
                if read_by == "state_dict" and done is None:
                    self.plain.refresh(number)
            self.same("whether it stepped", not optimizer.step_was_skipped, stepped)
            skipped = skipped or not stepped
            self.seen["skipped"] += not stepped
            self.seen["stepped"] += bool(stepped and grads)
        self.clips = []
        self.plain.losses.clear()
        for number in set(self.numbers) - set(stepping):
            zero = zero.removeprefix("model ") if zero not in IN_PLACE else "zeros"
            self.seen["sat out"] += any(p.grad is not None for p in self.plain.owned[number])
        if views and not skipped:
            self.compare_gradients()
        self.zero_grad(zero, stepping, views)
        if skipped and (self.setup.two or zero == "nothing"):
            self.zero_grad("none", stepping)  # they are scaled still, and would be refused

    def failure(self, number: int, read_by: str) -> set[Tensor] | None:
        """Wait for a step that may fail; the parameters that it has updated all the same."""
        optimizer = self.ours.optimizers[number]
        try:
            if read_by == "synchronize":
                optimizer.synchronize()
            elif read_by == "state_dict":
                optimizer.state_dict()
            else:
                with torch.no_grad():
                    self.ours.net.loss(0, LAYERS)
        except StepError:
            self.seen["failed"] += 1
            mine = {id(p) for p in FAULT.done}
            return {q for p, q in self.pairs if id(p) in mine}
        return None

    @operation(how=("none", "zeros", "model none", "model zeros", *IN_PLACE))
    def zero_grad(
        self, how: str, numbers: Sequence[int] | None = None, views: Sequence[Tensor] = ()
    ) -> Any:
        """``views``: the gradients, taken before the step, so that nothing waits for a write."""
        to_none = how.endswith("none")
        if self.clips:
            return False
        grads = [p.grad for p, _ in self.pairs if p.grad is not None]
        if how.startswith("model"):
            self.ours.net.zero_grad(set_to_none=to_none)
        elif how in ("by hand", "views"):
            for grad in views if how == "views" and views else grads:
                grad.zero_()
        elif how == "data":
            for grad in grads:
                grad.data.zero_()
        elif how == "foreach" and grads:
            torch._foreach_zero_(grads)
        if how.startswith("model") or how in IN_PLACE:
            self.plain.net.zero_grad(set_to_none=to_none)
        elif how != "nothing":
            for number in self.numbers if numbers is None else numbers:
                self.ours.optimizers[number].zero_grad(set_to_none=to_none)
                self.plain.zero_grad(number, to_none)
        self.seen[f"zeroed: {how}"] += 1

    @operation(limit=(None, 0.125, 0.01), submitted=(False, True))
    def by_hand(self, limit: float | None, submitted: bool) -> Any:
        """``scaler.unscale_``, torch's clip and ``scaler.step``, here or given to ``submit()``."""
        if self.attached or not self.may_end or self.clips or (self.low and not submitted):
            return False
        if submitted and self.setup.offload == "cpu" and self.device != "cpu":
            return False  # which is refused
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, limit or 0.0)

        def update() -> None:
            if limit is not None:
                scaler.unscale_(optimizer)
                clip([p for group in optimizer.param_groups for p in group["params"]])
            scaler.step(optimizer)

        if limit is not None:
            self.plain.clip(self.plain.owned[0], clip, submitted=True)
        if submitted:
            optimizer.submit(update)
        else:
            update()
        scaler.update()
        stepped = self.plain.step(0, submitted=submitted)
        self.plain.end_window()
        self.seen["submitted"] += submitted
        if not submitted:
            self.same("whether it stepped", not optimizer.step_was_skipped, stepped)
            self.zero_grad("none")

    @operation(number=range(6), lr=(0.03, 0.01, 0.05), inner=(False, True))
    def change_lr(self, number: int, lr: float, inner: bool) -> None:
        optimizer = self.ours.optimizers[number % len(self.numbers)]
        theirs = self.plain.optimizers[number % len(self.numbers)].param_groups
        groups = (optimizer.optimizer if inner else optimizer).param_groups
        for each in (groups, theirs):
            each[number % len(groups)]["lr"] = lr

    @operation()
    def scheduler_step(self) -> None:
        """Accelerate's: it does not move after a skipped step."""
        for number, schedule in enumerate(self.schedules):
            schedule.step()
            for group in self.plain.optimizers[number].param_groups:
                group["lr"] *= DECAY

    # Reads, and changes from outside.

    @operation(which=range(8), how=tuple(READS))
    def read(self, which: int, how: str) -> None:
        p, q = self.pairs[which % len(self.pairs)]
        self.same("what is read", READS[how](p), READS[how](q))

    @operation(training=(False, True))
    def evaluate(self, training: bool) -> None:
        self.count += 1
        self.ours.net.train(training)
        with torch.no_grad():
            self.losses(LAYERS)
        self.ours.net.train()

    @operation(which=range(8))
    def peek(self, which: int) -> Any:
        """On another thread, while an update may be due."""
        ours, p, q = self.ours, *self.pairs[which % len(self.pairs)]
        if self.device != "cpu":
            return False
        found = in_thread(lambda: (ours.scaler.get_scale(), ours.growth_tracker, p + 0))
        self.same("what another thread sees", found, (self.plain.scale, self.plain.good, q + 0))

    @operation()
    def synchronize(self) -> None:
        self.synchronized()
        for p, q in self.pairs:
            self.same("a parameter", p, q)

    @operation(which=range(8), how=tuple(EDITS))
    def edit(self, which: int, how: str) -> Any:
        for p in self.pairs[which % len(self.pairs)]:
            with torch.no_grad():
                EDITS[how](p)
        self.seen["written past autograd"] += how.startswith("data")

    @operation(how=("doubled", "emptied", "dropped"))
    def replace_state(self, how: str) -> Any:
        """Put other entries with other tensors into the optimizers' state, as averaging does, or
        empty its entries, or drop them."""
        if self.low or self.device != "cpu":
            return False
        self.synchronized()
        if how == "dropped":
            for number in self.numbers:
                self.plain.optimizers[number].state.clear()
                self.ours.optimizers[number].state.clear()
            return None
        change = double_averages if how == "doubled" else dict.clear
        for number in self.numbers:
            self.plain.replace_state(number, change)
            for p in self.ours.net.parameters():
                state = self.ours.optimizers[number].state
                if p in state:
                    state[p] = dict(state[p]) if how == "doubled" else state[p]
                    change(state[p])

    @operation(which=range(8), how=("one", "apply"))
    def move(self, which: int, how: str) -> Any:
        if self.clips:
            return False  # gradients are moved too, and some are scaled still
        if how == "apply":
            self.ours.net._apply(torch.clone)
        else:
            p, _ = self.pairs[which % len(self.pairs)]
            p.data = p.data.clone()

    @operation(part=(*LAYERS, "inner.bias", "outer.weight", ""), how=("toggle", "alone"))
    def freeze(self, part: str, how: str = "toggle") -> Any:
        """Freeze and unfreeze ``part``; ``alone``: freeze everything else."""
        if self.clips:
            return False
        self.zero_grad("none")  # torch steps what has a gradient, frozen or not
        inside = {q for _, q in self.chosen(part)}
        for p, q in self.pairs:
            trained = q in inside if how == "alone" else q.requires_grad != (q in inside)
            self.seen["unfrozen"] += trained and not q.requires_grad
            for each in (p, q):
                each.requires_grad_(trained)

    @operation()
    def add_group(self) -> Any:
        if self.clips or len(self.plain.net.extra) == 2:
            return False
        p = self.ours.net.grow()
        self.ours.optimizers[-1].add_param_group({"params": [p], "lr": 0.03})
        self.plain.add_group()
        self.saved = None
        self.schedule()

    @operation()
    def regroup(self) -> Any:
        """Move a parameter to the next group, by hand, or back; their order stays."""
        if self.clips or len(self.plain.optimizers[0].param_groups) < 2:
            return False
        self.is_regrouped = not self.is_regrouped
        regroup(self.ours.optimizers[0].optimizer)
        regroup(self.plain.optimizers[0])
        self.saved = None

    @operation()
    def collect(self) -> None:
        gc.collect(0)

    # Checkpoints, other modes.

    @operation()
    def state_dict(self) -> None:
        ours = self.ours.net.state_dict()
        for name, value in self.plain.net.state_dict().items():
            self.same(f"saved {name}", ours[name], value)
        for number in self.numbers:
            saved = self.ours.optimizers[number].state_dict()
            self.plain.refresh(number)
            for index, (p, entry) in enumerate(
                zip(self.plain.owned[number], self.plain.entries(number), strict=True)
            ):
                mine = dict(saved["state"].get(index, {}))
                exact, rounded = self.plain.masters[p].detach().float(), p.detach().float()
                master = mine.pop("master", rounded)  # in place one that was loaded just stays
                self.same(f"master {index}", rounded if self.setup.in_place else master, exact)
                mine, entry = in_float32(mine), in_float32(entry)
                assert mine.keys() == entry.keys(), (index, mine, entry)
                for name, value in mine.items():
                    self.same(f"saved {name} of {index}", value, entry[name])

    @operation(by_accelerate=(False, True))
    def save(self, by_accelerate: bool = False) -> Any:
        if self.clips:
            return False
        self.synchronized()
        for number in self.numbers:
            self.plain.refresh(number)
        self.seen["saved inside a window"] += self.is_open
        self.saved = copy.deepcopy(
            (
                self.ours.net.state_dict(),
                [optimizer.state_dict() for optimizer in self.ours.optimizers],
                self.ours.scaler.state_dict(),
                self.plain,
            )
        )
        self.saved_folder = None
        if by_accelerate and self.attached and self.device == "cpu":
            self.saved_folder = str(self.folder / "checkpoint")
            self.ours.accelerator.save_state(self.saved_folder, safe_serialization=False)

    @operation(model_first=(False, True))
    def go_back(self, model_first: bool) -> Any:
        """Load what was saved some time ago."""
        if self.saved is None or not self.between:
            return False
        self.zero_grad("none")
        states = self.load(model_first)
        self.restore(states)

    def load(self, model_first: bool) -> list[Any]:
        """Into the pair that is there; returns the optimizers' states."""
        net, states, scaler, _ = copy.deepcopy(self.saved)
        if self.saved_folder is not None:
            self.ours.accelerator.load_state(self.saved_folder)
            self.seen["loaded by Accelerate"] += 1
            self.plain.joined = set()
            return list(states)
        if model_first:
            self.ours.net.load_state_dict(net)
        for optimizer, state in zip(self.ours.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if not model_first:
            self.ours.net.load_state_dict(net)
        self.ours.scaler.load_state_dict(scaler)
        return list(states)

    @torch.no_grad()
    def restore(self, states: list[Any]) -> None:
        before, plain = copy.deepcopy(self.saved[-1]), self.plain
        plain.scale, plain.good, plain.bad = before.scale, before.good, before.bad
        for number in self.numbers:
            plain.refresh(number)
            plain.optimizers[number].load_state_dict(before.optimizers[number].state_dict())
            saved = list(zip(plain.owned[number], before.owned[number], strict=True))
            entries = states[number]["state"]
            had_masters = {
                p
                for index, (p, q) in enumerate(saved)
                if q in before.lasting or "master" in entries.get(index, {})
            }
            plain.lasting |= had_masters
            # Where there are masters, state is ours to load; elsewhere torch casts it.
            loads_exactly = any(map(plain.has_master, plain.owned[number]))
            for p, q in saved:
                p.copy_(q)
                plain.masters[p].copy_(before.masters[q] if p in had_masters else q)
                if not loads_exactly:
                    plain.round_state(number, p)
            plain.refresh(number)

    @operation()
    def go_on_in_a_fresh_pair(self) -> Any:
        """Save; load into another model, other optimizers, another scaler."""
        if not self.between:
            return False
        self.save()
        old, self.ours = self.ours, None
        old.close()
        self.ours = old.fresh()
        if self.is_regrouped:
            regroup(self.ours.optimizers[0].optimizer)
        self.plain.net.zero_grad()
        self.start_over()
        self.restore(self.load(model_first=True))

    @operation(mode=MODES, offload=("none", "cpu"))
    def reopen(self, mode: str, offload: str = "none") -> Any:
        """Close and open, or detach and attach, in another mode."""
        plain = self.plain
        if self.clips or (self.attached and self.is_open):
            return False
        if self.low and not any(map(plain.has_master, plain.net.parameters())):
            return False
        if self.low:
            self.synchronized()  # whose state is there only then
        stepped = [p for each in self.ours.optimizers for p in each.optimizer.state]
        is_cast = any(p.dtype is torch.float16 for p in stepped)
        if is_cast and not self.setup.optimizer.startswith("sgd"):
            return False  # what closing has cast to float16 is refused
        offload = "none" if self.device == "cpu" else offload
        changed = replace(self.setup, mode=mode, offload=offload)
        if self.attached:
            self.zero_grad("none")  # or they would be of before
        self.ours.reopen(changed)
        plain.forget_masters(changed)
        self.seen[f"to {self.setup.mode}"] += 1
        self.start_over()
        if self.attached:
            plain.end_window()  # with the scaler

    @operation(steps=(1, 3), bad=(False, False, True))
    def train_in_stock(self, steps: int, bad: bool) -> Any:
        """Detach, train in stock Accelerate, attach again."""
        setup, plain = self.setup, self.plain
        simple = setup.hysteresis == 1 and setup.bounds == (None, None) and not setup.two
        is_wrong = "fused" in setup.optimizer  # F1
        if not (setup.stock and simple) or is_wrong or self.low or self.is_open or self.clips:
            return False
        recorded = len(plain.windows)
        self.zero_grad("none")
        self.ours.detach()
        plain.forget_masters(replace(setup, mode="sync", guards=False, limit=None))
        (optimizer,) = self.ours.optimizers
        for number in range(steps):
            self.count += 1
            mine, other = self.losses(LAYERS)
            if not other.requires_grad:
                break
            # Stock steps a fused optimizer at an overflow (fault F1).
            is_bad = bad and number == 0 and setup.scaled and setup.optimizer != "fused adamw"
            factor = INF if is_bad else 1.0
            self.ours.backward(mine * factor, plain=False)
            plain.backward(other * factor)
            optimizer.step()
            stepped = plain.step(0)
            self.same("whether stock stepped", not optimizer.step_was_skipped, stepped)
            optimizer.zero_grad()
            plain.zero_grad(0, to_none=True)
            self.same("the scale in stock", self.ours.scaler.get_scale(), plain.scale)
        self.ours.attach()
        plain.setup = setup
        del plain.windows[recorded:]
        self.start_over()
        plain.end_window()

    def finish(self) -> None:
        self.clips = []
        self.synchronize()
        self.state_dict()
        self.seen.update(self.plain.events)
        self.seen["attached" if self.attached else "raw"] += 1
        self.seen[f"precision {self.setup.precision}"] += 1
        self.seen["bfloat16 in place"] += self.setup.in_place
        for what, mine, other in self.noted:
            found = mine.cpu() if isinstance(mine, Tensor) else mine
            assert same(found, other), f"{what}: got {found}, expected {other}"

    def check_file(self) -> None:
        """The telemetry file has the same windows."""
        lines = [] if self.file is None else self.file.read_text().splitlines()
        records = [each for each in map(json.loads, lines) if each["kind"] == "window"]
        keys = ("scale", "next_scale", "skipped", "lr", "spike")
        found = [[each.get(key, False) for key in keys] for each in records]
        expected = [[getattr(each, key) for key in keys] for each in self.plain.windows]
        assert self.file is None or found == expected
        self.seen["records in a file"] += len(found)

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()


def regroup(optimizer: torch.optim.Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups[:2])
    if len(first) > 1:
        second.insert(0, first.pop())
    else:
        first.append(second.pop(0))


def in_thread(fn: Callable[[], Any]) -> Any:
    """Call it on a thread of its own, which then ends."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fn).result(LIMIT_S)


def overflow_once(times: Iterator[int], grad: Tensor) -> Tensor:
    return grad if next(times) else torch.full_like(grad, INF)


def in_float32(entry: dict[str, Any]) -> dict[str, Any]:
    """State without the dtype of what was saved in less than float32."""
    return {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in entry.items()
        if v is not None
    }


CHOICES["change_thread"] = {}
"""What comes after it runs on another thread; the one before has ended."""
BOUNDARIES = ("step",) * 6 + ("by_hand",) * 4
OTHERS = tuple(name for name in CHOICES if name not in ("backward", "step", "by_hand", "drop"))
AFTERS = (*OTHERS, "state_dict", "read", "step", "freeze", "freeze")
AFTERS = (*AFTERS, *["go_back"] * 3, *["train_in_stock"] * 4)
BETWEEN = (*OTHERS, *["edit_gradient"] * 8, *["off_boundary"] * 4)
CLIPS = ("clip_norm", "clip_norm", "clip_norm", "clip_value", "unscale")


def possible(setup: Setup) -> Setup:
    """Without settings that do not go together."""
    if setup.scaled:
        setup = replace(setup, guards=True, masters="auto")
    else:
        setup = replace(setup, hysteresis=1, bounds=(None, None))
    if not setup.attached:
        setup = replace(setup, guards=True, limit=None, stock=False, two=False)
    if setup.retry:
        setup = replace(setup, attached=True, precision="fp16", two=False, stock=False)
    if setup.dtype == "all":  # no plain loop steps one in place beside another one's master
        setup = replace(setup, masters="fp32")
    return setup


def draw(r: random.Random, on_device: bool = False) -> tuple[Setup, list[Call]]:
    """Some windows, each with an end, and operations within and after them."""
    attached = r.random() < 0.5
    stock = attached and r.random() < 0.25 and not on_device
    precision = r.choice(("fp16", "fp16", "bf16", "no"))
    dtypes = [*sorted(DTYPES), *["bfloat16"] * 3 * (precision != "fp16")]
    setup = Setup(
        mode=r.choice(MODES),
        offload=r.choice(("none", "cpu", "cpu")) if on_device else "none",
        budget=r.choice(("auto", "auto", 0, 200, "2KiB")) if on_device else "auto",
        attached=attached,
        optimizer=r.choice(sorted(OPTIMIZERS)),
        dtype="float32" if stock else r.choice(dtypes),
        two=attached and r.random() < 0.8 and not stock,
        parts=r.random() < 0.5,
        width=r.choice((3, 3, 192 if on_device else 5)),
        inner_schedule=r.random() < 0.5,
        other_stream=on_device and r.random() < 0.3,
        finds=attached and r.random() < 0.5,
        hysteresis=1 if stock else r.choice((1, 1, 1, 2)),
        bounds=(None, None) if stock or r.random() < 0.75 else (512.0, 2048.0),
        stock=stock,
        telemetry=attached and r.random() < 0.3,
        precision=precision,
        guards=r.random() < 0.75,
        limit=r.choice((None, None, 0.5, "1.25x", "1.25x")),
        # On a device torch's optimizers round bfloat16 in other places.
        masters="fp32" if on_device else r.choice(("auto", "auto", "fp32")),
        retry=attached and precision == "fp16" and not stock and r.random() < 0.3,
    )
    calls: list[Call] = [drawn(r, "save", CHOICES)] if r.random() < 0.5 else []
    for _ in range(r.randint(6, 12)):
        for _ in range(r.choice((0, 1, 1, 1, 1, 2))):
            made = {"plain": False, "bad": False} if setup.retry and r.random() < 0.8 else {}
            calls.append(drawn(r, "backward", CHOICES, **made))
            if r.random() < 0.3:
                others = WITHIN if setup.retry else BETWEEN
                calls.append(drawn(r, r.choice(others), CHOICES))
        for _ in range(r.choice((0, 0, 0, 1, 2))):
            calls.append(drawn(r, r.choice(CLIPS), CHOICES))
            if r.random() < 0.15:
                calls.append(drawn(r, "drop", CHOICES))
        calls.append(drawn(r, "step" if setup.retry else r.choice(BOUNDARIES), CHOICES))
        for _ in range(r.choice((0, 1, 1, 2))):
            calls.append(drawn(r, r.choice(AFTERS), CHOICES))
    setup = possible(setup)
    if not setup.checks:  # what has become NaN stays so, and shows nothing more
        for _, arguments in calls[: len(calls) // 2]:
            arguments.update({"bad": False} if "bad" in arguments else {})
    return setup, calls


def play(
    setup: Setup, calls: Sequence[Call], seen: Counter[str] | None = None, device: str = "cpu"
) -> None:
    """Raise AssertionError where the package differs from plain torch."""
    torch.manual_seed(0)
    FAULT.arm(None)
    stream: Any = nullcontext()
    if setup.other_stream and device != "cpu":
        stream = on(torch.Stream(device))
    with ExitStack() as stack:
        for each in (stream, *[lazy_worker()] * (device == "cpu")):
            stack.enter_context(each)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if setup.parts:
            patch.setattr(blocks_module, "block_length", lambda _: 16)
            stack.enter_context(one_part_each())
        else:
            patch.setattr(replica_module, "SMALLEST_PART", 1 << 19)
        patch.setattr(spikes, "NORMS", NORMS)
        patch.setattr(spikes, "FIRST", FIRST)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        thread = Thread(device == "cpu" and any(name == "change_thread" for name, _ in calls))
        stack.callback(thread.end)
        seen = Counter() if seen is None else seen
        player = thread.run(lambda: Player(setup, seen, device, folder))
        try:
            for name, arguments in calls:
                if name == "change_thread" and (player.attached or player.between):
                    thread.change()
                elif name != "change_thread":
                    thread.run(partial(player.call, name, arguments))
            thread.run(player.finish)
        finally:
            thread.run(player.close)
        player.check_file()


class Thread:
    """Where a history is played: this thread, or others, one after the other."""

    def __init__(self, is_another: bool) -> None:
        self.pool = ThreadPoolExecutor(1) if is_another else None

    def run(self, fn: Callable[[], Any]) -> Any:
        return fn() if self.pool is None else self.pool.submit(fn).result(LIMIT_S)

    def change(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = ThreadPoolExecutor(1)

    def end(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


KIND = Kind(draw, play)
