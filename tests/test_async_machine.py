"""Random histories of asynchronous training beside the same in plain torch, bit for bit.

The worker is the lazy one: it updates a part only when somebody waits for it, so a wait that is
missing shows every time. Losses, scale, learning rates and gradients are compared after each
call; parameters, masters and optimizer state where somebody looks.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import async_support
import pytest
import torch
from accelerate import Accelerator
from async_support import lazy, reset
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from references import DECAY, GROWTH_INTERVAL, INIT_SCALE, OPTIMIZERS, same
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
from accel_scaler import shadow as shadow_module
from accel_scaler.engine import Engine
from accel_scaler.shadow import Part, Shadow
from accel_scaler.small import SmallSteps

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # to shrink a failure takes minutes: add Phase.shrink by hand
)
LAYERS = ("inner", "gain", "outer", "extra")


class Net(nn.Module):
    """Layers that a forward may leave out; one parameter has no module of its own."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.inner = nn.Linear(3, 3).to(dtypes[0])
            self.gain = nn.Parameter(torch.ones(3, dtype=dtypes[1]))
            self.outer = nn.Linear(3, 2).to(dtypes[2])
        self.extra = nn.ParameterList()

    def grow(self) -> nn.Parameter:
        self.extra.append(nn.Parameter(torch.full((3,), 0.25, dtype=self.gain.dtype)))
        return self.extra[-1]

    def forward(self, x: Tensor, used: Sequence[str]) -> Tensor:
        # From the back to the front of `parameters()`, so that the parts are put in order.
        for p in self.extra if "extra" in used else ():
            x = x + p
        if "gain" in used:
            x = x * self.gain
        if "inner" in used:
            x = x + self.inner(x.to(self.inner.weight.dtype)).tanh()
        if "outer" in used:
            x = self.outer(x.to(self.outer.weight.dtype))
        return (x.float() ** 2).mean()


