"""``step_mode="auto"`` beside ``sync``: the same numbers, whatever a made-up clock says."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from async_support import Clock, take_turns
from support import mlp, same, weights
from telemetry_runs import INF, attached, loss_of, sgd, windows_of

from accel_scaler import AsyncOptimizer, UnsupportedError
from accel_scaler.async_optimizer import async_stepper
from accel_scaler.optimizer_step import Arena, InlineStepper, stepper_of
from accel_scaler.optimizer_step.mode_choice import FEW, LONGEST_TURN, TURN
from accel_scaler.report.findings import chosen_mode
from accel_scaler.report.reader import read_run

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS, SKIPPED = 2 * FEW * TURN + 2 * LONGEST_TURN + 12, 7
KINDS: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "float32": (torch.float32, {}, "fp16"),
    "folded": (torch.float32, {"fold_unscale": True}, "fp16"),
    "without a scale": (torch.float32, {}, "no"),
    "float16 with masters": (torch.float16, {}, "fp16"),
    "bfloat16 in place": (torch.bfloat16, {}, "bf16"),
    "state on the host": (torch.float32, {"offload": "cpu"}, "fp16"),
}


def train(mode: str, kind: str, optimizer_of: Any, path: Path | None = None) -> tuple[Any, Any]:
    """What is left of a run: weights and state; one window overflows."""
    dtype, settings, precision = KINDS[kind]
    with attached(path, precision, step_mode=mode, **settings) as accelerator:
        plain = mlp().to(dtype)
        model, optimizer = accelerator.prepare(plain, optimizer_of(plain.parameters()))
        if isinstance(async_stepper.clock, Clock):
            async_stepper.clock.stepper = stepper_of(optimizer)
        for number in range(WINDOWS):
            factor = INF if number == SKIPPED else 1.0
            accelerator.backward(loss_of(model, number) * factor)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert optimizer.step_was_skipped == (number == SKIPPED)
            optimizer.zero_grad()
        state = optimizer.state_dict()
        return weights(plain), state


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@pytest.mark.parametrize("beside", [0.8, 1.25])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_sync_and_the_choice_is_told(
    kind: str,
    beside: float,
    optimizer_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_seed(0)
    expected = train("sync", kind, optimizer_of)
    clock, chosen = Clock(beside), "overlap" if beside < 1 else "sync"
    monkeypatch.setattr(async_stepper, "clock", clock)
    path = tmp_path / "run.jsonl"
    found = train("auto", kind, optimizer_of, path)  # said at a level that is shown by default
    assert same(found, expected)
    assert {True, False} == set(clock.modes)
    assert set(clock.modes[-8:]) == {chosen == "overlap"}
    (told,) = [r.getMessage() for r in caplog.records if "step_mode='auto'" in r.getMessage()]
    for part in (repr(chosen), "1000 ms in 'sync'", f"{beside * 1e3:g} ms in 'overlap'"):
        assert part in told
    assert f"({100 * (beside - 1):+.1f} %)" in told
    names = ["overlap" if mode else "sync" for mode in clock.modes]
    recorded = [line.get("step_mode") for line in windows_of(path)]
    assert recorded == [None if n == SKIPPED else name for n, name in enumerate(names)]
    (by,) = [line["mode_seconds"] for line in windows_of(path) if "mode_seconds" in line]
    assert by == pytest.approx([1.0, beside])
    finding = chosen_mode(read_run(str(path)))
    assert finding is not None
    faster = "faster" if beside < 1 else "slower"
    assert f"overlap {faster} than sync by {100 * abs(beside - 1):.0f} %" in finding.title
    ran = recorded.count("overlap")
    assert f"{ran} of {WINDOWS - 1} windows ran in overlap" in finding.title


def test_a_window_in_sync_is_stepped_as_sync_steps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed over, so it costs what ``sync`` costs."""
    clock, stepped = Clock(1.25), []
    monkeypatch.setattr(async_stepper, "clock", clock)
    step = InlineStepper.step
    monkeypatch.setattr(
        InlineStepper, "step", lambda self, *rest: (stepped.append(1), step(self, *rest))[1]
    )
    train("auto", "float32", adamw)
    assert len(stepped) == clock.modes.count(False) - (not clock.modes[SKIPPED])


def test_a_turn_moves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways use it where it is, so that trying costs no more than the slower way does."""
    clock, moved = Clock(1.0), []
    monkeypatch.setattr(async_stepper, "clock", clock)
    adopt = Arena.adopt
    monkeypatch.setattr(
        Arena, "adopt", lambda *args: (moved.append(len(clock.modes)), adopt(*args))
    )
    train("auto", "float32", adamw)
    turns = sum(a != b for a, b in pairwise(clock.modes))
    assert turns > 4
    # As each way is first used, and again once there is state.
    assert max(moved) <= 2 * TURN + 2


Edit = Callable[[Any, list[Any], int], None]
"""Changes an optimizer before the step of a window; may put something aside in the list."""


def cleared(optimizer: Any, aside: list[Any], window: int) -> None:
    if window == 2:
        optimizer.state.clear()


def momentum(optimizer: Any, aside: list[Any], window: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9 if window % 3 else 0.0
    if window % 3 == 0:
        optimizer.state.clear()


def put_back(optimizer: Any, aside: list[Any], window: int) -> None:
    p = optimizer.param_groups[0]["params"][0]
    if window == 1:
        aside.append(optimizer.state.pop(p))
    if window == 3:
        optimizer.state[p] = aside.pop()


def exchanged(optimizer: Any, aside: list[Any], window: int) -> None:
    """Two parameters' state, the entries in their order."""
    if window in (2, 3):
        a, _, b, *_ = optimizer.param_groups[0]["params"]
        entries = list(optimizer.state.items())
        optimizer.state.clear()
        for p, entry in entries:
            optimizer.state[b if p is a else a if p is b else p] = entry


