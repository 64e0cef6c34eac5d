"""Random histories of asynchronous training beside the same in plain torch, bit for bit.

On a CPU the worker is the lazy one: it updates a part only when somebody waits for it, so a wait
that is missing shows every time. Losses, scale, learning rates and gradients are compared after
each call; parameters, masters and optimizer state where somebody looks. On a device everything is
noted without a wait, and compared with the CPU's at the end.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import async_support
import pytest
import torch
from accelerate import Accelerator
from accelerators import on
from async_support import lazy
from histories import INF, Call, Choices, Kind, drawn
from history_twin import DTYPES, LAYERS, LOW, OPTIMIZERS, Net, Setup, Twin
from references import DECAY, GROWTH_INTERVAL, INIT_SCALE
from support import reset, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiplicativeLR

from accel_scaler import (
    AsyncOptimizer,
    GradScaler,
    OrderError,
    ScalerConfig,
    StepError,
    attach,
    detach,
)
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.compensation import Compensation
from accel_scaler.async_optimizer.inflight_step import InflightStep
from accel_scaler.async_optimizer.replica import Part, Replica


class InjectedError(Exception):
    """A fault of the optimizer."""


class Fault:
    """Makes the next step fail at one of its parts, and knows which were done by then."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.done: list[Tensor] = []

    def arm(self, at: int | None) -> None:
        self.at, self.done = at, []

    def pass_part(self, part: Part) -> None:
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                raise InjectedError("at this part")
            self.done += [pair.param for pair in part.pairs]


FAULT = Fault()


@contextmanager
def lazy_everywhere() -> Iterator[None]:
    """As :func:`lazy`, and what only publishes, and ``submit``, wait as well."""
    patch = pytest.MonkeyPatch()
    patch.setattr(async_support, "LIMIT_S", 20.0)
    with lazy() as gate:
        publish, step, run = InflightStep._publish, Replica.step_part, InflightStep._run
        show = Compensation.publish

        def publishing(self: InflightStep, part: Part) -> None:
            gate.pass_through()
            publish(self, part)

        def showing(self: Compensation, *rest: Any) -> None:
            gate.pass_through()
            show(self, *rest)

        def running(self: InflightStep, *rest: Any) -> None:
            gate.pass_through()
            run(self, *rest)

        def stepping(self: Replica, part: Part, *rest: Any) -> None:
            FAULT.pass_part(part)
            step(self, part, *rest)

        patch.setattr(InflightStep, "_publish", publishing)
        patch.setattr(InflightStep, "_run", running)
        patch.setattr(Compensation, "publish", showing)
        patch.setattr(Replica, "step_part", stepping)
        try:
            yield
        finally:
            patch.undo()


