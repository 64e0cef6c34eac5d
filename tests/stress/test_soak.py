"""``make soak`` finds what it is for: leaks and wrong results put in on purpose, and real ones."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import soak
import torch
from accelerate import Accelerator
from async_support import reset
from histories import Kind
from soak import Sample

from accel_scaler import AsyncOptimizer, ScalerConfig, attach, detach
from accel_scaler.async_optimizer.worker import Worker
from accel_scaler.scaling.update_rule import Rule, ScaleState

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def samples(*rss: float, **fixed: Any) -> list[Sample]:
    values = {"threads": 1, "fds": 6, "objects": 2, **fixed}
    return [Sample(seconds=60.0 * n, memory_mib=m, **values) for n, m in enumerate(rss, 1)]


FIRST = samples(300.0)[0]


def noisy(slope: float) -> list[float]:
    """An hour's slope in MiB, half a MiB of noise on it, 20 MiB more in the first quarter."""
    r = random.Random(5)
    warm = [20.0 * min(1.0, n / 15) for n in range(60)]
    return [300 + w + slope * n / 60 + r.gauss(0, 0.5) for n, w in enumerate(warm)]


def test_growth_is_what_goes_on_after_the_warm_up() -> None:
    step = [m + 4.5 * (n > 35) for n, m in enumerate(noisy(0.0))]
    for memory, grows in ((noisy(0.0), 0), (noisy(3.0), 0), (step, 0), (noisy(30.0), 1)):
        found = soak.grown(FIRST, samples(*memory))
        assert [sentence.split(":")[0] for sentence in found] == ["memory"] * grows
    for what in ("threads", "fds", "objects"):
        steady, more = samples(*[300.0] * 6), samples(*[300.0] * 2, **{what: 9})
        (sentence,) = soak.grown(FIRST, steady + more)
        assert sentence.startswith(f"{what}: {getattr(FIRST, what)} at the start")
        assert soak.grown(FIRST, more + steady) == []


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Each reading walks every object; those of the tests before need not be among them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Broken:
    """A kind that leaves a thread, a file, memory or an object of ours each time."""

    def __init__(self, what: str) -> None:
        self.what, self.turns = what, 0
        self.left: list[Any] = []
        self.end = threading.Event()

    def draw(self, r: random.Random) -> tuple[Any, list[Any]]:
        return None, []

    def play(self, *_: Any) -> None:
        self.turns += 1
        if self.turns == 12:
            signal.raise_signal(signal.SIGINT)
        if self.what == "threads":
            self.left.append(threading.Thread(target=self.end.wait, args=(60,), daemon=True))
            self.left[-1].start()
        elif self.what == "fds":
            self.left.append(open(os.devnull))  # noqa: SIM115
        elif self.what == "memory":
            self.left.append(b"x" * (1 << 21))
        elif self.what == "objects":
            self.left.append(Worker(1))

    def tidy(self) -> None:
        self.end.set()
        for each in self.left:
            if self.what == "threads":
                each.join(60)
            elif self.what == "fds":
                each.close()


@pytest.mark.parametrize("what", ["threads", "fds", "memory", "objects", "nothing"])
def test_what_is_left_behind_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And Ctrl-C says the verdict so far."""
    before = signal.getsignal(signal.SIGINT)
    broken = Broken(what)
    monkeypatch.setattr(soak, "KINDS", {"broken": (Kind(broken.draw, broken.play), 1)})
    try:
        assert soak.soak(minutes=60.0, seed=0, every=0.0) == (what != "nothing")
    finally:
        broken.tidy()
    said = capsys.readouterr().out
    assert (f"GREW: {what}: " in said) is (what != "nothing")
    assert "stopping after this turn" in said
    assert signal.getsignal(signal.SIGINT) is before


def test_the_kinds_run_in_turn_and_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(minutes=0.02, seed=3, every=0.5) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " min  " in lines[0]
    assert lines[-1].startswith("passed, seed 3, ")


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
