"""The order of a boundary on a device: prepare, launch, then read; and that nothing else differs.

The reference waits for each check at once, as on a device without streams.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import DEVICE, KIND
from support import mlp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_scaler import AsyncOptimizer, GradScaler, UnsupportedError
from accel_scaler.optimizer_step import overflow_check
from accel_scaler.optimizer_step.blocks import Run
from accel_scaler.optimizer_step.boundary import Boundary
from accel_scaler.optimizer_step.replica import Replica
from accel_scaler.scaling import SentCheck

FULL, LOW = torch.float32, torch.bfloat16
STEPS = 8
KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "unfused": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "rate on the device": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01, device=DEVICE), fused=True
    ),
}


class Training:
    """A model, its optimizer and their boundary; bfloat16 parameters are stepped by masters."""

    def __init__(
        self, kind: str, dtype: torch.dtype = FULL, scaled: bool = True, spikes: Any = None
    ) -> None:
        torch.manual_seed(0)
        self.model = mlp(16).to(DEVICE, dtype)
        inner = KINDS[kind](self.model.parameters())
        self.scaler = GradScaler(KIND, init_scale=64.0, growth_interval=3, enabled=scaled)
        self.boundary = Boundary(self.scaler, torch.device(DEVICE), skip_norm_above=spikes)
        if dtype is LOW:
            self.holder = AsyncOptimizer(inner, self.model, step_mode="sync", master_weights="fp32")
        self.optimizer = inner
        self.boundary.add(inner)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, step: int, factor: float = 1.0) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = self.model(x.to(self.params[0].dtype)).float().square().mean() * factor
        self.boundary.before_backward(loss)
        self.scaler.scale(loss).backward()
        self.boundary.after_backward()

    def numbers(self) -> list[Any]:
        """All that a step can change."""
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.params, *(v for e in state.values() for v in e.values())]
        values = [
            t.detach().float().cpu().tolist() if isinstance(t, Tensor) else t for t in tensors
        ]
        return [values, self.scaler.get_scale(), self.scaler.read_state()]


class Events(TorchDispatchMode):
    """The operations of a block, and each wait of the host for a check."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        waits = SentCheck.is_finite.fget
        assert waits is not None
        seen: set[int] = set()

        def is_finite(check: SentCheck) -> bool:
            if id(check) not in seen:
                seen.add(id(check))
                self.names.append("wait")
            return bool(waits(check))

        monkeypatch.setattr(SentCheck, "is_finite", property(is_finite))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not tensors or any(t.device.type == KIND for t in tensors):
            self.names.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}
