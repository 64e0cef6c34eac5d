"""Several streams on one device: whoever plain torch keeps in order is in order here too.

Each run is compared bit for bit with the same program on the CPU, where nothing is asynchronous. A
simulated device looks itself for accesses that nothing orders; on others delays make them show.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    assert_same,
    current_stream,
    fused_adamw,
    on,
    sgd,
    sleep,
    synchronize,
)
from support import weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("side_streams", "one_part_each")

STEPS = 6
CPU = "cpu"
SHORT = 5_000_000
"""Cycles: some 3 ms."""

Make = Callable[[Any], Any]


def fused_adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01, fused=True)


def deep(where: str) -> Any:
    """Enough layers for several of them to be due at once."""
    torch.manual_seed(0)
    inner = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 64), *inner, nn.Linear(64, 1)).to(where)


def batch_of(step: int, where: str) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 8, generator=seeded), torch.randn(16, 1, generator=seeded)
    return x.to(where), y.to(where)


def backward(model: Any, step: int, where: str) -> None:
    x, y = batch_of(step, where)
    nn.functional.mse_loss(model(x), y).backward()


def litter(where: str) -> None:
    """Take memory of small sizes and of the parameters', write to it, give it back."""
    kept = [torch.full((n,), 7.0, device=where) for n in (1, 4, 64, 512, 4096) for _ in range(4)]
    del kept


def state_of(optimizer: Any) -> list[Tensor]:
    return [
        t.cpu().clone()
        for entry in optimizer.state_dict()["state"].values()
        for t in entry.values()
        if torch.is_tensor(t)
    ]


def streams_of(where: str, count: int) -> list[Any]:
    """``count`` side streams, and the present one; None on a CPU."""
    if where == CPU:
        return [None] * (count + 1)
    return [*(torch.Stream(where) for _ in range(count)), current_stream()]


@contextmanager
def beside(stream: Any, after: Any = None) -> Iterator[None]:
    """Enqueue on ``stream``, after all that ``after`` has by now."""
    if stream is not None and after is not None:
        stream.wait_stream(after)
    with nullcontext() if stream is None else on(stream):
        yield


def follow(stream: Any, other: Any) -> None:
    if stream is not None:
        stream.wait_stream(other)


def busy(where: str) -> None:
    if where != CPU:
        sleep(SHORT)


def fetched(where: str, model: Any, *found: Tensor) -> list[Tensor]:
    """The weights and ``found``, once the device has done all."""
    if where != CPU:
        synchronize()
    return [weights(model).cpu(), *(t.cpu() for t in found)]


def assert_beside_cpu(run: Callable[..., list[Tensor]], *settings: Any) -> None:
    """``run`` on the device gives what it gives on a CPU."""
    mine, expected = run(DEVICE, *settings), run(CPU, *settings)
    assert_same(mine, expected)
    assert all(bool(t.isfinite().all()) for t in expected)


def until_gone(stepper: Any) -> None:
    """Collect until it is: the optimizer thread keeps it until all is enqueued."""
    end = time.monotonic() + 10
    while stepper() is not None:
        assert time.monotonic() < end, "something keeps the stepper"
        time.sleep(0.03)
        gc.collect()


# Resuming, and what a step is given.


def resumed(where: str, mode: str, offload: str, make: Make) -> list[Tensor]:
    """Weights and state after three steps, a resume by a new optimizer, and three more."""
    model = deep(where)
    found: list[Tensor] = []
    saved: Any = None
    for first in (0, 3):
        inner = make(model.parameters())
        with AsyncOptimizer(inner, model, mode=mode, offload=offload) as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
                saved = None
            for step in range(first, first + 3):
                backward(model, step, where)
                optimizer.step()
                optimizer.zero_grad()
                litter(where)
            optimizer.synchronize()
            saved = copy.deepcopy(optimizer.state_dict())
            found += state_of(optimizer)
    return [weights(model).cpu(), *found]