class Raw:
    """Ours without Accelerate: one ``AsyncOptimizer`` with its scaler."""

    def __init__(self, setup: Setup, device: str) -> None:
        self.setup, self.net = setup, Net(setup, device)
        self.inners: list[Any] = [OPTIMIZERS[setup.optimizer](g) for g in setup.groups(self.net)]
        self.scaler = self.new_scaler(INIT_SCALE)
        self.open()

    def new_scaler(self, init_scale: float) -> Any:
        kind = torch.device(self.net.device).type
        return GradScaler(kind, init_scale=init_scale, growth_interval=GROWTH_INTERVAL)

    def open(self) -> None:
        setup = self.setup
        self.optimizer = AsyncOptimizer(
            self.inners[0],
            self.net,
            scaler=self.scaler,
            mode=setup.mode,
            offload=setup.offload,
            delay_warmup_steps=setup.warmup,
            delay_compensation=setup.compensation,
            fold_unscale=setup.fold,
            optimizer_threads=1,
        )
        self.optimizers: list[Any] = [self.optimizer]

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip_norm(self, most: float, kind: float, params: list[nn.Parameter] | None) -> Any:
        return self.optimizer.clip_grad_norm_(most, kind, params)

    def close(self) -> None:
        self.optimizer.close()

    def reopen(self) -> None:
        self.close()
        assert {type(p) for p in self.net.parameters()} == {nn.Parameter}
        self.open()

    def fresh(self) -> Raw:
        """Another pair that goes on from what this one saves."""
        other = copy.copy(self)
        other.net = Net(self.setup, self.net.device)
        for _ in self.net.extra:
            other.net.grow()
        for p, own in zip(other.net.parameters(), self.net.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
        (groups,) = self.setup.groups(other.net)
        other.inners = [OPTIMIZERS[self.setup.optimizer](groups)]
        for p in other.net.extra:
            other.inners[0].add_param_group({"params": [p]})
        other.scaler = self.new_scaler(2.0)
        other.scaler.load_state_dict(self.scaler.state_dict())
        other.open()
        return other


class Attached(Raw):
    """Ours under an attached accelerator, with one optimizer or two."""

    def open(self) -> None:
        reset()
        on_host = self.net.device == "cpu"
        self.accelerator: Any = Accelerator(cpu=on_host, mixed_precision="fp16")
        if not on_host:  # Accelerate makes one for CUDA, which is not there
            self.accelerator.scaler = torch.amp.GradScaler(self.accelerator.device.type)
        self.attach()
        _, *self.optimizers = self.accelerator.prepare(self.net, *self.inners)

    def attach(self) -> None:
        config = ScalerConfig(
            step_mode=self.setup.mode,
            offload=self.setup.offload,
            delay_warmup_steps=self.setup.warmup,
            delay_compensation=self.setup.compensation,
            fold_unscale=self.setup.fold,
            find_overflow="replay" if self.setup.finds else "off",
            optimizer_threads=1,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
        )
        self.scaler = attach(self.accelerator, config).scaler

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_norm(self, most: float, kind: float, params: list[nn.Parameter] | None) -> Any:
        return self.accelerator.clip_grad_norm_(params or self.net.parameters(), most, kind)

    def close(self) -> None:
        self.scaler.abandon_window()
        detach(self.accelerator)

    def reopen(self) -> None:
        saved = self.scaler.state_dict()
        detach(self.accelerator)
        self.attach()
        self.scaler.load_state_dict(saved)


WHICH = range(8)
WHOLE = ("",)
EACH = ("gain", "inner.weight", "inner.bias", "outer.weight", "outer.bias")
APART = (("outer",), ("inner", "outer"), EACH)
PARTS = (*APART, ("outer", "outer"), ("inner", "inner.bias"), ("", "outer"))
"""What is clipped, by the first letters of names, one after the other."""
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
CHOICES: Choices = {
    "backward": {
        "used": [LAYERS] * 4 + [("gain",), ("outer", "inner")],
        "bad": [False] * 5 + [True],
    },
    "edit_gradient": {"which": WHICH, "how": ("in place", "data", "replaced", "dropped")},
    "clip_norm": {
        "most": (0.125, 0.01, 100.0),
        "kind": (2.0, 2.0, INF),
        "parts": (*[WHOLE] * 6, *PARTS),
    },
    "clip_value": {"most": (2.0**-5, 2.0**-9, 8.0)},
    "step": {
        "zero": ("none", "none", "none", "zeros", "model none", "model zeros", "nothing"),
        "fails": (None,) * 5 + (0, 1, 3),
        "told": ("synchronize", "state_dict", "evaluation"),
        "sits_out": (None, None, 0, 1),
    },
    "zero_grad": {"how": ("none", "zeros", "model none", "model zeros")},
    "submit": {"most": (None, 0.125, 0.01)},
    "torch_loop": {"most": (None, 0.125)},
    "change_lr": {"number": range(6), "lr": (0.03, 0.01, 0.05), "inner": (False, True)},
    "scheduler_step": {},
    "read": {"which": WHICH, "aside": (False, True)},
    "evaluate": {"training": (False, True), "aside": (False, True)},
    "average": {},
    "litter": {},
    "synchronize": {},
    "edit": {"which": WHICH, "how": tuple(EDITS)},
    "move": {"which": WHICH, "how": ("one", "apply")},
    "freeze": {
        "part": (*LAYERS, "inner.bias", "outer.weight", ""),
        "how": ("toggle", "alone"),
    },
    "tie": {"which": WHICH},
    "add_group": {},
    "collect": {},
    "state_dict": {},
    "save": {},
    "go_back": {"model_first": (False, True)},
    "go_on_in_a_fresh_pair": {},
    "reopen": {},
}
ENDS = ("step",) * 6 + ("submit", "submit", "torch_loop", "torch_loop")
OTHERS = tuple(name for name in CHOICES if name not in ("backward", "step", "submit", "torch_loop"))
AFTERS = (*OTHERS, "state_dict", "read", "go_back", "go_back", "step", *["freeze"] * 2)
BETWEEN = (*OTHERS, *["edit_gradient"] * 8)
"""What happens to a window, after it, and in it."""


def draw(r: random.Random, on_device: bool = False) -> tuple[Setup, list[Call]]:
    """Some windows, each with an end, and things that happen in between and after it."""
    attached = r.random() < 0.5
    setup = Setup(
        mode=r.choice(("sync", "overlap", "delayed")),
        offload=r.choice(("none", "cpu")),
        attached=attached,
        optimizer=r.choice(sorted(OPTIMIZERS)),
        dtype=r.choice(sorted(DTYPES)),
        warmup=r.choice((0, 0, 3)),
        compensation=r.choice(("none", "preview", "preview", "auto")),
        # On a device torch goes through the list of both once for each operation, which rounds
        # differently from one after the other.
        tied=r.random() < 0.25 and not on_device,
        two=attached and r.random() < 0.65,
        parts=r.random() < 0.5,
        width=r.choice((3, 3, 192 if on_device else 3)),
        fold=r.random() < 0.15,
        inner_schedule=r.random() < 0.5,
        other_stream=on_device and r.random() < 0.3,
        dropped=on_device and r.random() < 0.2,
        finds=attached and r.random() < 0.5,
    )
    if setup.mode == "sync":
        setup = replace(setup, warmup=0)
    if setup.mode != "delayed":
        setup = replace(setup, compensation="none")
    else:
        setup = replace(setup, tied=False)
        if setup.optimizer == "rmsprop" and setup.compensation == "preview":  # there is none
            setup = replace(setup, compensation="auto")
    calls: list[Call] = [drawn(r, "save", CHOICES)] if r.random() < 0.5 else []
    for _ in range(r.randint(6, 12)):
        for _ in range(r.choice((0, 1, 1, 1, 1, 2))):
            calls.append(drawn(r, "backward", CHOICES))
            if r.random() < 0.3:
                calls.append(drawn(r, r.choice(BETWEEN), CHOICES))
        if r.random() < 0.3:
            calls.append(drawn(r, r.choice(("clip_norm", "clip_norm", "clip_value")), CHOICES))
        calls.append(drawn(r, r.choice(ENDS), CHOICES))
        for _ in range(r.choice((0, 1, 1, 2))):
            calls.append(drawn(r, r.choice(AFTERS), CHOICES))
    return setup, calls


class Player:
    """Does the same on both sides, ``ours`` and ``twin``: a method for each of ``CHOICES``."""

    def __init__(self, setup: Setup, seen: Counter[str], device: str) -> None:
        self.setup, self.seen, self.device = setup, seen, device
        self.attached = setup.attached
        self.clips: list[str] = []
        self.saved: Any = None
        self.count = 0
        self.noted: list[tuple[str, Any, Any]] = []
        self.side = None if device == "cpu" else torch.Stream(device)
        self.averages: list[tuple[Tensor, Tensor]] = []
        self.kept: list[Tensor] = []
        self.twin = Twin(setup)
        self.ours: Any = (Attached if setup.attached else Raw)(setup, device)
        self.schedule()

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        if getattr(self, name)(**arguments) is not False:
            self.seen[name] += 1
        self.compare()

    # Both sides.

    def same(self, what: str, mine: Any, other: Any) -> None:
        """On a device: by and by, without a wait."""
        if self.device == "cpu":
            assert same(mine, other), f"{what}: got {mine}, expected {other}"
        else:
            copied = [x.detach().clone() if isinstance(x, Tensor) else x for x in (mine, other)]
            self.noted.append((what, *copied))

    def compare(self) -> None:
        """What can be seen without waiting for anything."""
        self.same("the scale", self.ours.scaler.get_scale(), self.twin.scale)
        if self.device == "cpu":
            self.same("the count", self.ours.scaler.state_dict()["_growth_tracker"], self.twin.good)
        for mine, other in zip(self.ours.optimizers, self.twin.optimizers, strict=True):
            rates = [[group["lr"] for group in each.param_groups] for each in (mine, other)]
            self.same("lr", *rates)
        for p, q in self.pairs if not self.clips and not self.setup.fold else ():
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                self.same("a gradient", p.grad.nan_to_num(7.0), q.grad.nan_to_num(7.0))

    @property
    def low(self) -> bool:
        return not set(LOW).isdisjoint(self.setup.dtypes)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.ours.net.parameters(), self.twin.net.parameters(), strict=True))

    @property
    def numbers(self) -> range:
        return range(len(self.twin.owned))

    @property
    def is_open(self) -> bool:
        return self.twin.opened and not self.twin.stepped

    @property
    def may_end(self) -> bool:
        return self.is_open and any(p.grad is not None for p in self.twin.net.parameters())

    @property
    def between(self) -> bool:
        return not self.is_open and not self.clips

    def schedule(self) -> None:
        self.schedules = [
            MultiplicativeLR(o.optimizer if self.setup.inner_schedule else o, lambda _: DECAY)
            for o in self.ours.optimizers
        ]

    def chosen(self, part: str) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Those whose names begin so, in the order of the optimizers."""
        named = zip(self.pairs, self.twin.net.named_parameters(), strict=True)
        found = {q: (p, q) for (p, q), (name, _) in named if name.startswith(part)}
        return [found[q] for own in self.twin.owned for q in own if q in found]

    def synchronized(self) -> None:
        for optimizer in self.ours.optimizers:
            optimizer.synchronize()
        self.twin.publish_all()

    def publish_delayed(self) -> None:
        if self.setup.mode == "delayed":
            self.synchronized()

    def losses(self, used: Sequence[str]) -> tuple[Tensor, Tensor]:
        with torch.autocast(torch.device(self.device).type, torch.float16, enabled=self.attached):
            mine = self.ours.net.loss(self.count, used)
        with torch.autocast("cpu", torch.float16, enabled=self.attached):
            other = self.twin.net.loss(self.count, used)
        self.same("the loss", mine, other)
        return mine, other

    @contextmanager
    def stream(self, aside: bool) -> Iterator[None]:
        """On a second stream, ordered with this one as torch asks for."""
        if not aside or self.side is None:
            yield
            return
        self.publish_delayed()
        present = torch.accelerator.current_stream(self.device)
        self.side.wait_stream(present)
        with on(self.side):
            yield
        present.wait_stream(self.side)

    # A window.

    def backward(self, used: Sequence[str], bad: bool) -> Any:
        if self.clips:
            return False
        self.count += 1
        self.twin.go_on()
        mine, other = self.losses(used)
        if not other.requires_grad:
            return False
        again = self.is_open
        self.ours.backward(mine * (INF if bad else 1.0))
        self.twin.backward(other * (INF if bad else 1.0))
        self.seen["overflow"] += bad
        self.seen["several micro-batches"] += again

    def edit_gradient(self, which: int, how: str) -> Any:
        p, q = self.pairs[which % len(self.pairs)]
        if not self.is_open or self.clips or q.grad is None:
            return False
        for each in (p, q):
            assert each.grad is not None
            if how == "in place":
                each.grad[:1] = 0.0
            elif how == "data":
                each.grad.data[:1] = 0.0
            else:
                each.grad = each.grad * 0.5 if how == "replaced" else None

    def clip_norm(self, most: float, kind: float, parts: Sequence[str] = WHOLE) -> Any:
        """What has a master is multiplied once, by a product of coefficients: with the second of
        them each is a power of two, which rounds nothing. Folded, the first would round."""
        if not self.may_end or self.setup.fold:
            return False
        again = self.clips or parts != WHOLE
        if self.low and again and ("rounded" in self.clips or self.twin.compensation != "none"):
            return False
        is_exact = self.low and parts not in (WHOLE, *APART)

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(masters, most, kind)

        for part in parts:
            mine, order = (list(each) for each in zip(*self.chosen(part), strict=True))
            if not (part or self.clips):
                own = self.twin.net.parameters() if self.attached else self.twin.owned[0]
                mine, order = None, list(own)
            if is_exact:
                most = self.twin.exact_limit(order, kind)
            norm, other = self.ours.clip_norm(most, kind, mine), self.twin.clip(order, clip, most)
            if self.twin.refuse(order, other):
                other = torch.tensor(INF)
            self.same("the norm", norm, other)
            self.clips.append("exact" if is_exact else "rounded")
        self.seen["clipped in parts"] += parts != WHOLE

    def clip_value(self, most: float) -> Any:
        if not (self.attached and self.may_end) or self.setup.fold:
            return False
        if self.low and not {"exact", "rounded"}.isdisjoint(self.clips):
            return False

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_value_(masters, most)

        self.ours.accelerator.clip_grad_value_(self.ours.net.parameters(), most)
        self.twin.clip(list(self.twin.net.parameters()), clip)
        self.clips.append("value")

    def step(self, zero: str, fails: int | None, told: str, sits_out: int | None = None) -> None:
        """``sits_out``: this optimizer keeps its gradients, if another one steps."""
        skipped = False
        stepping = [n for n in self.numbers if n != sits_out or self.clips or not self.setup.split]
        fails = fails if self.device == "cpu" and self.setup.mode != "sync" else None
        if fails is not None:
            self.synchronized()  # the fault is for this step
        if fails is not None or (self.low and self.clips not in ([], ["rounded"])):
            zero = "none"  # what is left is lost, or scaled and clipped
        for number in stepping:
            optimizer = self.ours.optimizers[number]
            grads = [p.grad for p in self.twin.owned[number] if p.grad is not None]
            nonzero = any(bool(g.count_nonzero()) for g in grads)
            again = self.twin.opened and number in self.twin.stepped
            if grads and (again or (nonzero and not self.twin.opened)):
                with pytest.raises(OrderError):
                    optimizer.step()
                self.seen["refused"] += 1
                continue
            FAULT.arm(fails)
            optimizer.step()
            done = self.failure(number, told) if fails is not None else None
            FAULT.arm(None)
            stepped = self.twin.step(number, fails=done)
            if fails is not None:
                self.synchronized()
                if told == "state_dict" and done is None:
                    self.twin.follow(number)
            self.same("whether it stepped", not optimizer.step_was_skipped, stepped)
            skipped = skipped or not stepped
            self.seen["skipped"] += not stepped
            self.seen["stepped"] += bool(stepped and grads)
        self.clips = []
        for number in set(self.numbers) - set(stepping):
            zero = zero.removeprefix("model ")
            self.seen["sat out"] += any(p.grad is not None for p in self.twin.owned[number])
        self.zero_grad(zero, stepping)
        if skipped and (self.setup.split or zero == "nothing"):
            self.zero_grad("none", stepping)  # they are scaled still, and would be refused

    def failure(self, number: int, told: str) -> set[Tensor] | None:
        """Wait for the step, which perhaps fails; then what was updated all the same."""
        optimizer = self.ours.optimizers[number]
        try:
            if told == "synchronize":
                optimizer.synchronize()
            elif told == "state_dict":
                optimizer.state_dict()
            else:
                with torch.no_grad():
                    self.ours.net.loss(0, LAYERS)
        except StepError:
            self.seen["failed"] += 1
            mine = {id(p) for p in FAULT.done}
            return {q for p, q in self.pairs if id(p) in mine}
        return None

    def zero_grad(self, how: str, numbers: Sequence[int] | None = None) -> Any:
        to_none = how.endswith("none")
        if self.clips:
            return False
        if how.startswith("model"):
            self.ours.net.zero_grad(set_to_none=to_none)
            self.twin.net.zero_grad(set_to_none=to_none)
        elif how != "nothing":
            for number in self.numbers if numbers is None else numbers:
                self.ours.optimizers[number].zero_grad(set_to_none=to_none)
                self.twin.zero_grad(number, to_none)
        self.seen[f"zeroed: {how}"] += 1

    def by_hand(self, most: float | None) -> Callable[[], None]:
        """``scaler.unscale_``, torch's clip, ``scaler.step``."""
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, most or 0.0)

        def update() -> None:
            if most is not None:
                scaler.unscale_(optimizer)
                clip([p for group in optimizer.param_groups for p in group["params"]])
            scaler.step(optimizer)

        if most is not None:
            self.twin.clip(self.twin.owned[0], clip)
        return update

    def submit(self, most: float | None) -> Any:
        if self.attached or not self.may_end or self.clips:
            return False
        self.ours.optimizer.submit(self.by_hand(None if self.setup.fold else most))
        self.ours.scaler.update()
        self.twin.step(0, submitted=True)
        self.twin.end_window()

    def torch_loop(self, most: float | None) -> Any:
        if self.attached or not self.may_end or self.clips or self.low:
            return False
        self.by_hand(None if self.setup.fold else most)()
        self.ours.scaler.update()
        stepped = self.twin.step(0)
        self.same("whether it stepped", not self.ours.optimizer.step_was_skipped, stepped)
        self.twin.end_window()
        self.zero_grad("none")

    def change_lr(self, number: int, lr: float, inner: bool) -> None:
        optimizer = self.ours.optimizers[number % len(self.numbers)]
        theirs = self.twin.optimizers[number % len(self.numbers)].param_groups
        groups = (optimizer.optimizer if inner else optimizer).param_groups
        for each in (groups, theirs):
            each[number % len(groups)]["lr"] = lr

    def scheduler_step(self) -> None:
        for schedule in self.schedules:
            schedule.step()
        for optimizer in self.twin.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= DECAY

    # What looks at parameters, or changes them from outside.

    def read(self, which: int, aside: bool) -> None:
        """One parameter, through an operation; in delayed that is no fence, but where an attached
        accelerator has stepped since the last forward (``test_reads_between_steps.py``)."""
        if self.attached:
            self.publish_delayed()
        with self.stream(aside):
            p, q = self.pairs[which % len(self.pairs)]
            self.same("what is read", p + 0, q + 0)

    def evaluate(self, training: bool, aside: bool) -> None:
        self.count += 1
        self.ours.net.train(training)
        self.twin.publish_all()
        with self.stream(aside), torch.no_grad():
            self.losses(LAYERS)
        self.ours.net.train()

    def average(self) -> None:
        """Of the weights as they are after some steps."""
        if self.attached:
            self.publish_delayed()
        with self.stream(aside=True), torch.no_grad():
            for n, both in enumerate(self.pairs):
                if n == len(self.averages):
                    p, q = (torch.zeros_like(each, dtype=torch.float32) for each in both)
                    self.averages.append((p, q))
                for mean, each in zip(self.averages[n], both, strict=True):
                    if mean.shape == each.shape:  # grown since
                        mean.lerp_(each.detach().float(), 0.25)

    def litter(self) -> None:
        """Memory of the parameters' sizes, taken by somebody else."""
        for p in self.twin.net.parameters():
            self.kept.append(torch.full(p.shape, 3.0, dtype=p.dtype, device=self.device))

    def synchronize(self) -> None:
        self.synchronized()
        for p, q in self.pairs:
            self.same("a parameter", p, q)

    def edit(self, which: int, how: str) -> Any:
        if how.startswith("data") and self.setup.mode == "delayed" and not self.attached:
            return False  # see docs/what-to-expect.md
        self.publish_delayed()
        for p in self.pairs[which % len(self.pairs)]:
            with torch.no_grad():
                EDITS[how](p)
        self.seen["written past autograd"] += how.startswith("data")

    def tie(self, which: int) -> Any:
        """One parameter is given the memory of another one of its optimizer."""
        alike = [pair for pair in self.pairs if pair[1].shape == self.twin.net.gain.shape]
        (p, q), *others = [pair for pair in alike if pair[1].dtype is self.twin.net.gain.dtype]
        if self.clips or not others or self.setup.mode == "delayed" or self.device != "cpu":
            return False
        mine, other = others[which % len(others)]
        mine.data, self.saved = p.data, None
        self.twin.tie(q, other)
        self.twin.moves[other] += 1
        self.state_dict()  # or the tie may be undone before it is seen

    def move(self, which: int, how: str) -> Any:
        if self.clips:
            return False  # gradients are moved too, and some are scaled still
        self.publish_delayed()
        if how == "apply":
            self.ours.net._apply(torch.clone)
        else:
            p, _ = self.pairs[which % len(self.pairs)]
            p.data = p.data.clone()
        for n, (_, q) in enumerate(self.pairs):
            if how == "apply" or n == which % len(self.pairs):
                self.twin.move(q)

    def freeze(self, part: str, how: str = "toggle") -> Any:
        """Frozen are unfrozen and the other way round; ``alone``: what is not of it is frozen."""
        if self.clips:
            return False
        self.zero_grad("none")  # torch steps what has a gradient, frozen or not
        inside = {q for _, q in self.chosen(part)}
        for p, q in self.pairs:
            trained = q in inside if how == "alone" else q.requires_grad != (q in inside)
            self.seen["unfrozen"] += trained and not q.requires_grad
            for each in (p, q):
                each.requires_grad_(trained)

    def add_group(self) -> Any:
        if self.clips or len(self.twin.net.extra) == 2:
            return False
        p = self.ours.net.grow()
        self.ours.optimizers[-1].add_param_group({"params": [p], "lr": 0.03})
        self.twin.add_group()
        self.saved = None
        self.schedule()

    def collect(self) -> None:
        gc.collect(0)

    # What is saved.

    def state_dict(self) -> None:
        self.twin.publish_all()
        ours = self.ours.net.state_dict()
        for name, value in self.twin.net.state_dict().items():
            self.same(f"saved {name}", ours[name], value)
        for number in self.numbers:
            saved = self.ours.optimizers[number].state_dict()
            self.twin.follow(number)
            for index, (p, entry) in enumerate(
                zip(self.twin.owned[number], self.twin.entries(number), strict=True)
            ):
                mine = dict(saved["state"].get(index, {}))
                known = self.twin.shown[number]
                assert ("preview" in mine) == (p in known), index
                if p in known:
                    assert "master" in mine
                    self.same(f"preview of {index}", mine.pop("preview"), known[p])
                exact, rounded = self.twin.masters[p].detach(), p.detach().float()
                self.same(f"master {index}", mine.pop("master", rounded), exact)
                mine, entry = _plain(mine), _plain(entry)
                assert mine.keys() == entry.keys(), (index, mine, entry)
                for name, value in mine.items():
                    self.same(f"saved {name} of {index}", value, entry[name])

    def save(self) -> Any:
        if not self.between:
            return False
        self.synchronized()
        for number in self.numbers:
            self.twin.follow(number)
        self.saved = copy.deepcopy(
            (
                self.ours.net.state_dict(),
                [optimizer.state_dict() for optimizer in self.ours.optimizers],
                self.ours.scaler.state_dict(),
                self.twin,
            )
        )

    def go_back(self, model_first: bool) -> Any:
        """Load what was saved some time ago into the same pair."""
        if self.saved is None or not self.between:
            return False
        self.zero_grad("none")
        net, states, scaler, _ = copy.deepcopy(self.saved)
        if model_first:
            self.ours.net.load_state_dict(net)
        for optimizer, state in zip(self.ours.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if not model_first:
            self.ours.net.load_state_dict(net)
        self.ours.scaler.load_state_dict(scaler)
        self.restore(states)

    @torch.no_grad()
    def restore(self, states: list[Any]) -> None:
        before, twin = copy.deepcopy(self.saved[-1]), self.twin
        twin.scale, twin.good = before.scale, before.good
        for number in self.numbers:
            twin.follow(number)
            twin.shown[number] = {}
            counts = [e["step"] for e in states[number]["state"].values() if "step" in e]
            if counts:  # a warm-up goes on where it was saved
                twin.steps[number] = int(max(counts))
            twin.optimizers[number].load_state_dict(before.optimizers[number].state_dict())
            saved = zip(twin.owned[number], before.owned[number], strict=True)
            entries = states[number]["state"]
            twin.lasting.update(
                p
                for index, (p, q) in enumerate(saved)
                if q in before.lasting or "master" in entries.get(index, {})
            )
            # Where there are masters, state is ours to load; elsewhere torch casts it.
            loads_exactly = twin.everywhere or any(map(twin.had_master, twin.owned[number]))
            for index, (p, q) in enumerate(
                zip(twin.owned[number], before.owned[number], strict=True)
            ):
                p.copy_(q)
                if q in before.shown[number] and twin.has_master(p):
                    twin.shown[number][p] = before.shown[number][q]
                kept = q in before.lasting or "master" in entries.get(index, {})
                twin.masters[p].copy_(before.masters[q] if kept else q)
                if not loads_exactly:
                    twin.round_state(number, p)
            twin.follow(number)

    def go_on_in_a_fresh_pair(self) -> Any:
        if self.attached or not self.between or self.twin.is_tied or self.setup.tied:
            return False
        self.save()
        net, states, _, _ = copy.deepcopy(self.saved)
        old, self.ours = self.ours, self.ours.fresh()
        self.ours.net.load_state_dict(net)
        self.ours.optimizer.load_state_dict(states[0])
        old.close()
        self.twin.net.zero_grad()
        self.started_over()
        self.restore(states)

    def started_over(self) -> None:
        self.twin.steps = [0 for _ in self.numbers]
        self.schedule()

    def reopen(self) -> Any:
        twin = self.twin
        if self.clips or (self.attached and self.is_open):
            return False
        if self.low and not any(map(twin.has_master, twin.net.parameters())):
            return False
        if self.attached:
            self.zero_grad("none")  # or they would be of before
        self.ours.reopen()
        twin.forget_masters()
        self.started_over()
        if self.attached:
            twin.end_window()  # with the scaler

    def finish(self) -> None:
        self.clips = []
        if self.setup.dropped and not self.attached:
            # What an update in hand comes to is nobody's; it may only not touch what others have.
            self.ours = self.schedules = None
            gc.collect()
            for _ in range(4):
                self.litter()
        else:
            self.synchronize()
            self.state_dict()
        self.seen.update(self.twin.events)
        for mine, other in self.averages:
            self.same("an average", mine, other)
        for each in self.kept:
            self.same("others' memory", each, torch.full(each.shape, 3.0, dtype=each.dtype))
        for what, mine, other in self.noted:
            found = mine.cpu() if isinstance(mine, Tensor) else mine
            assert same(found, other), f"{what}: got {found}, expected {other}"

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """State without the dtype of what was saved in less than float32."""
    return {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in entry.items()
        if v is not None
    }


def play(
    setup: Setup, calls: Sequence[Call], seen: Counter[str] | None = None, device: str = "cpu"
) -> None:
    """Raises AssertionError where ours differs from plain torch."""
    torch.manual_seed(0)
    FAULT.arm(None)
    stream: Any = nullcontext()
    if setup.other_stream and device != "cpu":
        stream = on(torch.Stream(device))
    with ExitStack() as stack:
        for each in (stream, *[lazy_everywhere()] * (device == "cpu")):
            stack.enter_context(each)
        if not setup.parts:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                replica_module, "SMALLEST_PART", 1 << 19
            )
        player = Player(setup, Counter() if seen is None else seen, device)
        try:
            for name, arguments in calls:
                player.call(name, arguments)
            player.finish()
        finally:
            player.close()


KIND = Kind(draw, play)
