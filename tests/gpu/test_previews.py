"""What ``delayed`` shows of a late update, on a device: the order of streams, and memory.

Each run is compared bit for bit with the same program on a CPU, where nothing is asynchronous and
which is compared with plain torch elsewhere. Streams are kept busy, so that a wait that is missing
shows; a simulated device looks itself for accesses that nothing orders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerators import (
    DEVICE,
    assert_same,
    current_stream,
    fused_adamw,
    on,
    peak_bytes,
    sgd,
    sleep,
    synchronize,
)
from support import weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, StepError
from accel_scaler.async_optimizer import streams as streams_module
from accel_scaler.async_optimizer.preview import Previews
from accel_scaler.async_optimizer.replica import Replica

STEPS, OVERFLOW = 8, 5
CPU = "cpu"
SHORT = 5_000_000
"""Cycles: some 3 ms."""

Step = Callable[["Training", int], object]

each_offload = pytest.mark.parametrize("offload", ["none", "cpu"])
each_dtype = pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])


class Branched(nn.Module):
    """Some layers, and one that takes part when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(8, 64), *inner, nn.Linear(64, 1))
        self.branch, self.is_used = nn.Linear(8, 1), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + self.branch(x) if self.is_used else out


class Training:
    """One run; ``before_step`` and ``after_step`` are what else a loop does there."""

    def __init__(
        self,
        where: str,
        offload: str,
        compensation: str,
        *,
        half: bool = False,
        make: Callable[[Any], Any] = fused_adamw,
        scaled: bool = True,
        watched: bool = True,
        compiled: bool = False,
        **settings: Any,
    ) -> None:
        self.where, self.half = where, half
        self.model = Branched().to(where, torch.float16 if half else torch.float32)
        if compiled:
            self.model.compile(backend="eager")
        self.params = list(self.model.parameters())
        self.side: Any = None if where == CPU else torch.Stream(where)
        self.scaler = GradScaler(torch.device(where).type, init_scale=1024.0) if scaled else None
        self.inner = make(self.params)
        self.optimizer = AsyncOptimizer(
            self.inner,
            self.model if watched else None,
            scaler=self.scaler,
            mode="delayed",
            offload=offload,
            delay_compensation=compensation,
            **settings,
        )
        self.seen: list[Tensor] = []

    def forward(self, step: int) -> Tensor:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        out: Tensor = self.model(x.to(self.where, self.params[0].dtype))
        return out

    def backward(self, step: int) -> None:
        loss = self.forward(step).float().square().mean()
        self.seen.append(loss.detach())
        if self.scaler is not None:
            loss = self.scaler.scale(loss * float("inf") if step == OVERFLOW else loss)
        loss.backward()

    def keep_busy(self, *names: str) -> None:
        """What these streams of the optimizer are given from here on comes late."""
        for name in names:
            stream = getattr(self.optimizer._stepper.streams, name)
            if stream is not None:
                with on(stream):
                    sleep(SHORT)

    @contextmanager
    def beside(self, after: bool = False) -> Iterator[None]:
        """On a stream of the user's; ``after`` what the training stream has by now."""
        if self.side is None:
            yield
            return
        if after:
            self.side.wait_stream(current_stream())
        with on(self.side):
            yield

    def follow(self) -> None:
        """The training stream comes after the user's."""
        if self.side is not None:
            current_stream().wait_stream(self.side)

    def litter(self) -> None:
        """Take memory of the parameters' sizes, write to it, give it back."""
        kept = [torch.full_like(p.detach(), 7.0) for p in self.params for _ in range(3)]
        del kept

    def finish(self) -> list[Tensor]:
        """Losses, parameters and state at the end."""
        self.optimizer.synchronize()
        entries = self.optimizer.state_dict()["state"].values()
        self.seen += [v for e in entries for v in e.values() if isinstance(v, Tensor)]
        self.seen = [t.detach().cpu().clone() for t in (*self.seen, weights(self.model))]
        self.optimizer.close()
        return self.seen


def nothing(training: Training, step: int) -> None:
    pass


def zero(training: Training, step: int) -> None:
    training.optimizer.zero_grad()


def trained(
    where: str, *how: str, before_step: Step = nothing, after_step: Step = zero, **settings: Any
) -> list[Tensor]:
    training = Training(where, *how, **settings)
    for step in range(STEPS):
        training.backward(step)
        before_step(training, step)
        training.optimizer.step()
        after_step(training, step)
    return training.finish()


