"""The asynchronous step on a device beside torch's, bit for bit; what overlaps; its memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    event,
    fused_adamw,
    fused_sgd,
    peak_bytes,
    sgd,
    sleep,
    synchronize,
)
from device_training import Training
from support import mlp, weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer import replica as replica_module
from accel_scaler.async_optimizer.replica import SMALLEST_PART, Replica
from accel_scaler.async_optimizer.streams import SideStreams
from accel_scaler.async_optimizer.worker import Task
from accel_scaler.optimizer_step.stepper import async_stepper_of

STEPS, ACCUMULATION, OVERFLOW, CLIP = 12, 2, 7, 0.5
SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 5}

each_offload = pytest.mark.parametrize("offload", ["none", "cpu"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def loss_of(model: Any, step: int, micro: int) -> Tensor:
    seeded = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(16, 8, generator=seeded).to(DEVICE)
    y = torch.randn(16, 1, generator=seeded).to(DEVICE)
    with torch.autocast(KIND, dtype=torch.float16):
        out = model(x.to(next(model.parameters()).dtype))
    loss: Tensor = nn.functional.mse_loss(out.float(), y) / ACCUMULATION
    return loss * float("inf") if step == OVERFLOW else loss


Result = tuple[list[Tensor], list[list[float]]]


def trained(make: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Result:
    """Weights and state; norms, scales, learning rates and skips. Without ``settings`` torch's."""
    model = mlp(64).to(DEVICE, dtype)
    optimizer: Any = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
    scaler: Any = (GradScaler if settings else torch.amp.GradScaler)(KIND, **SETTINGS)
    if settings:
        optimizer = AsyncOptimizer(optimizer, model, scaler=scaler, **settings)
    numbers: list[list[float]] = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            scaler.scale(loss_of(model, step, micro)).backward()
        before = scaler.get_scale()
        if settings:
            norm = optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            skipped = optimizer.step_was_skipped
        else:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < before
        if not skipped:
            schedule.step()
        found = 0.0 if skipped else float(norm)  # torch's may be NaN then, ours is inf
        numbers.append([found, scaler.get_scale(), *schedule.get_last_lr(), skipped])
        optimizer.zero_grad()
    entries = optimizer.state_dict()["state"].values()
    state = [v.cpu() for entry in entries for _, v in sorted(entry.items()) if torch.is_tensor(v)]
    if settings:
        optimizer.close()
    return [weights(model).cpu(), *state], numbers


