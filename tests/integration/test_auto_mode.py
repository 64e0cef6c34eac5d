"""``step_mode="auto"`` beside ``sync``: the same numbers, whatever a made-up clock says."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from async_support import Clock
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
    finding = chosen_mode(read_run(str(path)))
    assert finding is not None
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


def test_state_replaced_in_either_way_is_stepped_as_in_sync() -> None:
    """By a load, an edit through ``.data``, a new group; what was taken out stays as it is."""

    def run(mode: str) -> Any:
        taken = []
        with attached(step_mode=mode) as accelerator:
            plain, later = mlp(), torch.nn.Parameter(torch.ones(3))
            model, optimizer = accelerator.prepare(plain, adamw(plain.parameters()))
            for number in range(WINDOWS):
                accelerator.backward(loss_of(model, number) + later.sum())
                optimizer.step()
                optimizer.zero_grad()
                later.grad = None
                stepper_of(optimizer).synchronize()
                if number % 5 == 2:
                    optimizer.load_state_dict(optimizer.state_dict())
                entries, first = optimizer.optimizer.state, plain[0].weight
                if number % 5 == 3:
                    taken.append([entries[first], deepcopy(entries[first])])
                    entries[first] = deepcopy(entries[first])
                if number % 7 == 3:
                    entries[first]["exp_avg"].data = entries[first]["exp_avg"].data * 0.5
                if number == 11:
                    optimizer.add_param_group({"params": [later]})
            return weights(plain), later.detach().clone(), optimizer.state_dict(), taken

    found, expected = run("auto"), run("sync")
    assert same(found, expected)
    assert all(same(now, then) for now, then in found[-1])


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