def replaced(optimizer: Any, aside: list[Any], window: int) -> None:
    if window == 2:
        optimizer.load_state_dict(optimizer.state_dict())
    for p in optimizer.param_groups[0]["params"] if window == 3 else ():
        optimizer.state[p] = deepcopy(optimizer.state[p])
    for entry in optimizer.state.values() if window == 4 else ():
        for value in entry.values():
            value.data = value.data * 1.0


def added(optimizer: Any, aside: list[Any], window: int) -> None:
    if window == 2:
        params = optimizer.param_groups[0]["params"]
        last = [params.pop(), params.pop()]
        optimizer.add_param_group({"params": last, "lr": 0.02})


EDITS = (cleared, momentum, put_back, exchanged, replaced, added)


@pytest.mark.parametrize(
    ("cls", "edit"),
    [
        *((torch.optim.Adam, edit) for edit in EDITS if edit is not momentum),
        # Where only some parameters have a buffer, torch's fused SGD raises.
        *((torch.optim.SGD, edit) for edit in EDITS if edit is not put_back),
    ],
)
@pytest.mark.parametrize("ways", ["IBIIBB", "IBBIIB", "BIBIBI", "IIBBII", "IBIBIB"])
def test_state_that_is_changed_is_stepped_as_torch_does(cls: Any, ways: str, edit: Edit) -> None:
    """Both ways use the state where the other has laid it out."""
    settings = {"momentum": 0.9} if cls is torch.optim.SGD and edit is not added else {}
    shapes = [(8, 8), (8,), (8, 8), (4,)]
    ours, plain = ([torch.nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    reference = cls(plain, lr=0.01, fused=True, **settings)
    with attached(step_mode="auto", precision="no") as accelerator:
        optimizer = accelerator.prepare(cls(ours, lr=0.01, fused=True, **settings))
        stepper = take_turns(optimizer, ways)
        asides: tuple[list[Any], list[Any]] = [], []
        for window in range(len(ways)):
            r = torch.Generator().manual_seed(window)
            for p, q in zip(ours, plain, strict=True):
                p.grad = torch.randn(p.shape, generator=r)
                q.grad = p.grad.clone()
            edit(optimizer.optimizer, asides[0], window)
            edit(reference, asides[1], window)
            accelerator.gradient_state._set_sync_gradients(True)
            optimizer.step()
            reference.step()
            stepper.synchronize()
            assert all(map(torch.equal, ours, plain)), window
        assert same(optimizer.state_dict(), reference.state_dict())


def test_parameters_that_share_memory_are_stepped_in_the_optimizers_order() -> None:
    """Which is not the model's; each step reads what the one before has written."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        memory = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
        layers = [torch.nn.Linear(4, 3, bias=False) for _ in range(3)]
        for layer in layers:
            layer.weight = torch.nn.Parameter(memory)
        params = [layer.weight for layer in reversed(layers)]
        cls: Any = torch.optim.SGD
        return torch.nn.ModuleList(layers), cls(
            params, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True
        )

    with attached(step_mode="auto", precision="no") as accelerator:
        (model, optimizer), (plain, reference) = accelerator.prepare(*made()), made()
        stepper = take_turns(optimizer, "IIBIIBII")
        x = torch.linspace(-0.5, 1.0, 4)
        for _ in range(8):
            for net in (model, plain):
                factors = (1.3, -0.7, 2.1)
                sum(
                    (f * layer(x)).sin().sum() for f, layer in zip(factors, net, strict=True)
                ).backward()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
            stepper.synchronize()
            assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_optimizer_that_cannot_run_beside_stays_in_sync() -> None:
    class Own(torch.optim.SGD):
        pass

    with attached(step_mode="auto") as accelerator:
        plain = mlp()
        _, optimizer = accelerator.prepare(plain, Own(plain.parameters(), lr=0.1))
        assert isinstance(stepper_of(optimizer), InlineStepper)


def test_two_optimizers_each_choose_and_a_detach_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(mode: str) -> Any:
        with attached(step_mode=mode) as accelerator:
            plain = mlp()
            model = accelerator.prepare(plain)
            first, second = (
                accelerator.prepare(sgd(part.parameters())) for part in (plain[0], plain[2])
            )
            for number in range(WINDOWS):
                accelerator.backward(loss_of(model, number))
                first.step()
                if number % 3:
                    second.step()
                first.zero_grad()
                second.zero_grad()
        assert type(stepper_of(first.optimizer)) is InlineStepper
        return weights(plain)

    assert torch.equal(run("auto"), run("sync"))


def test_an_async_optimizer_takes_it_and_submits_in_it() -> None:
    def run(mode: str) -> Any:
        plain = mlp()
        inner = sgd(plain.parameters(), lr=0.01)
        with AsyncOptimizer(inner, plain, step_mode=mode) as optimizer:
            for number in range(WINDOWS):
                loss_of(plain, number).backward()
                if number % 4 == 3:
                    optimizer.submit(optimizer.step)
                else:
                    optimizer.step()
                optimizer.zero_grad()
        return weights(plain)

    assert torch.equal(run("auto"), run("sync"))


def test_after_an_error_in_a_step_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch, in a window in sync; the gradients are still there."""
    with attached(step_mode="auto", precision="no") as accelerator:
        plain = mlp()
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        inner = optimizer.optimizer
        handle = inner.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises((ZeroDivisionError, UnsupportedError)):
            optimizer.step()
        handle.remove()
        before = weights(plain)
        for number in range(WINDOWS):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, number))
            optimizer.step()
        assert not torch.equal(weights(plain), before)