def inputs(seed: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Setup:
    """What the two sides have in common."""

    mode: str
    offload: str
    kind: str
    dtypes: tuple[torch.dtype, ...]
    prompt: int
    split: bool
    """Two optimizers, one for ``outer``."""

    def groups(self, net: Net) -> list[list[dict[str, Any]]]:
        """For each optimizer its groups; the order is unlike that of the forward."""
        outer = {"params": list(net.outer.parameters()), "lr": 0.02}
        rest = {"params": [net.gain, *net.inner.parameters()]}
        return [[outer], [rest]] if self.split else [[outer, rest]]


class Twin:
    """The same training in plain torch: float32 masters, a scale, and when the model sees them."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup.dtypes)
        groups = setup.groups(self.net)
        self.masters: dict[Tensor, nn.Parameter] = {}
        for p in self.net.parameters():
            self.masters[p] = nn.Parameter(p.detach().float().clone())
        self.optimizers = [
            OPTIMIZERS[setup.kind](
                [{**g, "params": [self.masters[p] for p in g["params"]]} for g in each]  # type: ignore[arg-type]
            )
            for each in groups
        ]
        self.owned = [[p for g in each for p in g["params"]] for each in groups]
        self.taken: list[set[Tensor]] = [set() for _ in groups]
        self.steps = [0 for _ in groups]
        self.waiting = [False for _ in groups]
        self.scale, self.good = INIT_SCALE, 0
        self.opened, self.before, self.found = False, (INIT_SCALE, 0), False
        self.stepped: set[int] = set()
        self.final: dict[Tensor, Tensor] = {}
        """Gradients that were clipped in this window."""
        self.refused = False
        """An overflow that a clipped norm has shown: nobody steps."""

    def has_master(self, p: Tensor) -> bool:
        everywhere = self.setup.mode == "delayed" or self.setup.offload == "cpu"
        return p.requires_grad and (everywhere or p.dtype is torch.float16)

    def loss(self, seed: int, used: Sequence[str]) -> Tensor:
        loss: Tensor = self.net(inputs(seed), used)
        return loss

    def backward(self, loss: Tensor) -> None:
        if self.stepped or not self.opened:  # the first backward after a step opens a window
            self.stepped, self.found, self.refused, self.final = set(), False, False, {}
        self.opened = True
        self.before = (self.scale, self.good)
        (loss * self.scale).backward()

    @torch.no_grad()
    def publish(self, number: int) -> None:
        if self.waiting[number]:
            for p in self.owned[number]:
                p.copy_(self.masters[p])
        self.waiting[number] = False

    def publish_all(self) -> None:
        for number in range(len(self.owned)):
            self.publish(number)

    @torch.no_grad()
    def follow(self, number: int) -> None:
        """A master stays where it rounds to the parameter; a frozen one holds nothing more."""
        self.publish(number)
        for p in self.owned[number]:
            master, now = self.masters[p], p.detach()
            kept = (master.to(now.dtype) == now) & p.requires_grad
            master.copy_(torch.where(kept, master, now.float()))

    def unscaled(self, number: int) -> dict[Tensor, Tensor]:
        inverse = 1.0 / self.before[0] if self.opened else 1.0
        return {p: p.grad.float() * inverse for p in self.owned[number] if p.grad is not None}

    def clip(self, order: Sequence[Tensor], clip: Callable[[list[Tensor]], Any]) -> Any:
        """``clip`` on masters whose gradients are what the optimizers will see."""
        grads = {p: g for n in range(len(self.owned)) for p, g in self.unscaled(n).items()}
        grads.update(self.final)
        chosen = [p for p in order if p in grads]
        for p in chosen:
            self.masters[p].grad = grads[p]
        result = clip([self.masters[p] for p in chosen])
        for p in chosen:
            grad = self.masters[p].grad
            assert grad is not None
            self.final[p], self.masters[p].grad = grad, None
        return result

    def step(
        self,
        number: int,
        *,
        fails: set[Tensor] | None = None,
        submitted: bool = False,
    ) -> bool:
        """One optimizer's boundary; ``fails``: only these parameters are updated."""
        if all(p.grad is None for p in self.owned[number]):
            return True
        grads = self.unscaled(number)
        finite = all(bool(g.isfinite().all()) for g in grads.values()) and not self.refused
        grads = {p: self.final.get(p, g) for p, g in grads.items()}
        if self.opened:
            self.found = self.found or not finite
            self.scale, self.good = self.before[0], self.before[1] + 1
            if self.found:
                self.scale, self.good = self.scale * 0.5, 0
            elif self.good == GROWTH_INTERVAL:
                self.scale, self.good = self.scale * 2.0, 0
            self.stepped.add(number)
        if not finite and not submitted:
            self.publish(number)
            return False
        self.follow(number)
        self.steps[number] += 1
        self.taken[number] = set(grads)
        for p in grads:
            p.grad = None
        if finite:
            for p, g in grads.items():
                self.masters[p].grad = g if fails is None or p in fails else None
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()
        self.waiting[number] = True
        if self.setup.mode != "delayed" or self.steps[number] <= self.setup.prompt:
            self.publish(number)
        return finite

    def end_window(self) -> None:
        """What ``scaler.update()`` does after the step."""
        self.opened, self.stepped, self.refused, self.final = False, set(), False, {}

    def zero_grad(self, number: int, to_none: bool) -> None:
        for p in self.owned[number]:
            if p.grad is None and p in self.taken[number] and not to_none:
                p.grad = torch.zeros_like(p)
            elif p.grad is not None:
                p.grad = None if to_none else torch.zeros_like(p)
        if to_none:
            self.taken[number] = set()

    def add_group(self) -> None:
        p = self.net.grow()
        self.masters[p] = nn.Parameter(p.detach().float().clone())
        self.optimizers[-1].add_param_group({"params": [self.masters[p]], "lr": 0.03})
        self.owned[-1].append(p)

    def entries(self, number: int) -> list[dict[str, Any]]:
        optimizer = self.optimizers[number]
        return [dict(optimizer.state.get(self.masters[p], {})) for p in self.owned[number]]

    @torch.no_grad()
    def forget_masters(self) -> None:
        """What a plain optimizer can hold: masters are gone, state has the parameters' dtype."""
        self.publish_all()
        engines = range(len(self.owned))
        for number in engines:
            if not any(map(self.has_master, self.owned[number])):
                continue
            for p in self.owned[number]:
                self.masters[p].copy_(p)
                self.round_state(number, p)

    def round_state(self, number: int, p: Tensor) -> None:
        entry = self.optimizers[number].state.get(self.masters[p], {})
        for key, value in entry.items():
            if key != "step" and isinstance(value, Tensor):
                entry[key] = value.to(p.dtype).float()


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
            self.done += [slot.param for slot in part.slots]


FAULT = Fault()


@contextmanager
def lazy_everywhere() -> Iterator[None]:
    """As :func:`lazy`, and what only publishes, small steps and ``submit`` wait as well."""
    patch = pytest.MonkeyPatch()
    patch.setattr(async_support, "LIMIT_S", 20.0)
    with lazy() as gate:
        publish, small, begin = Engine._publish, SmallSteps.step, SmallSteps.begin
        step, run = Shadow.step_part, Engine._run

        def publishing(self: Engine, part: Part) -> None:
            gate.pass_through()
            publish(self, part)

        def stepping_small(self: SmallSteps, part: int, *rest: Any) -> None:
            gate.pass_through()
            small(self, part, *rest)

        def beginning(self: SmallSteps, *rest: Any) -> bool:
            if FAULT.at is not None:
                FAULT.at = None
                raise InjectedError("before the first part")
            return begin(self, *rest)

        def running(self: Engine, *rest: Any) -> None:
            gate.pass_through()
            run(self, *rest)

        def stepping(self: Shadow, part: Part, *rest: Any) -> None:
            FAULT.pass_part(part)
            step(self, part, *rest)

        patch.setattr(Engine, "_publish", publishing)
        patch.setattr(Engine, "_run", running)
        patch.setattr(SmallSteps, "step", stepping_small)
        patch.setattr(SmallSteps, "begin", beginning)
        patch.setattr(Shadow, "step_part", stepping)
        try:
            yield
        finally:
            patch.undo()


class Raw:
    """Ours without Accelerate: one ``AsyncOptimizer`` with its scaler."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup.dtypes)
        self.scaler = GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
        (groups,) = setup.groups(self.net)
        self.inner: Any = OPTIMIZERS[setup.kind](groups)  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        setup = self.setup
        self.optimizer = AsyncOptimizer(
            self.inner,
            self.net,
            scaler=self.scaler,
            mode=setup.mode,
            offload=setup.offload,
            delay_warmup_steps=setup.prompt,
            optimizer_threads=1,
        )

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer]

    def engine(self, number: int) -> Engine:
        return self.optimizers[number].optimizer.__dict__["_accel_scaler_stepper"]

    def loss(self, seed: int, used: Sequence[str]) -> Tensor:
        loss: Tensor = self.net(inputs(seed), used)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip_norm(self, most: float, kind: float) -> Any:
        return self.optimizer.clip_grad_norm_(most, kind)

    def close(self) -> None:
        self.optimizer.close()

    def fresh(self) -> Raw:
        """Another pair that goes on from what this one saves."""
        other = copy.copy(self)
        other.net = Net(self.setup.dtypes)
        for _ in self.net.extra:
            other.net.grow()
        for p, own in zip(other.net.parameters(), self.net.parameters(), strict=True):
            p.requires_grad_(own.requires_grad)
        (groups,) = self.setup.groups(other.net)
        other.inner = OPTIMIZERS[self.setup.kind](groups)  # type: ignore[arg-type]
        for p in other.net.extra:
            other.inner.add_param_group({"params": [p]})
        other.scaler = GradScaler("cpu", init_scale=2.0, growth_interval=GROWTH_INTERVAL)
        other.scaler.load_state_dict(self.scaler.state_dict())
        other.open()
        return other


class Attached(Raw):
    """Ours under an attached accelerator, with one optimizer or two."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, Net(setup.dtypes)
        self.inners = [OPTIMIZERS[setup.kind](g) for g in setup.groups(self.net)]  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        reset()
        self.accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), self.config)
        _, *self.prepared = self.accelerator.prepare(self.net, *self.inners)

    @property
    def config(self) -> ScalerConfig:
        return ScalerConfig(
            step_mode=self.setup.mode,  # type: ignore[arg-type]
            offload=self.setup.offload,  # type: ignore[arg-type]
            delay_warmup_steps=self.setup.prompt,
            optimizer_threads=1,
            init_scale=INIT_SCALE,
            growth_interval=GROWTH_INTERVAL,
        )

    @property
    def scaler(self) -> Any:  # type: ignore[override]
        return self.accelerator.scaler

    @property
    def optimizers(self) -> list[Any]:
        return self.prepared

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_norm(self, most: float, kind: float) -> Any:
        return self.accelerator.clip_grad_norm_(self.net.parameters(), most, kind)

    def clip_value(self, most: float) -> None:
        self.accelerator.clip_grad_value_(self.net.parameters(), most)

    def close(self) -> None:
        self.accelerator.scaler.abandon_window()
        detach(self.accelerator)

    def reopen(self) -> None:
        saved = self.scaler.state_dict()
        detach(self.accelerator)
        attach(self.accelerator, self.config)
        self.scaler.load_state_dict(saved)


