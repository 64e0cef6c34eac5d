"""Whoever plain torch keeps in order is in order here too: the optimizer's streams and the user's.

Each program below runs with side streams and on one queue; see ``device_training``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from accelerators import LONG, adamw, current_stream, fused_adamw, on, sgd
from device_training import MODES, STEPS, Program, Training, assert_in_order
from support import mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_scaler import StepError
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams

pytestmark = pytest.mark.usefixtures("side_streams", "one_part_each")

HALF = torch.float16
FULL, BOTH_WIDTHS = (torch.float32,), (torch.float32, torch.float16)
LATE = ("delayed", "preview")
BESIDE = ("overlap", *LATE)
ALL = ("sync", *BESIDE)

RUNS: list[Any] = []


def in_modes(
    modes: tuple[str, ...] = BESIDE,
    offloads: tuple[str, ...] = ("none", "cpu"),
    dtypes: tuple[torch.dtype, ...] = FULL,
    makes: tuple[Any, ...] = (fused_adamw,),
    **settings: Any,
) -> Callable[[Program], Program]:
    """Run this program in each combination of these."""

    def add(program: Program) -> Program:
        for mode, offload, dtype, make in product(modes, offloads, dtypes, makes):
            if (mode, offload) == ("sync", "none"):
                continue  # on the training stream alone, as torch has it
            how = {"offload": offload, "dtype": dtype, "make": make}
            words = [program.__name__, mode, *settings, make.__name__]
            words += ["offload"] * (offload == "cpu") + ["float16"] * (dtype is HALF)
            RUNS.append(pytest.param(program, MODES[mode] | how | settings, id=" ".join(words)))
        return program

    return add


@contextmanager
def beside(stream: torch.Stream, after: torch.Stream | None = None) -> Iterator[None]:
    """Enqueue on ``stream``, after all that ``after`` has by now."""
    if after is not None:
        stream.wait_stream(after)
    with on(stream):
        yield


def fused_adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01, fused=True)


# One loop, each stream late in turn.


@in_modes(ALL, dtypes=BOTH_WIDTHS, makes=(sgd, fused_adamw))
@in_modes(("preview",), watched=False)
def late_in_turn(t: Training) -> None:
    for step in range(STEPS):
        late = (t.work, t.down, None, t.work)[step % 4]
        if late is None:
            t.busy()
        t.backward(step)
        if late is not None:
            t.busy(late)
        t.optimizer.clip_grad_norm_(0.5)
        t.optimizer.step()
        if step % 4 == 3:
            t.busy(t.work, t.down)
        t.optimizer.zero_grad()


@in_modes(("overlap", "preview"))
def compiled(t: Training) -> None:
    """Its forward waits as a whole; it is used and read on other streams too."""
    t.model.compile(backend="eager")
    home = current_stream()
    side, other = t.streams(2)
    t.backward(0)
    for step in range(STEPS):
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        side.wait_stream(home)
        if step % 3 == 2:  # all of it is awaited there first
            with beside(side, home):
                t.seen.append(t.forward().detach().clone())
            t.seen += [p.detach().clone() for p in t.params]  # in order at home without a wait
        t.backward(step + 1)
        with beside(side):
            if step % 2:
                t.seen.append(t.forward().detach().clone())
        if step % 2 == 0:
            with beside(other, home):
                t.optimizer.synchronize()
            with beside(side):
                t.look()
        home.wait_stream(side)


class Recomputed(nn.Module):
    """Its layers run again in the backward, on autograd's own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return result


@in_modes(("overlap", "preview"), model=Recomputed)
def recomputed(t: Training) -> None:
    for step in range(STEPS):
        t.busy(t.work)
        t.train(step)


@in_modes(("overlap", "delayed"))
def trained_on_another_stream(t: Training) -> None:
    """And looked at from the one that was the present one before."""
    home, (side,) = current_stream(), t.streams(1)
    with beside(side, home):
        for step in range(STEPS):
            t.busy(t.work)
            t.train(step)
            with on(home):
                t.optimizer.synchronize()
    home.wait_stream(side)


# Gradients, which the update, the preview and the copy to the host read.