@pytest.mark.parametrize("make", [fused_adam, fused_adamw, adamw, sgd])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_a_resumed_run_goes_on_as_on_a_cpu(mode: str, offload: str, make: Make) -> None:
    assert_beside_cpu(resumed, mode, offload, make)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of devices that it does not know Accelerate asks whether CUDA is there."""

    def made(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(KIND, **kwargs)

    monkeypatch.setattr("accelerate.accelerator.get_grad_scaler", made)


def resumed_by_accelerate(mode: str | None, folder: Path) -> list[Tensor]:
    """As :func:`resumed`, on the device; stock Accelerate without ``mode``."""
    found: list[Tensor] = []
    for first in (0, 3):
        handler = GradScalerKwargs(init_scale=128.0)  # no step is skipped
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
        if accelerator.device.type != KIND:
            pytest.skip(f"Accelerate takes {accelerator.device}")
        if mode is not None:
            attach(accelerator, ScalerConfig(step_mode=mode))
        layers = deep(DEVICE)  # before the optimizer: where it is, some devices make it anew
        model, optimizer = accelerator.prepare(layers, fused_adamw(layers.parameters()))
        if first:
            accelerator.load_state(str(folder))
        assert accelerator.scaler.is_enabled()
        for step in range(first, first + 3):
            x, y = batch_of(step, DEVICE)
            accelerator.backward(nn.functional.mse_loss(model(x).float(), y))
            optimizer.step()
            optimizer.zero_grad()
            litter(DEVICE)
        accelerator.save_state(str(folder))
        found += [weights(model).cpu(), *state_of(optimizer)]
        if mode is not None:
            detach(accelerator)
    return found


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_load_state_of_accelerate_goes_on_as_in_stock(mode: str, tmp_path: Path) -> None:
    mine = resumed_by_accelerate(mode, tmp_path / "mine")
    assert_same(mine, resumed_by_accelerate(None, tmp_path / "stock"))


def with_exchanged_state(where: str, mode: str) -> list[Tensor]:
    """Somebody puts new tensors in the state, as a library that resets it does."""
    model = deep(where)
    with AsyncOptimizer(adamw(model.parameters()), model, mode=mode) as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.synchronize()
                for entry in optimizer.state.values():
                    entry["exp_avg"] = entry["exp_avg"] * 0.5
                    entry["step"] = torch.full_like(entry["step"], 9.0)
            litter(where)
        return [weights(model).cpu(), *state_of(optimizer)]


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_state_that_was_exchanged_is_stepped_as_on_a_cpu(mode: str) -> None:
    assert_beside_cpu(with_exchanged_state, mode)


class Averaging(torch.optim.Optimizer):
    """Not torch's; replaces its state, keeps tensors in containers and in its groups."""

    def __init__(self, params: Any, lr: Tensor) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    past = self.state[p].get("past", [torch.zeros_like(p)])
                    self.state[p]["past"] = [0.5 * past[0] + p.grad]
                    p.sub_(group["lr"] * self.state[p]["past"][0])


def with_own_optimizer(where: str, mode: str) -> list[Tensor]:
    model = deep(where)
    inner = Averaging(model.parameters(), torch.tensor(0.1, device=where))
    with AsyncOptimizer(inner, model, mode=mode) as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            optimizer.step()
            optimizer.zero_grad()
            inner.param_groups[0]["lr"] = inner.param_groups[0]["lr"] * 0.9
            litter(where)
        optimizer.synchronize()
        past = [entry["past"][0].cpu() for entry in inner.state.values()]
        return [weights(model).cpu(), *past]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_tensors_of_another_optimizer_are_kept_until_the_device_is_done(mode: str) -> None:
    assert_beside_cpu(with_own_optimizer, mode)


def with_a_rate_on_the_device(mode: str | None) -> list[Tensor]:
    model = deep(DEVICE)
    rate = torch.tensor(0.01, device=DEVICE)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    if mode is not None:
        optimizer = AsyncOptimizer(optimizer, model, mode=mode)
    for step in range(STEPS):
        backward(model, step, DEVICE)
        optimizer.step()
        optimizer.zero_grad()
        rate.mul_(0.5)
        litter(DEVICE)
    if mode is not None:
        optimizer.close()
    return [weights(model).cpu()]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_learning_rate_on_the_device_is_that_of_its_step(mode: str) -> None:
    assert_same(with_a_rate_on_the_device(mode), with_a_rate_on_the_device(None))


# An optimizer that is dropped without close().