ITERATIONS = st.tuples(
    st.sampled_from(["plain", "plain", "plain", "overflow", "unused", "two"]),
    st.sampled_from(
        ["step", "step", "clip", "value", "zeros", "submit", "submit", "torch_loop", "fails"]
    ),
    st.sampled_from(
        [
            *("nothing", "nothing", "nothing", "read", "edit", "move", "freeze", "evaluate"),
            *("go_back", "add_group", "scheduler_step", "reopen", "save", "state_dict", "collect"),
            *("copy_all", "go_on_in_a_fresh_pair", "step again", "lr"),
        ]
    ),
)
"""How gradients come about, what the window ends with, what happens after it."""


class History(RuleBasedStateMachine):
    """Each rule is one thing that a user may do, on both sides."""

    mode: ClassVar[str] = "overlap"
    offload: ClassVar[str] = "none"
    attached: ClassVar[bool] = False
    runs: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    ours: Any = None

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
        shadow_module.SMALLEST_PART = 1 if parts else 1 << 19
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

    # Both sides.

    @property
    def low(self) -> bool:
        return torch.float16 in self.twin.setup.dtypes

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.ours.net.parameters(), self.twin.net.parameters(), strict=True))

    @property
    def numbers(self) -> range:
        return range(len(self.twin.owned))

    def schedule(self) -> None:
        inner = self.inner_schedule
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.schedules = [
                MultiplicativeLR(o.optimizer if inner else o, lambda _: DECAY)
                for o in self.ours.optimizers
            ]

    def synchronized(self) -> None:
        for optimizer in self.ours.optimizers:
            optimizer.synchronize()
        self.twin.publish_all()

    def loss_of_twin(self, used: Sequence[str]) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.attached):
            return self.twin.loss(self.count, used)

    def has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.twin.net.parameters())

    def is_open(self) -> bool:
        return self.twin.opened and not self.twin.stepped

    def forget_gradients(self) -> None:
        for p, q in self.pairs:
            p.grad = q.grad = None

    @rule(
        used=st.lists(st.sampled_from(LAYERS), min_size=1, unique=True),
        overflow=st.sampled_from([False] * 5 + [True]),
    )
    @precondition(lambda self: not self.clips)
    def backward(self, used: Sequence[str], overflow: bool) -> None:
        self.count += 1
        mine, other = self.ours.loss(self.count, used), self.loss_of_twin(used)
        assert repr(mine.item()) == repr(other.item())
        if not mine.requires_grad:
            return
        factor, again = math.inf if overflow else 1.0, self.is_open()
        self.ours.backward(mine * factor)
        self.twin.backward(other * factor)
        self.seen["backward"] += 1
        self.seen["overflow"] += overflow
        self.seen["several micro-batches"] += again

    @rule(most=st.sampled_from([0.125, 0.01, 100.0]), kind=st.sampled_from([2.0, 2.0, math.inf]))
    @precondition(lambda self: self.is_open() and self.has_gradients())
    def clip_norm(self, most: float, kind: float) -> None:
        if self.low and "norm" in self.clips:
            return  # the second factor would round on its own
        order = self.twin.owned[0] if not self.attached else list(self.twin.net.parameters())

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(masters, most, kind)

        mine, other = self.ours.clip_norm(most, kind), self.twin.clip(order, clip)
        if not math.isfinite(other):
            self.twin.refused = True
            other = torch.tensor(math.inf)
        assert torch.equal(mine, other), (mine, other)
        self.clips.append("norm")
        self.seen["clip_norm"] += 1

    @rule(most=st.sampled_from([2.0**-5, 2.0**-9, 8.0]))
    @precondition(lambda self: self.attached and self.is_open() and self.has_gradients())
    def clip_value(self, most: float) -> None:
        if self.low and "norm" in self.clips:
            return

        def clip(masters: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_value_(masters, most)

        self.ours.clip_value(most)
        self.twin.clip(list(self.twin.net.parameters()), clip)
        self.clips.append("value")
        self.seen["clip_value"] += 1

    @rule(
        zero=st.sampled_from(["none", "none", "zeros", "model none", "model zeros", "nothing"]),
        fails=st.sampled_from([None, None, None, 0, 1, 3]),
        told=st.sampled_from(["synchronize", "state_dict", "evaluation"]),
    )
    def step(self, zero: str, fails: int | None, told: str) -> None:
        skipped = False
        if fails is not None:
            self.synchronized()  # the fault is for this step
        for number in self.numbers:
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
            assert optimizer.step_was_skipped is not stepped
            skipped = skipped or not stepped
            self.seen["skipped"] += not stepped
            self.seen["stepped"] += bool(stepped and grads)
        self.clips = []
        self.zero_grad(zero)
        if skipped and self.twin.setup.split:
            self.zero_grad("none")

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
                    self.ours.loss(0, LAYERS)
        except StepError:
            self.seen["failed"] += 1
            mine = {id(p) for p in FAULT.done}
            return {q for p, q in self.pairs if id(p) in mine}
        return None

    @rule(how=st.sampled_from(["none", "zeros", "model none", "model zeros"]))
    @precondition(lambda self: not self.clips)
    def zero_grad(self, how: str) -> None:
        to_none = how.endswith("none")
        if how.startswith("model"):
            self.ours.net.zero_grad(set_to_none=to_none)
            self.twin.net.zero_grad(set_to_none=to_none)
        elif how != "nothing":
            for number in self.numbers:
                self.ours.optimizers[number].zero_grad(set_to_none=to_none)
                self.twin.zero_grad(number, to_none)
        self.seen[f"zero_grad {how}"] += 1

    @rule(most=st.sampled_from([None, 0.125, 0.01]))
    @precondition(lambda self: not self.attached and self.is_open() and self.has_gradients())
    def submit(self, most: float | None) -> None:
        if self.clips:
            return
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, most or 0.0)

        def update() -> None:
            if most is not None:
                scaler.unscale_(optimizer)
                clip([p for group in optimizer.param_groups for p in group["params"]])
            scaler.step(optimizer)

        optimizer.submit(update)
        scaler.update()
        if most is not None:
            self.twin.clip(self.twin.owned[0], clip)
        self.twin.step(0, submitted=True)
        self.twin.end_window()
        self.seen["submit"] += 1

    @rule(most=st.sampled_from([None, 0.125]))
    @precondition(lambda self: not self.attached and self.is_open() and self.has_gradients())
    def torch_loop(self, most: float | None) -> None:
        """``scaler.unscale_``, torch's clip, ``scaler.step``, ``scaler.update``."""
        if self.clips or self.low:
            return
        optimizer, scaler = self.ours.optimizer, self.ours.scaler

        def clip(params: list[Tensor]) -> Any:
            return torch.nn.utils.clip_grad_norm_(params, most or 0.0)

        if most is not None:
            scaler.unscale_(optimizer)
            clip([p for group in optimizer.param_groups for p in group["params"]])
            self.twin.clip(self.twin.owned[0], clip)
        scaler.step(optimizer)
        scaler.update()
        assert self.twin.step(0) is not optimizer.step_was_skipped
        self.twin.end_window()
        self.zero_grad("none")
        self.seen["torch's loop"] += 1

    @rule(number=st.integers(0, 5), lr=st.sampled_from([0.03, 0.01, 0.05]), inner=st.booleans())
    def change_lr(self, number: int, lr: float, inner: bool) -> None:
        optimizer = self.ours.optimizers[number % len(self.numbers)]
        groups = (optimizer.optimizer if inner else optimizer).param_groups
        groups[number % len(groups)]["lr"] = lr
        theirs = self.twin.optimizers[number % len(self.numbers)].param_groups
        theirs[number % len(groups)]["lr"] = lr
        self.seen["lr"] += 1

    @rule()
    def scheduler_step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for schedule in self.schedules:
                schedule.step()
        for optimizer in self.twin.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= DECAY
        self.seen["scheduler"] += 1

    # What looks at parameters, or changes them from outside.

    @rule(which=st.integers(0, 7))
    def read(self, which: int) -> None:
        """One parameter, through an operation; in delayed that is no fence."""
        p, q = self.pairs[which % len(self.pairs)]
        assert torch.equal(p + 0, q + 0)
        self.seen["read"] += 1

    @rule(training=st.booleans())
    def evaluate(self, training: bool) -> None:
        self.count += 1
        self.ours.net.train(training)
        self.twin.publish_all()
        with torch.no_grad():
            mine, other = self.ours.loss(self.count, LAYERS), self.loss_of_twin(LAYERS)
        self.ours.net.train()
        assert repr(mine.item()) == repr(other.item())
        self.seen["evaluation"] += 1

    @rule()
    def synchronize(self) -> None:
        self.synchronized()
        for p, q in self.pairs:
            assert torch.equal(p, q)
        self.seen["synchronize"] += 1

    @rule(which=st.integers(0, 7), how=st.sampled_from(["mul", "add", "copy", "element"]))
    def edit(self, which: int, how: str) -> None:
        if self.twin.setup.mode == "delayed":
            self.synchronized()
        for p in self.pairs[which % len(self.pairs)]:
            with torch.no_grad():
                if how == "mul":
                    p.mul_(0.75)
                elif how == "add":
                    p.add_(2.0**-12)
                elif how == "copy":
                    p.copy_(torch.full_like(p, 0.3))
                else:
                    p.view(-1)[0] = 0.1
        self.seen["edit"] += 1

    @rule(how=st.sampled_from(["one", "apply"]), which=st.integers(0, 7))
    def move(self, how: str, which: int) -> None:
        if self.twin.setup.mode == "delayed":
            self.synchronized()
        if how == "apply":
            self.ours.net._apply(torch.clone)
        else:
            p, _ = self.pairs[which % len(self.pairs)]
            p.data = p.data.clone()
        self.seen["move"] += 1

    @rule(which=st.integers(0, 7))
    @precondition(lambda self: not self.clips)
    def freeze(self, which: int) -> None:
        self.zero_grad("none")  # torch steps what has a gradient, frozen or not
        for p in self.pairs[which % len(self.pairs)]:
            p.requires_grad_(not p.requires_grad)
            p.grad = None
        self.seen["freeze"] += 1

    @rule()
    @precondition(lambda self: not self.clips and len(self.twin.net.extra) < 2)
    def add_group(self) -> None:
        p = self.ours.net.grow()
        self.ours.optimizers[-1].add_param_group({"params": [p], "lr": 0.03})
        self.twin.add_group()
        self.saved = None
        self.schedule()
        self.seen["add_param_group"] += 1

    @rule()
    def collect(self) -> None:
        gc.collect(0)
        self.seen["gc"] += 1

    # What is saved.

    @rule()
    def state_dict(self) -> None:
        self.twin.publish_all()
        ours = self.ours.net.state_dict()
        for name, value in self.twin.net.state_dict().items():
            assert torch.equal(ours[name], value), name
        for number in self.numbers:
            self.compare_state(number, self.ours.optimizers[number].state_dict())
        self.seen["state_dict"] += 1

    def compare_state(self, number: int, saved: dict[str, Any]) -> None:
        self.twin.follow(number)
        for index, (p, entry) in enumerate(
            zip(self.twin.owned[number], self.twin.entries(number), strict=True)
        ):
            mine = dict(saved["state"].get(index, {}))
            master = mine.pop("master", None)
            assert _plain(mine).keys() == _plain(entry).keys(), (index, mine, entry)
            assert same(_plain(mine), _plain(entry)), (index, mine, entry)
            if master is not None:
                assert torch.equal(master, self.twin.masters[p]), index

    @rule()
    @precondition(lambda self: not self.is_open() and not self.clips)
    def save(self) -> None:
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
        self.seen["save"] += 1

    @rule(model_first=st.booleans())
    @precondition(lambda self: self.saved is not None and not self.is_open() and not self.clips)
    def go_back(self, model_first: bool) -> None:
        """Load what was saved some time ago into the same pair."""
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
        self.seen["go back"] += 1

    @torch.no_grad()
    def restore(self, states: list[Any]) -> None:
        before = copy.deepcopy(self.saved[-1])
        twin = self.twin
        twin.waiting = [False for _ in twin.waiting]
        twin.scale, twin.good = before.scale, before.good
        for number in self.numbers:
            counts = [e["step"] for e in states[number]["state"].values() if "step" in e]
            if counts:  # a warm-up goes on where it was saved
                twin.steps[number] = int(max(counts))
            state = before.optimizers[number].state_dict()
            twin.optimizers[number].load_state_dict(state)
            for index, (p, q) in enumerate(
                zip(twin.owned[number], before.owned[number], strict=True)
            ):
                p.copy_(q)
                kept = "master" in states[number]["state"].get(index, {})
                twin.masters[p].copy_(before.masters[q] if kept else q)
                if not twin.has_master(p):  # torch casts what it loads
                    twin.round_state(number, p)
            twin.follow(number)

    @rule()
    @precondition(lambda self: not self.attached and not self.is_open() and not self.clips)
    def go_on_in_a_fresh_pair(self) -> None:
        self.save()
        net, states, _, _ = copy.deepcopy(self.saved)
        old, self.ours = self.ours, self.ours.fresh()
        self.ours.net.load_state_dict(net)
        self.ours.optimizer.load_state_dict(states[0])
        old.close()
        self.twin.net.zero_grad()
        self.started_over()
        self.restore(states)
        self.seen["fresh pair"] += 1

    def started_over(self) -> None:
        self.twin.steps = [0 for _ in self.numbers]
        self.twin.taken = [set() for _ in self.numbers]
        self.schedule()

    @rule(stay=st.booleans())
    @precondition(lambda self: not self.attached and not self.is_open() and not self.clips)
    def copy_all(self, stay: bool) -> None:
        """A deep copy goes on; or the original does, and the copy has not minded."""
        self.forget_gradients()
        other = copy.copy(self.ours)
        other.optimizer = copy.deepcopy(self.ours.optimizer)
        other.net, other.inner = other.optimizer.model, other.optimizer.optimizer
        other.scaler = other.optimizer.scaler
        self.twin.follow(0)
        if stay:
            other.close()
        else:
            self.ours.close()
            self.ours = other
            self.twin.taken = [set()]
            self.schedule()
        self.seen["copy"] += 1

    @rule()
    @precondition(lambda self: not self.clips)
    def reopen(self) -> None:
        twin = self.twin
        if self.attached and self.is_open():
            return
        if self.low and not any(map(twin.has_master, twin.net.parameters())):
            return
        if self.attached:
            self.ours.reopen()
        else:
            self.ours.close()
            assert {type(p) for p in self.ours.net.parameters()} == {nn.Parameter}
            self.ours.open()
        twin.forget_masters()
        self.started_over()
        if self.attached:
            twin.end_window()  # with the scaler
        self.seen["reopen"] += 1

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


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """State without the dtype of what was saved in less than float32."""
    return {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in entry.items()
        if v is not None
    }


EVENTS = (
    *("backward", "overflow", "several micro-batches", "clip_norm", "stepped", "skipped"),
    *("failed", "lr", "scheduler", "read", "evaluation", "synchronize", "edit", "move"),
    *("freeze", "add_param_group", "gc", "state_dict", "save", "go back", "reopen"),
    *("zero_grad none", "zero_grad zeros", "zero_grad model none"),
)
OF_ATTACHED = ("clip_value", "refused")
OF_RAW = ("submit", "torch's loop", "fresh pair", "copy")
MODES = [("overlap", "none"), ("overlap", "cpu"), ("delayed", "none"), ("delayed", "cpu")]
EXAMPLES, STEPS, LEAST = 80, 8, 5


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