"""Operations for whose numbers the host waits."""


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "update"),
    [
        ("adamw", FULL, "_fused_adamw_"),
        ("amsgrad", FULL, "_fused_adam_"),
        ("sgd", FULL, "_fused_sgd_"),
        ("plain sgd", FULL, "_fused_sgd_"),
        ("adamw", LOW, "_fused_adamw_"),
        ("sgd", LOW, "_fused_sgd_"),
    ],
)
def test_the_update_is_enqueued_before_the_host_waits(
    kind: str, dtype: torch.dtype, update: str, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it waits for nothing else; masters reach the model once the outcome is known."""
    training = Training(kind, dtype)
    for step in range(STEPS):
        training.backward(step)
        with monkeypatch.context() as patch, Events(patch) as events:
            if clip:
                training.boundary.clipping.clip_norm(training.params, 0.5)
            assert training.boundary.step(training.optimizer)
        training.optimizer.zero_grad()
        names = events.names
        if step < 2:  # state and lists are made
            continue
        first = names.index("wait")
        assert names.index(update) < first
        assert names.count("wait") == (1 if dtype is FULL else 2)  # once for both of them
        assert WAITS.isdisjoint(names)
        copies = [i for i, name in enumerate(names) if name == "_foreach_copy_"]
        assert (max(copies, default=0) > first) is (dtype is LOW)


LAUNCHES = {
    ("adamw", FULL, True): 23,
    ("adamw", FULL, False): 20,
    ("adamw", LOW, True): 42,
    ("adamw", LOW, False): 36,
}
"""Operations of one boundary, whatever the number of parameters."""


@pytest.mark.parametrize(("kind", "dtype", "clip"), LAUNCHES)
def test_a_boundary_launches_no_more_than_it_did(
    kind: str, dtype: torch.dtype, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(kind, dtype)
    for step in range(4):
        training.backward(step)
        with monkeypatch.context() as patch, Events(patch) as events:
            if clip:
                training.boundary.clipping.clip_norm(training.params, 0.5)
            training.boundary.step(training.optimizer)
        training.optimizer.zero_grad()
    views = ("detach", "view", "as_strided", "unbind", "reshape", "flatten", "alias", "split")
    found = Counter(n for n in events.names if n not in (*views, "wait"))
    assert found.total() <= LAUNCHES[kind, dtype, clip], found


# Whatever a script does between clip and step, the numbers are those of a host that waits.


def overflow(training: Training) -> None:
    training.params[1].grad.view(-1)[0] = float("inf")


def huge(training: Training) -> None:
    """All elements are finite, their norm is past float32."""
    training.params[0].grad.fill_(1e25)


def edit(training: Training) -> None:
    training.params[0].grad.mul_(0.5)


def cure(training: Training) -> None:
    for p in training.params:
        p.grad.nan_to_num_(0.125, 0.125, 0.125)


def drop(training: Training) -> None:
    training.optimizer.zero_grad()


def drop_one(training: Training) -> None:
    training.params[0].grad = None


def replace(training: Training) -> None:
    training.params[0].grad = training.params[0].grad.clone()


def clip_values(training: Training) -> None:
    training.boundary.clipping.clip_value(training.params, 0.01)


def clip_again(training: Training) -> None:
    training.boundary.clipping.clip_norm(training.params[:2], 0.1)


def ask(training: Training) -> None:
    training.scaler.get_overflow_flag(training.optimizer)


def edit_unseen(training: Training) -> None:
    training.params[0].data.mul_(0.5)


def move_count(training: Training) -> None:
    for entry in training.optimizer.state.values():
        if "step" in entry:
            entry["step"] += 1


def nothing(training: Training) -> None:
    pass


BEFORE = [nothing, overflow, huge]
EDITS = [edit, cure, drop_one, replace]
BETWEEN = [nothing, *EDITS, drop, clip_values, clip_again, ask, edit_unseen, move_count]


def run(
    training: Training,
    before: Callable[[Training], None],
    between: Callable[[Training], None],
    limit: float = 0.5,
) -> list[Any]:
    found: list[Any] = []
    for step in range(STEPS):
        training.backward(step)
        is_odd = step in (0, 3, 4)
        try:
            if is_odd:
                before(training)
            norm = training.boundary.clipping.clip_norm(training.params, limit)
            if is_odd:
                between(training)
            found.append((float(norm), training.boundary.step(training.optimizer)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        training.optimizer.zero_grad()
        found.append(training.numbers())
    return found


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [("adamw", FULL), ("sgd", LOW), ("unfused", FULL)])
def test_a_late_outcome_changes_no_number(
    kind: str,
    dtype: torch.dtype,
    scaled: bool,
    before: Callable[[Training], None],
    between: Callable[[Training], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if before is huge and between in EDITS:
        pytest.skip("after an edit nothing tells a norm past float32 from an overflow")
    found = run(Training(kind, dtype, scaled), before, between)
    monkeypatch.setattr(overflow_check, "can_send", lambda device: False)
    expected = run(Training(kind, dtype, scaled), before, between)
    assert str(found) == str(expected)  # NaN is equal to itself


@pytest.mark.parametrize("before", [nothing, overflow])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_late_outcome_of_what_the_optimizers_own_step_does_changes_no_number(
    before: Callable[[Training], None], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our calls of the kernel take no such rate."""
    found = run(Training("rate on the device", FULL, scaled), before, nothing)
    monkeypatch.setattr(overflow_check, "can_send", lambda device: False)
    expected = run(Training("rate on the device", FULL, scaled), before, nothing)
    assert str(found) == str(expected)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [FULL, LOW])
