"""``make soak`` finds what it is for: leaks and wrong results put in on purpose, and real ones."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import soak
import torch
from accelerate import Accelerator
from async_support import reset
from soak import Sample

from accel_scaler import AsyncOptimizer, ScalerConfig, attach, detach
from accel_scaler.async_optimizer.worker import Worker
from accel_scaler.scaling.update_rule import Rule, ScaleState

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

Count = Counter[str]


def samples(*rss: float, every: float = 60.0, **fixed: Any) -> list[Sample]:
    values = {"threads": 1, "fds": 6, "objects": 2, **fixed}
    return [Sample(seconds=every * n, memory_mib=m, **values) for n, m in enumerate(rss, 1)]


FIRST = samples(300.0, every=0.0)[0]


def noisy(minutes: int, slope: float) -> list[Sample]:
    """An hour's slope in MiB, half a MiB of noise on it, 20 MiB more in the first quarter."""
    r = random.Random(5)
    warm = [20.0 * min(1.0, 4 * n / minutes) for n in range(minutes)]
    return samples(*(300 + w + slope * n / 60 + r.gauss(0, 0.5) for n, w in enumerate(warm)))


@pytest.mark.parametrize("minutes", [20, 60])
@pytest.mark.parametrize(("slope", "grows"), [(0.0, False), (3.0, False), (30.0, True)])
def test_memory_grows_where_it_goes_on_after_the_warm_up(
    minutes: int, slope: float, grows: bool
) -> None:
    found = soak.grown(FIRST, noisy(minutes, slope))
    assert [s.split(":")[0] for s in found] == ["memory"] * grows


def test_one_step_is_no_growth() -> None:
    flat = noisy(24, 0.0)
    step = [replace(s, memory_mib=s.memory_mib + 4.5 * (n > 13)) for n, s in enumerate(flat)]
    assert soak.slope(step[6:])[0] > 2 * soak.MOST_MIB_AN_HOUR
    assert soak.grown(FIRST, step) == []


def test_a_growth_that_is_stated_is_the_least_squares_one() -> None:
    line = samples(*(300.0 + 0.5 * n for n in range(10)))
    rise, error = soak.slope(line)
    assert rise == pytest.approx(30.0)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_a_megabyte_or_two_are_noise_and_sixteen_are_not() -> None:
    short = [300 + 0.2 * n for n in range(9)]
    assert soak.grown(FIRST, samples(*short, every=10.0)) == []
    assert soak.grown(FIRST, samples(*(300 + 2.0 * n for n in range(9)), every=10.0)) != []


@pytest.mark.parametrize("what", ["threads", "fds", "objects"])
def test_one_more_at_the_end_is_growth_and_one_in_between_is_none(what: str) -> None:
    more = {what: getattr(FIRST, what) + 1}
    steady = samples(*[300.0] * 8)
    late = steady[:6] + samples(*[300.0] * 8, **more)[6:]
    (sentence,) = soak.grown(FIRST, late)
    assert sentence.startswith(f"{what}: {getattr(FIRST, what)} at the start")
    assert soak.grown(FIRST, late[::-1]) == []


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Each reading walks every object; those of the tests before need not be among them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


TURNS = 12


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[soak.Turn], None]:
    """Make the soak run this one kind, and end after some turns, however long they take."""

    def replace(run: soak.Turn) -> None:
        def one(r: random.Random, seen: Count) -> None:
            run(r, seen)
            seen["histories"] += 1
            if seen["histories"] == TURNS:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(soak, "KINDS", {"injected": (one, 1)})

    return replace


Only = Callable[[soak.Turn], None]