def assert_equal(mine: Result, expected: Result) -> None:
    assert mine[1] == expected[1]
    norms, _, _, skipped = zip(*mine[1], strict=True)
    assert max(norms) > CLIP  # it clipped
    assert list(skipped) == [step == OVERFLOW for step in range(STEPS)]
    assert len(mine[0]) == len(expected[0])
    assert all(map(torch.equal, mine[0], expected[0]))


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("make", [sgd, fused_sgd, adamw, fused_adamw])
def test_undelayed_modes_equal_torch(make: Any, mode: str) -> None:
    assert_equal(trained(make, mode=mode), trained(make))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"offload": "cpu"}),
        (torch.float16, {"offload": "none"}),
        (torch.float16, {"offload": "cpu"}),
        # Whose gradients torch's check does not take on CUDA: with masters, and in place.
        (torch.bfloat16, {"offload": "none"}),
        (torch.bfloat16, {"offload": "cpu"}),
        (torch.bfloat16, {"master_weights": "none"}),
    ],
)
@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_overlap_equals_sync(make: Any, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    mine, expected = (trained(make, dtype, mode=mode, **settings) for mode in ("overlap", "sync"))
    assert_equal(mine, expected)


# What overlaps.


@pytest.mark.usefixtures("side_streams", "one_part_each")
@each_offload
def test_the_forward_starts_while_later_parts_are_updated(
    monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    step_part, ends = Replica.step_part, list[Any]()

    def slowly(self: Replica, *args: Any) -> None:
        step_part(self, *args)
        sleep()
        ends.append(event(timed=True))

    model = mlp(64).to(DEVICE)
    with AsyncOptimizer(sgd(model.parameters()), model, offload=offload) as optimizer:
        monkeypatch.setattr(Replica, "step_part", slowly)
        for step in range(4):
            x = torch.randn(16, 8).to(DEVICE)
            entered = model[0](x)
            begun = event(timed=True)
            model[2](model[1](entered)).sum().backward()
            if step > 1:  # the order of use is known by then
                optimizer.synchronize()
                synchronize()
                assert len(ends) == 4
                assert begun.elapsed_time(ends[-1]) > 0
            else:
                optimizer.synchronize()
            ends.clear()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("side_streams")
def test_another_thread_s_read_waits_while_a_step_is_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_part, order, readers = Replica.step_part, list[str](), list[threading.Thread]()
    model = mlp(64).to(DEVICE)

    def read() -> None:
        model[0].weight.sum()
        order.append("read")

    def watched(self: Replica, *args: Any) -> None:
        if not readers:
            readers.append(threading.Thread(target=read))
            readers[0].start()
            readers[0].join(0.2)
        step_part(self, *args)
        order.append("stepped")

    monkeypatch.setattr(Replica, "step_part", watched)
    with AsyncOptimizer(sgd(model.parameters()), model, mode="overlap") as optimizer:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        readers[0].join(60)
        optimizer.synchronize()
    assert order == ["stepped", "read"]


@pytest.mark.usefixtures("side_streams")
def test_an_interrupt_loses_no_step_that_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C just before ``step()`` returns."""
    execute, found, calls = Task.execute, list[Any](), list[Task]()

    def interrupted(self: Task) -> None:
        calls.append(self)
        execute(self)
        if len(calls) == 2:
            raise KeyboardInterrupt

    for mode in ("overlap", "sync"):
        model = mlp(64).to(DEVICE)
        with AsyncOptimizer(sgd(model.parameters()), model, mode=mode) as optimizer:
            calls.clear()
            monkeypatch.setattr(Task, "execute", interrupted if mode == "overlap" else execute)
            for step in range(4):
                loss_of(model, step, 0).backward()
                with suppress(KeyboardInterrupt):
                    optimizer.step()
                optimizer.zero_grad()
        found.append(weights(model).cpu())
    assert torch.equal(*found)


def test_autograds_threads_do_not_become_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a gradient: its like would be in ``threading.enumerate()`` for good."""
    step_part = Replica.step_part

    def slowly(self: Replica, *args: Any) -> None:
        time.sleep(0.02)
        step_part(self, *args)

    monkeypatch.setattr(Replica, "step_part", slowly)
    gc.collect()  # a finalizer of earlier tests may log or join on whichever thread it runs
    before = set(threading.enumerate())
    t = Training(False, scaled=False, mode="delayed", delay_compensation="preview")
    t.train(0, 1, 2, zero=False)
    t.finish()
    added = set(threading.enumerate()) - before
    assert "_DummyThread" not in {type(thread).__name__ for thread in added}


# Memory.


def wide(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


WIDTH, LAYERS = 512, 8
SIZE = WIDTH * WIDTH * LAYERS
PIECE = 4 * WIDTH * WIDTH
"""Bytes of the largest parameter in float32."""
BLOCK = 4 * SMALLEST_PART
"""Bytes of a block's scratch: no block is larger than the part that it is of."""


def wait_for_update(inner: torch.optim.Optimizer) -> None:
    """``synchronize()`` would publish it as well."""
    stepper = async_stepper_of(inner)
    assert stepper is not None
    assert stepper.wait()


def peak_of(dtype: torch.dtype, **settings: Any) -> int:
    """Bytes on the device in the worst moment of some steps, the workspaces of kernels aside."""

    def run(width: int, layers: int) -> None:
        model = wide(width, layers).to(DEVICE, dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        with AsyncOptimizer(inner, model, **settings) as optimizer:
            for _ in range(5):
                x = torch.ones(8, width, device=DEVICE, dtype=dtype)
                model(x).float().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                wait_for_update(inner)  # else how far it is decides
                synchronize()

    run(64, 1)
    with peak_bytes() as taken:
        run(WIDTH, LAYERS)
    return taken()


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_offload_takes_masters_and_state_off_the_device(mode: str) -> None:
    settings = {"mode": mode, "delay_compensation": "none"}
    with_state = peak_of(torch.float16, offload="none", **settings)
    without = peak_of(torch.float16, offload="cpu", **settings)
    # Master, exp_avg and exp_avg_sq: 12 bytes a parameter; rounding of blocks aside.
    assert without < with_state - 11 * SIZE
    # Weights and gradients, 2 bytes each, and the gradients that are still on their way.
    assert without < 7 * SIZE


@pytest.mark.usefixtures("memory_counter")
@each_offload
@each_dtype
def test_a_preview_takes_no_device_memory_but_for_scratch(
    offload: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "SMALLEST_DEVICE_PART", SMALLEST_PART)
    settings: dict[str, Any] = {"mode": "delayed", "offload": offload}
    bare, shown = (
        peak_of(dtype, delay_compensation=compensation, **settings)
        for compensation in ("none", "preview")
    )
    # A block of gradients (an update of float16 has it anyway), and one of sums.
    blocks = 1 if dtype is torch.float16 else 2
    assert shown <= bare + blocks * BLOCK + PIECE // 2


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_state_dict_takes_no_device_memory(mode: str) -> None:
    model = wide(WIDTH, LAYERS).to(DEVICE, torch.float16)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with AsyncOptimizer(inner, model, step_mode=mode) as optimizer:
        model(torch.ones(8, WIDTH, device=DEVICE).half()).float().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        with peak_bytes() as taken:
            saved = optimizer.state_dict()
        assert {"exp_avg", "exp_avg_sq", "master"} < saved["state"][0].keys()
        assert taken() < PIECE


@pytest.mark.usefixtures("memory_counter")
@pytest.mark.parametrize("compensation", ["none", "preview"])
@each_dtype
def test_gradients_that_were_sent_down_do_not_stay(
    compensation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the next forward has what it is to see their memory is free, though the update runs."""
    step_part: Callable[..., None] = Replica.step_part
    gate = threading.Event()

    def waiting(self: Replica, *args: Any) -> None:
        assert gate.wait(60)
        step_part(self, *args)

    monkeypatch.setattr(Replica, "step_part", waiting)
    model = wide(WIDTH, LAYERS).to(DEVICE, dtype)
    size = SIZE * dtype.itemsize
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Any = {"offload": "cpu", "delay_compensation": compensation}
    x = torch.ones(8, WIDTH, device=DEVICE, dtype=dtype)
    with AsyncOptimizer(inner, model, mode="delayed", **settings) as optimizer:
        loss = model(x).float().mean()
        for _ in range(3):
            loss.backward()
            synchronize()
            full = torch.accelerator.memory_allocated(DEVICE)
            gate.clear()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            loss = model(x).float().mean()  # waits for what it is to see, and no more
            synchronize()
            torch.empty(1, device=DEVICE)  # the allocator looks for what has become free
            left = torch.accelerator.memory_allocated(DEVICE)
            gate.set()
            wait_for_update(inner)
            assert left < full - 0.9 * size
        del loss


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize(("clips", "scale"), [(False, None), (True, 4.0)])
def test_a_gradient_travels_once_a_step(
    scale: float | None, clips: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is final; each of the backwards sent it, and so did a clip."""
    sent, down = list[float](), SideStreams.down

    def counted(self: SideStreams, source: Tensor, host: Tensor) -> Any:
        sent.append(source.item())
        return down(self, source, host)

    monkeypatch.setattr(SideStreams, "down", counted)
    scaler = None if scale is None else GradScaler(KIND, init_scale=scale)
    w = nn.Parameter(torch.ones(1, device=DEVICE))
    inner = torch.optim.SGD([w], lr=0.125)
    with AsyncOptimizer(inner, mode=mode, offload="cpu", scaler=scaler) as optimizer:
        for _ in range(2):
            loss = w.sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clips:
            optimizer.clip_grad_norm_(10.0)
        assert sent == []
        optimizer.step()
        assert sent == [2.0]
        optimizer.synchronize()
        assert w.item() == 0.75