@in_modes(dtypes=BOTH_WIDTHS)
@in_modes(("preview",), scaled=False)
def gradients_written(t: Training) -> None:
    """Zeroed in place, dropped, written on another stream, added to, multiplied and added to."""
    home, (side,) = current_stream(), t.streams(1)
    for step in range(2 * STEPS):
        t.backward(step)
        t.busy(t.work, t.down)
        t.optimizer.step()
        grads = [p.grad for p in t.params if p.grad is not None] if step % 5 > 1 else []
        if step % 5 == 0:
            t.optimizer.zero_grad(set_to_none=False)
        elif step % 5 == 1:
            t.optimizer.zero_grad()
            t.litter()
        elif step % 5 == 2:
            with beside(side, home):
                for grad in grads:
                    grad.fill_(7.0)
            home.wait_stream(side)
            t.optimizer.zero_grad(set_to_none=step % 2 == 0)
        elif step % 5 == 3 and t.scaler is None:
            for grad in grads:
                grad.mul_(0.5)
        elif t.scaler is not None:
            t.optimizer.zero_grad()


@in_modes(dtypes=BOTH_WIDTHS)
def gradients_in_one_buffer(t: Training) -> None:
    """Views, as DDP's of its buckets: nobody sees who writes to the memory."""
    sizes = [p.numel() for p in t.params]
    buffer = torch.zeros(sum(sizes), device=t.device, dtype=t.params[0].dtype)
    for p, mine in zip(t.params, buffer.split(sizes), strict=True):
        p.grad = mine.view_as(p)
    t.model.is_used = True
    for step in range(STEPS):
        t.backward(step)
        t.busy(t.work, t.down)
        t.optimizer.step()
        buffer.fill_(7.0)
        buffer.zero_()


@in_modes()
def gradients_read(t: Training) -> None:
    """On three streams, then added to, zeroed or dropped."""
    home = current_stream()
    one, two = t.streams(2)
    for step in range(5):
        t.backward(step)
        t.busy()
        t.optimizer.step()
        one.wait_stream(home)
        two.wait_stream(home)
        for stream in (home, two, one):
            with beside(stream):
                t.seen += [p.grad.abs() for p in t.params if p.grad is not None]
        home.wait_stream(one)
        home.wait_stream(two)
        if step % 3 < 2:
            t.optimizer.zero_grad(set_to_none=step % 3 == 1)


# Steps of another kind in between.


@in_modes(("preview",), dtypes=BOTH_WIDTHS)
@in_modes(("preview",), delay_warmup_steps=3)
def prompt_steps(t: Training) -> None:
    """Of the branch's first update nothing is known in advance: that step is not late."""
    for step in range(STEPS):
        t.train(step)
        t.busy(t.work)
        t.model.is_used = step in (2, 3, 6)
        t.inner.param_groups[0]["lr"] *= 0.5 if step % 2 else 1.0  # or its preview is made anew


@in_modes(scaled=False)
def steps_without_a_forward(t: Training) -> None:
    for step in range(STEPS):
        for place, p in enumerate(t.params):
            p.grad = torch.full_like(p, 0.01 * (place + 1) * (-1.0) ** step, requires_grad=False)
        t.busy(t.work)
        t.optimizer.step()
        if step % 3 == 2:
            t.backward(step)
        t.optimizer.zero_grad()


@in_modes(ALL, dtypes=BOTH_WIDTHS)
@in_modes(scaled=False)
def submitted(t: Training) -> None:
    """Some steps are a function of the user's, on the optimizer thread; one moves nothing."""

    def job() -> None:
        t.scaler.unscale_(t.optimizer)
        stepped = [p for group in t.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(stepped, 0.1)
        t.scaler.step(t.optimizer)

    for step in range(STEPS):
        t.backward(step)
        if step % 3 == 0:
            t.optimizer.step()
        elif t.scaler is None:
            t.optimizer.submit(t.optimizer.step if step % 3 == 1 else lambda: None)
        else:
            t.optimizer.submit(job)
            t.scaler.update()
        t.optimizer.zero_grad()
        t.forward(step)  # what comes next is made ahead


@in_modes(("overlap", "preview"), dtypes=BOTH_WIDTHS, scaled=False)
def failed(t: Training) -> None:
    """An update fails half-way when the preview of the next one was asked for."""
    step_part, calls = Replica.step_part, []
    t.model.is_used = True

    def failing(self: Replica, *args: Any) -> None:
        calls.append(None)
        if len(calls) == 4 * len(self.parts) - 2:
            raise ArithmeticError("half-way")
        step_part(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "step_part", failing)
        failures = 0
        for step in range(STEPS):
            try:
                t.train(step, zero=False)
                if t.settings["mode"] == "overlap":  # on one queue the thread's error comes later
                    t.optimizer.synchronize()
            except StepError:
                failures += 1
            t.optimizer.zero_grad()
    assert failures == 1


# State, hyperparameters and masters.


@in_modes(("overlap",), scaled=False)
def the_training_stream_changes(t: Training) -> None:
    """Step counts from the memory of one stream are moved on another one."""
    (other,) = t.streams(1)
    now, before = current_stream(), other
    for step in range(STEPS):
        now.wait_stream(before)
        with on(now):
            t.train(step)
        now, before = before, now
    current_stream().wait_stream(other)


@in_modes(("sync", "overlap", "preview"), makes=(fused_adam, adamw, sgd))
def resumed(t: Training) -> None:
    t.train(0, 1, 2)
    saved = copy.deepcopy(t.optimizer.state_dict())
    t.optimizer.close()
    t.wrap()
    t.optimizer.load_state_dict(saved)
    del saved
    for step in range(3, 8):
        t.train(step)
        t.litter()


@in_modes(offloads=("none",), makes=(adamw,))
def state_exchanged(t: Training) -> None:
    """Somebody puts new tensors in the state, as a library that resets it does."""
    for step in range(STEPS):
        t.train(step)
        if step == 2:
            t.optimizer.synchronize()
            for entry in t.optimizer.state.values():
                entry["exp_avg"] = entry["exp_avg"] * 0.5
                entry["step"] = torch.full_like(entry["step"], 9.0)
        t.litter()


def capturable(params: Any) -> Any:
    rate = torch.tensor(0.01, device=params[0].device)
    return torch.optim.AdamW(params, lr=rate, capturable=True)


@in_modes(("sync", "overlap"), offloads=("none",), makes=(capturable,))
def rate_on_the_device(t: Training) -> None:
    (group,) = t.inner.param_groups
    for step in range(STEPS):
        t.train(step)
        if step % 2:
            group["lr"].mul_(0.5)
        else:
            group["lr"] = group["lr"] * 0.9
        t.litter()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.other = mlp(64), nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[2](self.layers[0](x) + self.other.weight.sum(1))
        return out


def slow_sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=2.0**-10)