def test_three_kinds_run_in_turn_and_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(minutes=0.02, seed=3, every=0.5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " min  " in lines[0]
    assert " restored  " in lines[1]
    assert lines[-1].startswith("passed, seed 3, ")
    assert any(line.strip().startswith("last quarter: ") for line in lines)


def test_each_kind_says_what_it_did() -> None:
    for kind in soak.KINDS:
        seen: Count = Counter()
        assert soak.turn(kind, 0, 1, seen) is None
        assert seen["histories"] == soak.KINDS[kind][1]
        assert seen["operations"] > seen["histories"]
        assert (seen["window"] > 0) is (kind != "calls")


def test_a_thread_left_behind_is_found(only: Only, capsys: pytest.CaptureFixture[str]) -> None:
    end, left = threading.Event(), list[threading.Thread]()

    def leak(r: random.Random, seen: Count) -> None:
        left.append(threading.Thread(target=end.wait, args=(60,), daemon=True))
        left[-1].start()

    only(leak)
    try:
        assert soak.soak(minutes=60.0, seed=0, every=0.0) == 1
    finally:
        end.set()
        for thread in left:
            thread.join(60)
    assert "GREW: threads: " in capsys.readouterr().out


def test_a_file_left_open_is_found(only: Only, capsys: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []

    def leak(r: random.Random, seen: Count) -> None:
        left.append(os.open(os.devnull, os.O_RDONLY))

    only(leak)
    try:
        assert soak.soak(minutes=60.0, seed=0, every=0.0) == 1
    finally:
        for fd in left:
            os.close(fd)
    assert "GREW: fds: " in capsys.readouterr().out


def test_memory_kept_is_found(only: Only, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[bytes] = []

    def leak(r: random.Random, seen: Count) -> None:
        kept.append(b"x" * (1 << 21))

    only(leak)
    assert soak.soak(minutes=60.0, seed=0, every=0.0) == 1
    assert "GREW: memory: " in capsys.readouterr().out


def test_objects_of_ours_kept_are_found(only: Only, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Worker] = []

    def leak(r: random.Random, seen: Count) -> None:
        kept.append(Worker(1))

    only(leak)
    assert soak.soak(minutes=60.0, seed=0, every=0.0) == 1
    assert "GREW: objects: " in capsys.readouterr().out


def test_a_wrong_result_ends_it_with_the_seed_and_the_operations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Rule.advance

    def wrong(self: Rule, state: ScaleState, found_inf: bool) -> ScaleState:
        after = right(self, state, found_inf)
        return ScaleState(after.scale, after.growth_tracker + found_inf, after.consecutive_skips)

    monkeypatch.setattr(Rule, "advance", wrong)
    monkeypatch.setattr(soak, "KINDS", {"history": soak.KINDS["history"]})
    assert soak.soak(minutes=1.0, seed=8, every=60.0) == 1
    said = capsys.readouterr().out
    assert "FAILED, seed 8/history/" in said
    assert "AssertionError: the growth tracker: got 1, expected 0" in said
    assert "\nplay(Setup(" in said
    short = said[said.rindex("\nplay(Setup(", 0, said.index("shortened from")) :]
    assert short.index("shortened from") < 200  # one epoch, one row


def test_errors_of_the_other_machines_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Rule, "advance", lambda self, state, found_inf: state)
    for kind, start in (("calls", "SideBySide().start(**{"), ("async", "machine.start(**{")):
        failure = None
        for number in range(20):
            failure = failure or soak.turn(kind, number, 0, Counter())
        assert failure is not None
        assert failure.seed.startswith(f"0/{kind}/")
        assert start in failure.what


def test_ctrl_c_says_the_verdict_so_far(only: Only, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    only(lambda r, seen: None)
    assert soak.soak(minutes=60.0, seed=0, every=60.0) == 0
    assert signal.getsignal(signal.SIGINT) is before
    said = capsys.readouterr().out
    assert "stopping after this turn" in said
    assert f"{TURNS} histories" in said
    assert "passed, seed 0" in said


def test_jobs_are_processes_with_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            commands.append(command)

        def wait(self) -> int:
            return len(commands) - 1

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert soak.main(["--jobs", "2", "--seed", "5", "--minutes", "2", "--every", "9"]) == 1
    assert [command[1:] for command in commands] == [
        [soak.__file__, "--minutes", "2.0", "--every", "9.0", "--seed", str(seed)]
        for seed in (5, 6)
    ]


# What the soak has found.


def train(steps: int, mode: str, leave: Callable[[Any], object]) -> list[weakref.ref[Any]]:
    """Offloaded, then left; references to the model's parameters."""
    reset()
    model = torch.nn.Linear(2, 2)
    config = ScalerConfig(offload="cpu", step_mode=mode)  # type: ignore[arg-type]
    accelerator: Any = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
    held = list(model.parameters())
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(held, lr=0.1))
    for _ in range(steps):
        accelerator.backward(prepared(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    leave(accelerator)
    assert leave is not detach or not any(p._post_accumulate_grad_hooks for p in held)
    return [weakref.ref(p) for p in held]


@pytest.mark.parametrize("leave", [detach, lambda _: None], ids=["detached", "dropped"])
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_that_were_offloaded_are_let_go(
    steps: int, mode: str, leave: Callable[[Any], object]
) -> None:
    kept = train(steps, mode, leave)
    reset()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_an_offloaded_optimizer_that_nobody_closes_is_let_go() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, offload="cpu")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    kept = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("used", [False, True])
def test_a_scale_that_training_has_found_outlives_detach(used: bool) -> None:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = stock = torch.amp.GradScaler("cpu")
    attach(accelerator, ScalerConfig(init_scale=1024.0))
    if used:
        accelerator.scaler.scale(torch.ones(()))
        accelerator.scaler.backoff(0.25)
    else:
        saved = {**accelerator.scaler.state_dict(), "scale": 256.0}
        accelerator.scaler.load_state_dict(saved)
    detach(accelerator)
    assert accelerator.scaler is stock
    assert stock.get_scale() == 256.0
    attach(accelerator, ScalerConfig(init_scale=1024.0, step_mode="overlap"))
    assert accelerator.scaler.get_scale() == 256.0
    detach(accelerator)


def test_settings_of_an_attach_that_nothing_followed_do_not_stay() -> None:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")
    detach(attach(accelerator, ScalerConfig(init_scale=1024.0)))
    attach(accelerator, ScalerConfig(init_scale=512.0))
    assert accelerator.scaler.get_scale() == 512.0
    detach(accelerator)