def test_a_clip_that_only_returns_the_norm(
    dtype: torch.dtype,
    scaled: bool,
    before: Callable[[Training], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``max_norm=inf``: of a norm past float32 its factor is no number."""
    found = run(Training("adamw", dtype, scaled), before, nothing, math.inf)
    monkeypatch.setattr(overflow_check, "can_send", lambda device: False)
    assert str(found) == str(run(Training("adamw", dtype, scaled), before, nothing, math.inf))
    assert "nan" not in str(found[1::2])


@pytest.mark.parametrize("limit", [0.5, "1.5x"])
@pytest.mark.parametrize("dtype", [FULL, LOW])
def test_a_spike_changes_no_number(
    limit: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(training: Training) -> list[Any]:
        found = []
        for step in range(24):
            training.backward(step, 20.0 if step == 20 else 1.0)
            found.append(training.boundary.step(training.optimizer))
            training.optimizer.zero_grad()
            found.append(training.numbers())
        return found

    found = losses(Training("adamw", dtype, spikes=limit))
    monkeypatch.setattr(overflow_check, "can_send", lambda device: False)
    assert str(found) == str(losses(Training("adamw", dtype, spikes=limit)))
    assert False in found


@pytest.mark.parametrize("dtype", [FULL, LOW])
def test_two_optimizers_that_are_clipped_together(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them overflows: neither steps."""

    def losses() -> list[Any]:
        pair, found = [Training("adamw", dtype), Training("sgd", dtype)], []
        one, two = pair
        two.boundary.scaler.release(two.optimizer)
        one.boundary.add(two.optimizer)
        for step in range(STEPS):
            loss = sum(p.float().square().sum() * (step + 1) for t in pair for p in t.params)
            one.boundary.before_backward(loss)
            one.scaler.scale(loss).backward()
            one.boundary.after_backward()
            if step in (0, 4):
                overflow(two)
            norm = one.boundary.clipping.clip_norm([*one.params, *two.params], 0.5)
            done = [one.boundary.step(t.optimizer) for t in pair]
            for t in pair:
                t.optimizer.zero_grad()
            found += [float(norm), done, one.numbers(), two.numbers()]
        return found

    found = losses()
    monkeypatch.setattr(overflow_check, "can_send", lambda device: False)
    assert str(found) == str(losses())
    assert [False, False] in found


@pytest.mark.parametrize(
    ("dtype", "when"), [(FULL, "it waits"), (LOW, "it waits"), (LOW, "masters are published")]
)
def test_an_interrupt_once_the_update_is_enqueued_ends_the_window(
    dtype: torch.dtype, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device goes on, so the update is made, once, and the model has it."""

    def trained(is_interrupted: bool) -> Training:
        training = Training("adamw", dtype)
        for step in range(5):
            training.backward(step)
            if step == 3 and is_interrupted:
                interrupt(training)
            else:
                assert training.boundary.step(training.optimizer)
            training.optimizer.zero_grad()
        return training

    def interrupt(training: Training) -> None:
        waits, publish, calls = SentCheck.is_finite.fget, Run.publish, []
        assert waits is not None

        def is_finite(check: SentCheck) -> bool:
            calls.append(check)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return bool(waits(check))

        def published(run: Run, grads: Any) -> None:
            calls.append(run)
            if len(calls) == 1:
                raise KeyboardInterrupt
            publish(run, grads)

        index = training.scaler.window.index
        with monkeypatch.context() as patch:
            if when == "it waits":
                patch.setattr(SentCheck, "is_finite", property(is_finite))
            else:
                patch.setattr(Run, "publish", published)
            with pytest.raises(KeyboardInterrupt):
                training.boundary.step(training.optimizer)
        assert training.scaler.window.index == index + 1
        assert "was interrupted: it was made" in caplog.text

    found, expected = trained(True), trained(False)
    for one, other in zip(found.params, expected.params, strict=True):
        assert torch.equal(one, other)
    assert str(found.numbers()[0]) == str(expected.numbers()[0])


def test_a_refused_update_is_no_interrupted_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step refuses it, in an ordinary window."""
    training = Training("adamw", LOW)
    for step in range(3):
        training.backward(step)
        training.boundary.step(training.optimizer)
        training.optimizer.zero_grad()
    training.backward(3)

    def refused(*_: object) -> None:
        raise UnsupportedError("no")

    monkeypatch.setattr(Replica, "prepare", refused)
    with pytest.raises(UnsupportedError, match="no"):
        training.boundary.step(training.optimizer)
    assert training.scaler.window.closed
    assert "interrupted" not in caplog.text