@in_modes(ALL, dtypes=(HALF,), makes=(slow_sgd,), scaled=False, model=Shared)
def masters_that_are_edited(t: Training) -> None:
    """One weight is frozen in turns, another is written past autograd."""
    first, last = t.model.layers[0].weight, t.model.layers[2].weight
    late = t.settings["mode"] == "delayed"
    for step in range(STEPS):
        last.requires_grad_(step % 2 == 0)
        if step == 3 and not late:
            first.data[::2].clamp_(-0.1, 0.1)
        t.train(step)


@in_modes()
def state_saved_elsewhere(t: Training) -> None:
    """On a stream that followed before the state was there."""
    home, (side,) = current_stream(), t.streams(1)
    for step in range(STEPS):
        t.backward(step)
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        with beside(side, home):
            entries = t.optimizer.state_dict()["state"].values()
            t.seen += [v.clone() for entry in entries for v in entry.values()]
        home.wait_stream(side)


@in_modes(LATE, offloads=("none",))
def saved_after_an_edit(t: Training) -> None:
    """Masters learn of an edit where the state is saved: on a stream that nobody follows."""
    (side,) = t.streams(1)
    for step in range(STEPS):
        t.train(step)
        if step == 2:
            t.optimizer.synchronize()
            t.busy()
            with torch.no_grad():
                t.params[0].mul_(0.5)
            with beside(side):
                t.busy()
                t.optimizer.state_dict()


# Parameters that are read on streams of the user's.


@in_modes()
def evaluated_on_two_streams(t: Training) -> None:
    """Both are ordered after the step, neither after the other."""
    home = current_stream()
    one, two = t.streams(2)
    for step in range(STEPS):
        t.backward(step)
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        one.wait_stream(home)
        two.wait_stream(home)
        for stream in (one, two):
            with beside(stream), torch.set_grad_enabled(step % 2 == 0):
                t.seen.append(t.forward().detach().clone())
        home.wait_stream(one)
        home.wait_stream(two)


@in_modes(("overlap",))
def averaged(t: Training) -> None:
    """Averages on streams that follow the training stream as it was right after the step; before
    any use, after a use at home, after a synchronize elsewhere."""
    home, streams = current_stream(), t.streams(2)
    means = [[p.detach().clone() for p in t.params] for _ in streams]
    t.backward(0)
    for step in range(STEPS):
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        for stream in streams:
            stream.wait_stream(home)
        if step % 3 == 1:
            t.backward(step + 1)
        if step % 3 == 2:
            with beside(streams[1]):
                t.optimizer.synchronize()
        for stream, mean in zip(streams, means, strict=True):
            with beside(stream), torch.no_grad():
                for one, p in zip(mean, t.params, strict=True):
                    one.lerp_(p.data if step % 2 else p, 0.25)
        for stream in streams:
            home.wait_stream(stream)
        if step % 3 != 1:
            t.backward(step + 1)
    t.seen += [one for mean in means for one in mean]