def dropped(where: str, mode: str, offload: str, make: Make, collected: bool) -> list[Tensor]:
    """Several searches in a function: each leaves its model, and takes the next one's memory."""
    found: list[Tensor] = []
    for trial in range(4):
        model = deep(where)
        optimizer = AsyncOptimizer(make(model.parameters()), model, mode=mode, offload=offload)
        for step in range(3):
            backward(model, step + trial, where)
            if step == 2:
                busy(where)  # the update starts late
            optimizer.step()
            optimizer.zero_grad()
        stepper = weakref.ref(optimizer._stepper)
        del optimizer
        if trial % 2:  # the model goes as well, and others get its memory
            del model
            if collected:
                until_gone(stepper)
            kept = [torch.full((n,), 7.0, device=where) for n in (1, 64, 512, 4096) * 20]
            found.append(torch.cat(kept).cpu())
        else:
            if collected:
                until_gone(stepper)
            x, _ = batch_of(0, where)
            with torch.no_grad():
                found.append(model(x).cpu())
            found.append(weights(model).cpu())
    return found


@pytest.mark.parametrize("collected", [True, False], ids=["collected", "left"])
@pytest.mark.parametrize("make", [fused_adamw, sgd])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_dropped_optimizer_writes_where_it_may(
    mode: str, offload: str, make: Make, collected: bool
) -> None:
    assert_beside_cpu(dropped, mode, offload, make, collected)


def dropped_beside_compiled(where: str) -> list[Tensor]:
    """A model whose forward waits as a whole goes on without its optimizer."""
    found: list[Tensor] = []
    for trial in range(3):
        model = deep(where)
        model.compile(backend="eager")
        optimizer = AsyncOptimizer(sgd(model.parameters()), model, mode="overlap")
        for step in range(3):
            backward(model, step + trial, where)
            if step == 2:
                busy(where)
            optimizer.step()
            optimizer.zero_grad()
        stepper = weakref.ref(optimizer._stepper)
        del optimizer
        until_gone(stepper)
        x, _ = batch_of(0, where)
        found.append(model(x).detach().cpu())
    return found


def test_a_compiled_model_outlives_its_dropped_optimizer() -> None:
    assert_beside_cpu(dropped_beside_compiled)


def succeeded(where: str) -> list[Tensor]:
    """Another optimizer takes over parameters that one which is gone still updates."""
    model = deep(where)
    found: list[Tensor] = []
    for trial in range(3):
        optimizer = AsyncOptimizer(sgd(model.parameters()), model, mode="overlap")
        backward(model, trial, where)
        backward(model, trial + 1, where)
        busy(where)
        optimizer.step()
        optimizer.zero_grad()
        stepper = weakref.ref(optimizer._stepper)
        del optimizer
        until_gone(stepper)
        with AsyncOptimizer(adamw(model.parameters()), model, mode="delayed") as optimizer:
            for p in model.parameters():
                p.grad = torch.ones_like(p)  # no forward in between
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model).cpu())
    return found


def test_another_optimizer_takes_over_from_a_dropped_one() -> None:
    assert_beside_cpu(succeeded)


def test_the_rate_of_a_dropped_optimizer_is_kept_until_the_device_is_done() -> None:
    for trial in range(4):
        model = deep(DEVICE)
        rate = torch.tensor(0.01, device=DEVICE)
        inner = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
        optimizer = AsyncOptimizer(inner, model, mode="overlap")
        for step in range(2):
            backward(model, step + trial, DEVICE)
            busy(DEVICE)
            optimizer.step()
            optimizer.zero_grad()
        stepper = weakref.ref(optimizer._stepper)
        del optimizer, inner, rate
        until_gone(stepper)
        litter(DEVICE)
        found = weights(model).cpu()
        assert bool(found.isfinite().all())


# Streams of the user's own.


def evaluated_on_two(where: str, mode: str, offload: str, grad: bool) -> list[Tensor]:
    """Both evaluations are ordered after the step, neither after the other."""
    model = deep(where)
    one, two, home = streams_of(where, 2)
    found: list[Tensor] = []
    with AsyncOptimizer(sgd(model.parameters()), model, mode=mode, offload=offload) as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            busy(where)
            optimizer.step()
            optimizer.zero_grad()
            follow(one, home)
            follow(two, home)
            for stream in (one, two):
                with beside(stream), torch.set_grad_enabled(grad):
                    x, _ = batch_of(0, where)
                    found.append(model(x).detach().clone())
            for stream in (one, two):
                follow(home, stream)
        return fetched(where, model, *found)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_evaluation_on_two_streams(mode: str, offload: str, grad: bool) -> None:
    assert_beside_cpu(evaluated_on_two, mode, offload, grad)