def assert_beside_cpu(*how: str, **settings: Any) -> None:
    mine, expected = trained(DEVICE, *how, **settings), trained(CPU, *how, **settings)
    assert_same(mine, expected)
    assert all(bool(t.isfinite().all()) for t in expected)
    late = trained(CPU, how[0], "none", **settings)
    assert not torch.equal(late[-1], expected[-1])  # or nothing of it would show


# What the next forward reads.


def busy_side(training: Training, step: int) -> None:
    training.keep_busy("_work")


@each_offload
@each_dtype
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_the_forward_waits_for_what_it_is_shown(
    offload: str, half: bool, make: Any, watched: bool
) -> None:
    settings: Any = {"half": half, "make": make, "watched": watched}
    assert_beside_cpu(offload, "preview", before_step=busy_side, **settings)


@each_offload
def test_a_compiled_forward_waits_for_all_of_it(offload: str) -> None:
    assert_beside_cpu(offload, "preview", before_step=busy_side, compiled=True)


def faster(training: Training, step: int) -> None:
    zero(training, step)
    training.inner.param_groups[0]["lr"] *= 0.9


def slower_at_the_last_moment(training: Training, step: int) -> None:
    """What was made for other settings is made anew, while the device is behind."""
    training.keep_busy("_work")
    if step % 2:
        training.inner.param_groups[0]["lr"] *= 0.5


@each_offload
@each_dtype
@pytest.mark.parametrize("before_step", [busy_side, slower_at_the_last_moment])
def test_a_preview_is_one_of_the_step_to_come(before_step: Step, offload: str, half: bool) -> None:
    settings: Any = {"before_step": before_step, "after_step": faster, "half": half}
    assert_beside_cpu(offload, "preview", **settings)


# Gradients, which the share and the copy to the host read.


def zero_in_place(training: Training, step: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def drop(training: Training, step: int) -> None:
    training.optimizer.zero_grad()
    training.litter()


def write_elsewhere(training: Training, step: int) -> None:
    with training.beside(after=True), torch.no_grad():
        for p in training.params:
            if p.grad is not None:
                p.grad.fill_(7.0)
    training.follow()
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)


def scaled_down(training: Training, step: int) -> None:
    """The next backward adds to what is left."""
    with torch.no_grad():
        for p in training.params:
            if p.grad is not None:
                p.grad.mul_(0.5)


WRITERS: dict[str, tuple[Step, bool]] = {
    "zeroed in place": (zero_in_place, True),
    "dropped": (drop, True),
    "written on another stream": (write_elsewhere, True),
    "added to": (nothing, False),
    "multiplied and added to": (scaled_down, False),
}


def busy_copies(training: Training, step: int) -> None:
    training.keep_busy("_work", "_down")


@each_offload
@each_dtype
@pytest.mark.parametrize("writer", WRITERS)
def test_nobody_writes_to_a_gradient_too_early(writer: str, offload: str, half: bool) -> None:
    after_step, scaled = WRITERS[writer]
    settings: Any = {"before_step": busy_copies, "after_step": after_step, "scaled": scaled}
    assert_beside_cpu(offload, "preview", half=half, **settings)


def test_autograds_threads_do_not_become_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a gradient: its like would be in ``threading.enumerate()`` for good."""
    step_part = Replica.step_part

    def slowly(self: Replica, *args: Any) -> None:
        time.sleep(0.02)
        step_part(self, *args)

    monkeypatch.setattr(Replica, "step_part", slowly)
    training = Training(DEVICE, "none", "preview", scaled=False)
    for step in range(3):
        training.backward(step)
        training.optimizer.step()
    training.finish()
    assert not [t for t in threading.enumerate() if isinstance(t, threading._DummyThread)]


def in_one_buffer(where: str, *how: str, **settings: Any) -> list[Tensor]:
    """Gradients are views, as DDP's of its buckets: whoever writes to the memory is not seen."""
    training = Training(where, *how, **settings)
    sizes = [p.numel() for p in training.params]
    buffer = torch.zeros(sum(sizes), device=where, dtype=training.params[0].dtype)
    for p, mine in zip(training.params, buffer.split(sizes), strict=True):
        p.grad = mine.view_as(p)
    for step in range(STEPS):
        training.model.is_used = True
        training.backward(step)
        training.keep_busy("_work", "_down")
        training.optimizer.step()
        buffer.fill_(7.0)
        buffer.zero_()
    return training.finish()


@each_offload
@each_dtype
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_nobody_writes_to_a_gradient_that_cannot_be_held(
    offload: str, half: bool, watched: bool
) -> None:
    settings: Any = {"half": half, "watched": watched}
    mine, expected = (
        in_one_buffer(where, offload, "preview", **settings) for where in (DEVICE, CPU)
    )
    assert_same(mine, expected)