@in_modes(LATE)
def averaged_while_delayed(t: Training) -> None:
    """Before the model is published, on a stream that nobody follows yet."""
    home, (side,) = current_stream(), t.streams(1)
    mean = [p.detach().clone() for p in t.params]
    for step in range(STEPS):
        t.train(step)
        with beside(side, home), torch.no_grad():
            t.busy()
            for one, p in zip(mean, t.params, strict=True):
                one.lerp_(p, 0.25)
        t.evaluate()
        home.wait_stream(side)
    t.seen += mean


@in_modes(("overlap",))
def read_by_a_thread(t: Training) -> None:
    """On its own stream; the training stream has used all before."""
    home, (side,) = current_stream(), t.streams(1)

    def read() -> None:
        with beside(side), torch.no_grad():
            t.seen.extend(p.clone() for p in t.params)

    t.backward(0)
    for step in range(STEPS):
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        side.wait_stream(home)
        t.backward(step + 1)
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
        home.wait_stream(side)


# Fences.

FENCES: tuple[Callable[[Training], object], ...] = (
    lambda t: t.optimizer.synchronize(),
    Training.look,
    Training.evaluate,
)


@in_modes(dtypes=BOTH_WIDTHS)
def fences(t: Training) -> None:
    """On the training stream, or on one that does not follow it."""
    home, (side,) = current_stream(), t.streams(1)
    for step in range(14):
        t.train(step)
        t.busy(t.work)
        if step % 2:
            number = step // 2
            with beside(side) if number > 2 else beside(home):
                FENCES[number % 3](t)
            home.wait_stream(side)


@in_modes()
def fences_before_a_backward_is_done(t: Training) -> None:
    """The newest values come while the training stream still has work to do on the old ones."""
    home, (side,) = current_stream(), t.streams(1)
    for step in range(STEPS):
        side.wait_stream(home)
        t.busy()
        t.backward(step)
        with beside(side):
            FENCES[step % 3](t)
            t.busy()
        t.seen.append(t.forward().detach().clone())  # at home, in order by itself
        home.wait_stream(side)
        t.optimizer.step()
        t.optimizer.zero_grad()


# An optimizer that is dropped without close().


@in_modes(("sync", "overlap"), makes=(sgd, fused_adamw))
@in_modes(("overlap",), offloads=("none",), makes=(capturable,))
def dropped(t: Training) -> None:
    """Its update goes on; others get its memory, and the model is used on."""
    for trial in range(4):
        t.train(0, 1)
        t.backward(2)
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.drop(with_model=trial % 2 == 0)
        kept = [torch.full((n,), 7.0, device=t.device) for n in (1, 64, 512, 4096) * 20]
        t.seen.append(torch.cat(kept))
        del kept
        if trial % 2:
            t.seen.append(t.forward().detach().clone())
        else:
            t.build()
        t.wrap()


@in_modes(("overlap",), offloads=("none",))
def dropped_beside_a_compiled_model(t: Training) -> None:
    t.model.compile(backend="eager")
    t.train(0, 1)
    t.busy()
    t.train(2)
    t.drop()
    t.seen.append(t.forward().detach().clone())


@in_modes(("overlap", "delayed"))
def another_takes_over(t: Training) -> None:
    """Parameters that an optimizer which is gone still updates."""
    for step in range(3):
        t.backward(step)
        t.busy()
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.drop()
        t.wrap()
        for p in t.params:
            p.grad = torch.ones_like(p)  # no forward in between
        t.optimizer.step()
        t.optimizer.zero_grad()


@pytest.mark.races_allowed
@pytest.mark.parametrize(
    ("method", "late", "offload"), [("follow", "work", "none"), ("wait_on_host", "down", "cpu")]
)
def test_a_wait_that_is_missing_is_noticed(
    method: str, late: str, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is busy for longer than the machine keeps a thread from running."""

    def program(t: Training) -> None:
        for step in range(3):
            t.backward(step)
            t.busy(getattr(t, late))
            t.optimizer.step()
            t.optimizer.zero_grad()

    monkeypatch.setattr(SideStreams, method, lambda self, event: None)
    with pytest.raises(AssertionError):
        assert_in_order(program, cycles=20 * LONG, offload=offload, **MODES["overlap"])


def test_a_training_stream_that_changes_in_sync() -> None:
    assert_in_order(the_training_stream_changes, scaled=False, watched=False, **MODES["sync"])


@pytest.mark.parametrize(("program", "settings"), RUNS)
def test_side_streams_change_no_number(program: Program, settings: dict[str, Any]) -> None:
    assert_in_order(program, **settings)