def averaged(where: str, offload: str, when: str) -> list[Tensor]:
    """An EMA on a stream that follows the training stream as it was right after the step."""
    model = deep(where)
    side, other, home = streams_of(where, 2)
    average = [p.detach().clone() for p in model.parameters()]
    another = [p.detach().clone() for p in model.parameters()]
    inner = sgd(model.parameters())
    with AsyncOptimizer(inner, model, mode="overlap", offload=offload) as optimizer:
        backward(model, 0, where)
        for step in range(STEPS):
            busy(where)
            optimizer.step()
            optimizer.zero_grad()
            follow(side, home)
            follow(other, home)
            if when == "after a use at home":
                backward(model, step + 1, where)
            if when == "after a synchronize elsewhere":
                with beside(other):
                    optimizer.synchronize()
            for stream, own in ((side, average), (other, another)):
                with beside(stream), torch.no_grad():
                    for mean, p in zip(own, model.parameters(), strict=True):
                        mean.lerp_(p.detach() if step % 2 else p, 0.25)
            follow(home, side)
            follow(home, other)
            if when != "after a use at home":
                backward(model, step + 1, where)
        return fetched(where, model, *average, *another)


@pytest.mark.parametrize(
    "when", ["before any use", "after a use at home", "after a synchronize elsewhere"]
)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_averages_on_streams_beside_the_training(offload: str, when: str) -> None:
    assert_beside_cpu(averaged, offload, when)


def gradients_read(where: str, mode: str, offload: str) -> list[Tensor]:
    """After the step gradients are looked at on three streams, then added to or zeroed."""
    model = deep(where)
    one, two, home = streams_of(where, 2)
    found: list[Tensor] = []
    scaler = GradScaler(torch.device(where).type, init_scale=1024.0)
    optimizer = AsyncOptimizer(
        sgd(model.parameters()), model, scaler=scaler, mode=mode, offload=offload
    )
    with optimizer:
        for step in range(STEPS):
            x, y = batch_of(step, where)
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            busy(where)
            optimizer.step()
            follow(one, home)
            follow(two, home)
            for stream in (home, two, one):
                with beside(stream):
                    found += [p.grad.abs() for p in model.parameters()]
            follow(home, one)
            follow(home, two)
            if step % 3 == 0:
                optimizer.zero_grad(set_to_none=False)
            elif step % 3 == 1:
                optimizer.zero_grad()
        return fetched(where, model, *found)


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_gradients_that_are_read_on_several_streams(mode: str, offload: str) -> None:
    assert_beside_cpu(gradients_read, mode, offload)


def read_by_a_thread(where: str) -> list[Tensor]:
    """Another thread reads on its own stream; the training stream has used all before."""
    model = deep(where)
    side, home = streams_of(where, 1)
    found: list[Tensor] = []

    def read() -> None:
        with beside(side), torch.no_grad():
            found.extend(p.clone() for p in model.parameters())

    with AsyncOptimizer(sgd(model.parameters()), model, mode="overlap") as optimizer:
        backward(model, 0, where)
        for step in range(STEPS):
            busy(where)
            optimizer.step()
            optimizer.zero_grad()
            follow(side, home)
            backward(model, step + 1, where)
            reader = threading.Thread(target=read)
            reader.start()
            reader.join()
            follow(home, side)
        return fetched(where, model, *found)


def test_a_thread_with_a_stream_of_its_own() -> None:
    assert_beside_cpu(read_by_a_thread)


def averaged_while_delayed(where: str) -> list[Tensor]:
    """The average reads the model before it is published, on a stream that nobody follows yet."""
    model = deep(where)
    side, home = streams_of(where, 1)
    average = [p.detach().clone() for p in model.parameters()]
    found: list[Tensor] = []
    with AsyncOptimizer(sgd(model.parameters()), model, mode="delayed") as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            optimizer.step()
            optimizer.zero_grad()
            with beside(side, home), torch.no_grad():
                busy(where)
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(p, 0.25)
            with torch.no_grad():
                x, _ = batch_of(0, where)
                found.append(model(x))
            follow(home, side)
        return fetched(where, model, *average, *found)