def test_a_step_that_waits_for_the_share_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule moves the settings after it: it would be made twice."""
    made, prepare = [], Previews.prepare

    def counted(self: Previews, settings: Any) -> None:
        made.append(settings)
        prepare(self, settings)

    monkeypatch.setattr(Previews, "prepare", counted)
    training = Training(DEVICE, "cpu", "preview", scaled=False)
    buffer = torch.zeros(sum(p.numel() for p in training.params), device=DEVICE)
    sizes = [p.numel() for p in training.params]
    for p, mine in zip(training.params, buffer.split(sizes), strict=True):
        p.grad = mine.view_as(p)
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.step()
        training.inner.param_groups[0]["lr"] *= 0.9
        buffer.zero_()
    training.finish()
    assert len(made) == STEPS  # one in each forward, the first of which knows no state


# Prompt steps, fences and failures in between: what is sent up lies in one buffer.


def use_the_branch_later(training: Training, step: int) -> None:
    """Its first update is known in advance to nobody: that step is not late."""
    zero(training, step)
    training.keep_busy("_work")
    training.model.is_used = step in (2, 3, 6)


@each_offload
@each_dtype
@pytest.mark.parametrize("warmup", [0, 3])
def test_prompt_steps_and_previews_follow_each_other(offload: str, half: bool, warmup: int) -> None:
    settings: Any = {"half": half, "delay_warmup_steps": warmup}
    assert_beside_cpu(offload, "preview", after_step=use_the_branch_later, **settings)


def at_once(where: str, *how: str, **settings: Any) -> list[Tensor]:
    """Steps without a forward: nothing is made ahead, and nobody waits for what goes up."""
    training = Training(where, *how, scaled=False, **settings)
    for step in range(STEPS):
        for place, p in enumerate(training.params):
            p.grad = torch.full_like(p, 0.01 * (place + 1) * (-1.0) ** step, requires_grad=False)
        training.keep_busy("_work")
        training.optimizer.step()
        if step % 3 == 2:
            training.backward(step)
        training.optimizer.zero_grad()
    return training.finish()


@each_offload
@each_dtype
def test_steps_without_a_forward_between_them(offload: str, half: bool) -> None:
    mine, expected = (at_once(where, offload, "preview", half=half) for where in (DEVICE, CPU))
    assert_same(mine, expected)


def with_jobs(where: str, *how: str, **settings: Any) -> list[Tensor]:
    """Some steps are a function of the user's, which may move nothing at all."""
    training = Training(where, *how, scaled=False, **settings)
    for step in range(STEPS):
        training.backward(step)
        if step in (2, 3):
            training.optimizer.submit(lambda: None)
        elif step == 5:
            training.optimizer.submit(training.optimizer.step)
        else:
            training.optimizer.step()
        zero(training, step)
        training.forward(step)  # what comes next is made ahead
    return training.finish()


@each_offload
@each_dtype
def test_steps_of_the_users_in_between(offload: str, half: bool) -> None:
    mine, expected = (with_jobs(where, offload, "preview", half=half) for where in (DEVICE, CPU))
    assert_same(mine, expected)


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.seen.append(training.forward(99))
    training.model.train()


def look(training: Training) -> None:
    training.seen += [t.clone() for t in training.model.state_dict().values()]


FENCES: dict[str, Callable[[Training], object]] = {
    "synchronize": lambda training: training.optimizer.synchronize(),
    "state_dict": look,
    "evaluation": evaluate,
}


@each_offload
@each_dtype
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("fence", FENCES)
def test_fences_in_between(fence: str, elsewhere: bool, offload: str, half: bool) -> None:
    """On the training stream, or on one that does not follow it."""

    def after_step(training: Training, step: int) -> None:
        zero(training, step)
        training.keep_busy("_work")
        if step in (1, 2, 3, 6):
            if elsewhere:
                with training.beside():
                    FENCES[fence](training)
                training.follow()
            else:
                FENCES[fence](training)

    assert_beside_cpu(offload, "preview", after_step=after_step, half=half)


@each_offload
def test_what_is_shown_again_is_there_on_every_stream(offload: str) -> None:
    """Read behind the forward that brings it back, on a stream that does not follow it."""

    def before_step(training: Training, step: int) -> None:
        with training.beside(), torch.no_grad():
            training.seen += [p.detach().clone() for p in training.params]
        training.follow()

    def after_step(training: Training, step: int) -> None:
        zero(training, step)
        training.optimizer.synchronize()

    settings: Any = {"before_step": before_step, "after_step": after_step}
    assert_beside_cpu(offload, "preview", **settings)


def failed(where: str, *how: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Tensor]:
    """An update fails half-way when a preview of the next one was asked for."""
    step_part, calls = Replica.step_part, []

    def failing(self: Replica, *args: Any) -> None:
        calls.append(None)
        if len(calls) == 4 * len(self.parts) - 2:
            raise ArithmeticError("half-way")
        step_part(self, *args)

    training = Training(where, *how, scaled=False, **settings)
    training.model.is_used = True
    with monkeypatch.context() as patched:
        patched.setattr(Replica, "step_part", failing)
        for step in range(STEPS):
            try:
                training.backward(step)
                training.optimizer.step()
            except StepError:
                training.seen.append(torch.tensor(float(step)))
            training.optimizer.zero_grad()
    return training.finish()


@each_offload
@each_dtype
@pytest.mark.usefixtures("one_part_each")
def test_after_a_failure_nothing_stale_is_shown(
    offload: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, expected = (
        failed(where, offload, "preview", half=half, monkeypatch=monkeypatch)
        for where in (DEVICE, CPU)
    )
    assert_same(mine, expected)
    assert sum(t.shape == () and float(t) == 4.0 for t in expected) == 1


@each_offload
@each_dtype
def test_a_device_with_one_queue(offload: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS: it keeps the order by itself, and the model is there all the same."""
    monkeypatch.setattr(streams_module, "streams_of", lambda device: None)
    assert_beside_cpu(offload, "preview", half=half, after_step=zero_in_place)


# Memory.


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])


def peak_of(offload: str, compensation: str, half: bool) -> int:
    """Bytes on the device in the worst moment of some steps, the workspaces of kernels aside."""

    def run(width: int) -> None:
        model = wide() if width == 1024 else nn.Sequential(nn.Linear(width, width, bias=False))
        model.to(DEVICE, torch.float16 if half else torch.float32)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        settings: Any = {"offload": offload, "delay_compensation": compensation}
        with AsyncOptimizer(inner, model, mode="delayed", **settings) as optimizer:
            for _ in range(5):
                x = torch.ones(8, width, device=DEVICE, dtype=model[0].weight.dtype)
                model(x).float().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer._stepper.finish()  # else how far it is decides
                synchronize()

    run(64)
    with peak_bytes() as taken:
        run(1024)
    return taken()


@pytest.mark.usefixtures("memory_counter")
@each_offload
@each_dtype
def test_no_more_device_memory_but_for_a_piece(offload: str, half: bool) -> None:
    piece = 4 * 1024 * 1024  # the largest parameter, in float32
    bare, shown = peak_of(offload, "none", half), peak_of(offload, "preview", half)
    assert shown <= bare + 4 * piece


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("compensation", ["none", "preview"])
@each_dtype
def test_gradients_that_were_sent_down_do_not_stay(
    compensation: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once their share is added their memory is free, though the update still runs."""
    step_part, gate = Replica.step_part, threading.Event()

    def waiting(self: Replica, *args: Any) -> None:
        assert gate.wait(60)
        step_part(self, *args)

    monkeypatch.setattr(Replica, "step_part", waiting)
    model = wide().to(DEVICE, torch.float16 if half else torch.float32)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Any = {"offload": "cpu", "delay_compensation": compensation}
    with AsyncOptimizer(inner, model, mode="delayed", **settings) as optimizer:
        for _ in range(3):
            x = torch.ones(8, 1024, device=DEVICE, dtype=model[0].weight.dtype)
            model(x).float().mean().backward()
            synchronize()
            full = torch.accelerator.memory_allocated(DEVICE)
            gate.clear()
            optimizer.step()
            optimizer.zero_grad()
            stepper = optimizer._stepper
            stepper.finish_model()  # what the next forward sees is there, and no more
            synchronize()
            torch.empty(1, device=DEVICE)  # the allocator looks for what has become free
            left = torch.accelerator.memory_allocated(DEVICE)
            gate.set()
            stepper.finish()
            assert left < full - 0.9 * size


@each_dtype
@each_offload
def test_host_memory(offload: str, half: bool) -> None:
    """Narrow parameters have a buffer of their dtype anyway; on the device there is none."""
    training = Training(DEVICE, offload, "preview", half=half)
    for step in range(2):
        training.backward(step)
        training.optimizer.step()
        zero(training, step)
    for pair in training.optimizer._stepper.replica.pairs:
        if offload == "none":
            assert pair.ahead is None
        else:
            assert pair.ahead is not None
            assert pair.ahead.dtype is pair.target.dtype
            assert (pair.ahead is pair.staging) is half
    training.finish()
    synchronize()