def test_an_average_beside_an_evaluation_while_an_update_is_delayed() -> None:
    assert_beside_cpu(averaged_while_delayed)


def compiled(where: str) -> list[Tensor]:
    """A model whose forward waits as a whole, used and read on other streams."""
    model = deep(where)
    model.compile(backend="eager")
    side, other, home = streams_of(where, 2)
    found: list[Tensor] = []
    with AsyncOptimizer(sgd(model.parameters()), model, mode="overlap") as optimizer:
        backward(model, 0, where)
        for step in range(STEPS):
            busy(where)
            optimizer.step()
            optimizer.zero_grad()
            follow(side, home)
            x, _ = batch_of(0, where)
            if step % 3 == 2:  # the whole of it is awaited there first
                with beside(side, home):
                    found.append(model(x).detach().clone())
                found += [p.detach().clone() for p in model.parameters()]
            backward(model, step + 1, where)
            with beside(side):
                x, _ = batch_of(0, where)
                if step % 2:
                    found.append(model(x).detach().clone())
            if step % 2 == 0:
                with beside(other):
                    optimizer.synchronize()
                with beside(side):  # which nobody waits for that is compiled
                    found += [p.detach().clone() for p in model.parameters()]
            follow(home, side)
        return fetched(where, model, *found)


def test_a_compiled_model_on_two_streams() -> None:
    assert_beside_cpu(compiled)


# synchronize() on another stream.


def published_elsewhere(where: str, offload: str, how: str) -> list[Tensor]:
    """``delayed``: the newest values come while the training stream still has a backward to do."""
    model = deep(where)
    side, home = streams_of(where, 1)
    found: list[Tensor] = []
    inner = sgd(model.parameters())
    with AsyncOptimizer(inner, model, mode="delayed", offload=offload) as optimizer:
        for step in range(STEPS):
            follow(side, home)
            busy(where)
            backward(model, step, where)
            with beside(side), torch.no_grad():
                if how == "evaluation":
                    x, _ = batch_of(0, where)
                    found.append(model(x).clone())
                elif how == "state_dict":
                    found += [t.clone() for t in model.state_dict().values()]
                else:
                    optimizer.synchronize()
                    busy(where)
            x, _ = batch_of(step, where)
            found.append(model(x).detach().clone())  # at home, in order by itself
            follow(home, side)
            optimizer.step()
            optimizer.zero_grad()
        return fetched(where, model, *found)


@pytest.mark.parametrize("how", ["evaluation", "state_dict", "synchronize"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_delayed_publishes_in_the_order_of_the_training_stream(offload: str, how: str) -> None:
    assert_beside_cpu(published_elsewhere, offload, how)


def saved_after_an_edit(where: str) -> list[Tensor]:
    """Masters learn of an edit where the state is saved: on a stream that nobody follows."""
    model = deep(where)
    side, _ = streams_of(where, 1)
    with AsyncOptimizer(sgd(model.parameters()), model, mode="delayed") as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.synchronize()
                busy(where)
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
                with beside(side):
                    busy(where)
                    optimizer.state_dict()
    return [weights(model).cpu()]


def test_masters_learn_of_an_edit_in_the_order_of_the_training_stream() -> None:
    assert_beside_cpu(saved_after_an_edit)


def saved_elsewhere(where: str, mode: str) -> list[Tensor]:
    """The optimizer's state is read on a stream that followed before the state was there."""
    model = deep(where)
    side, home = streams_of(where, 1)
    found: list[Tensor] = []
    with AsyncOptimizer(sgd(model.parameters()), model, mode=mode) as optimizer:
        for step in range(STEPS):
            backward(model, step, where)
            busy(where)
            optimizer.step()
            optimizer.zero_grad()
            follow(side, home)
            with beside(side):
                entries = optimizer.state_dict()["state"].values()
                found += [entry["momentum_buffer"].clone() for entry in entries]
            follow(home, side)
        return fetched(where, model, *found)


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_state_that_is_saved_on_another_stream(mode: str) -> None:
    assert_beside_cpu(saved_elsewhere, mode)
