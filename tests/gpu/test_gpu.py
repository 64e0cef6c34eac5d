"""Facts that only a device can show: its kernels' numbers, and how often a step synchronises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import DEVICE, KIND, module, synchronize
from support import mlp, reset, weights
from telemetry_runs import windows_of
from torch import Tensor, nn

from accel_scaler import GradScaler, ScaledAccelerator, ScalerConfig, attach, detach
from accel_scaler.optimizer_step.boundary import Boundary
from accel_scaler.telemetry.recorder import make_recorder

STEPS = 8
OVERFLOW = 3
SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
KINDS = ["sgd", "adamw", "fused adamw", "fused sgd"]


def optimizer_of(kind: str, model: nn.Module) -> Any:
    fused = kind.startswith("fused")
    if kind.endswith("sgd"):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)


def loss_of(
    model: nn.Module,
    step: int,
    overflow: int | None = OVERFLOW,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """An autocast loss on this step's own rows; inf in step ``overflow``."""
    seeded = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=seeded).to(DEVICE)
    y = torch.randn(16, 1, generator=seeded).to(DEVICE)
    with torch.autocast(KIND, dtype=dtype, enabled=dtype is not torch.float32):
        loss = nn.functional.mse_loss(model(x), y)
    return loss * float("inf") if step == overflow else loss


class Recorded:
    """A model and its boundary, with telemetry where a path is given."""

    def __init__(self, kind: str, path: Path | None) -> None:
        self.model = mlp(64).to(DEVICE)
        self.optimizer, self.scaler = optimizer_of(kind, self.model), GradScaler(KIND, **SETTINGS)
        config = ScalerConfig(telemetry=None if path is None else str(path))
        self.recorder = make_recorder(self.scaler, config, {"rank": 0, "ranks": 1})
        self.scaler.parameter_names.add_module(self.model)
        self.boundary = Boundary(self.scaler, torch.device(DEVICE), self.recorder)
        self.boundary.add(self.optimizer)

    def finish(self, clip: bool) -> None:
        if clip:
            self.boundary.clipping.clip_norm(list(self.model.parameters()), 0.5)
        assert self.boundary.step(self.optimizer)
        self.optimizer.zero_grad()


@contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    synchronize()
    module().set_sync_debug_mode(mode)
    try:
        yield
    finally:
        module().set_sync_debug_mode("default")


def synchronisations(work: Callable[[], object]) -> int:
    """How often ``work`` waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_debug("warn"):
            work()
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.usefixtures("sync_counter")
@pytest.mark.parametrize("kind", ["fused adamw", "fused sgd"])
def test_a_plain_fused_step_does_not_synchronise(kind: str) -> None:
    """Once the optimizer has state, as with torch's own scaler; an overflow changes nothing."""
    model = mlp(64).to(DEVICE)
    optimizer, scaler = optimizer_of(kind, model), GradScaler(KIND, **SETTINGS)
    for step in range(STEPS):
        scaled = scaler.scale(loss_of(model, step))
        scaled.backward()
        if step < 2:
            scaler.step(optimizer)
            scaler.update()
        else:
            with sync_debug("error"):
                scaler.step(optimizer)
                scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2048.0


@pytest.mark.usefixtures("sync_counter")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("telemetry", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_a_boundary_synchronises_with_its_check_alone(
    kind: str, clip: bool, telemetry: bool, tmp_path: Path
) -> None:
    """It waits for an event once, not for the device, in every finite window after the first."""
    path = tmp_path / "run.jsonl" if telemetry else None
    training = Recorded(kind, path)
    counts = []
    for step in range(STEPS):
        training.scaler.scale(loss_of(training.model, step, overflow=None)).backward()
        counts.append(synchronisations(lambda: training.finish(clip)))
    assert counts[2:] == [0] * (STEPS - 2)
    training.recorder.close()
    if path is not None:
        assert [window.get("norms") is not None for window in windows_of(path)] == [clip] * STEPS


@pytest.mark.parametrize(("clip", "accumulation"), [(True, 1), (False, 1), (False, 3)])
def test_the_loss_on_record_is_that_of_the_loop(
    clip: bool, accumulation: int, tmp_path: Path
) -> None:
    """With the norms, or by a copy that nobody waits for; each loss is gone by then."""
    training = Recorded("fused adamw", tmp_path / "run.jsonl")
    expected = []
    for step in range(STEPS):
        losses = []
        for part in range(accumulation):
            loss = loss_of(training.model, step * accumulation + part, overflow=None)
            training.scaler.scale(loss).backward()
            losses.append(loss.detach().clone())
            del loss
        training.finish(clip)
        expected.append(sum(map(float, losses)))
    training.recorder.close()
    found = [window["loss"] for window in windows_of(tmp_path / "run.jsonl")]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_fused_sgd_whose_first_step_overflows_starts_clean() -> None:
    """torch keeps a momentum buffer that was never written; fault F9."""
    fused, plain = mlp(64).to(DEVICE), mlp(64).to(DEVICE)
    for model, kind in ((fused, "fused sgd"), (plain, "sgd")):
        optimizer, scaler = optimizer_of(kind, model), GradScaler(KIND, **SETTINGS)
        # A fresh allocation finds this in memory that was used before.
        litter = [torch.full((64 * 8,), float("nan"), device=DEVICE) for _ in range(64)]
        del litter
        for step in range(4):
            scaler.scale(loss_of(model, step, overflow=0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 0:
                assert not any(state for state in optimizer.state.values())
    torch.testing.assert_close(weights(fused), weights(plain), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(fused), weights(mlp(64).to(DEVICE)))


def through_accelerate(accelerator: Any, kind: str) -> tuple[Tensor, list[bool], list[float]]:
    layers = mlp(64)
    optimizer = optimizer_of(kind, layers.to(DEVICE))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(layers, optimizer, schedule)
    skipped, rates = [], []
    for step in range(STEPS):
        accelerator.backward(loss_of(model, step))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        rates.append(schedule.get_last_lr()[0])
    return weights(accelerator.unwrap_model(model)), skipped, rates


def fp16() -> Any:
    accelerator = Accelerator(mixed_precision="fp16")
    assert accelerator.device.type == KIND
    accelerator.scaler = torch.amp.GradScaler(KIND, **SETTINGS)
    return accelerator


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_attached_equals_stock_accelerate_bit_for_bit(kind: str) -> None:
    theirs = through_accelerate(fp16(), kind)
    accelerator = attach(fp16())
    assert type(accelerator) is ScaledAccelerator
    ours = through_accelerate(accelerator, kind)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]
    assert ours[1] == [step == OVERFLOW for step in range(STEPS)]


def test_attached_fused_skips_as_the_plain_optimizer_does() -> None:
    """Stock Accelerate misses the skip and moves the schedule on; fault F1."""
    plain = through_accelerate(attach(fp16()), "adamw")
    fused = through_accelerate(attach(fp16()), "fused adamw")
    assert fused[1:] == plain[1:]
    assert fused[1][OVERFLOW]
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_without_a_scaler_a_bad_batch_leaves_no_trace(precision: str, dtype: torch.dtype) -> None:
    """Stock Accelerate, which is not shown that batch, is the reference."""

    def trained(accelerator: Any, steps: list[int]) -> tuple[Tensor, list[bool]]:
        layers = mlp(64)
        model, optimizer = accelerator.prepare(layers, optimizer_of("adamw", layers.to(DEVICE)))
        skipped = []
        for step in steps:
            accelerator.backward(loss_of(model, step, dtype=dtype))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        return weights(accelerator.unwrap_model(model)), skipped

    without = [step for step in range(STEPS) if step != OVERFLOW]
    expected, _ = trained(Accelerator(mixed_precision=precision), without)
    reset()
    found, skipped = trained(attach(Accelerator(mixed_precision=precision)), list(range(STEPS)))
    assert torch.equal(found, expected)
    assert skipped == [step == OVERFLOW for step in range(STEPS)]


# Accelerate's loop on the device: an overflow run again, a healed run.

each_offload = pytest.mark.parametrize("offload", ["none", "cpu"])
WINDOWS = 6


class Loud(nn.Linear):
    """Beyond float16 for a large factor, and small again in float32."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e3 * self.factor) / (3e3 * self.factor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.sick, self.drop = nn.Linear(8, 64), Loud(64, 8), nn.Dropout(0.25)
        self.after = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.drop(self.sick(self.before(x))))
        return (out.float() - 1) / 3


def prepared(net: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    reset()
    accelerator: Any = Accelerator(mixed_precision="fp16")
    if accelerator.device.type != KIND:
        pytest.skip(f"Accelerate takes {accelerator.device}")
    accelerator.scaler = torch.amp.GradScaler(KIND)  # of itself it makes one for CUDA alone
    attach(accelerator, ScalerConfig(**{"init_scale": 256.0} | settings))
    net = net.to(DEVICE).half()  # autocast knows no simulated device
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(net, optimizer)


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE).half()


def train(loud: tuple[int, ...], skips_first: int = 0, **settings: Any) -> tuple[Any, Any]:
    """``loud``: windows that overflow in the forward, unless the module is in float32."""
    torch.manual_seed(0)
    net = Net()
    accelerator, model, optimizer = prepared(net, **settings)
    torch.manual_seed(3)
    for number in range(WINDOWS):
        net.sick.factor = 1e3 if number in loud else 1.0
        accelerator.backward(model(batch_of(number)).square().mean())
        if number >= skips_first:
            optimizer.step()
        else:
            accelerator.scaler.abandon_window()
        optimizer.zero_grad()
    records = list(accelerator.scaler_history.records)
    optimizer.synchronize()
    accelerator.scaler.abandon_window()
    detach(accelerator)
    synchronize()
    return [value.detach().cpu().nan_to_num(9e9) for value in net.state_dict().values()], records


@each_offload
def test_a_replay_leaves_no_trace(offload: str) -> None:
    plain, _ = train((2, 4), find_overflow="off", offload=offload)
    again, records = train((2, 4), find_overflow="replay", offload=offload)
    found = [None if r.first is None else r.first["module"] for r in records]
    assert found == [None, None, "sick", None, "sick", None]
    assert all(map(torch.equal, again, plain))


@each_offload
def test_a_retried_run_is_the_one_that_starts_at_the_lower_scale(offload: str) -> None:
    retried, records = train((), on_overflow="retry", init_scale=2.0**30, offload=offload)
    assert [r.skipped for r in records] == [False] * WINDOWS
    assert records[0].retries > 0
    expected, _ = train((), init_scale=records[-1].scale, offload=offload)
    assert all(map(torch.equal, retried, expected))


@each_offload
def test_a_healed_run_is_the_one_that_has_it_in_its_settings(offload: str) -> None:
    every = tuple(range(WINDOWS))
    healed, records = train(every, heal=True, offload=offload)
    assert [r.healed for r in records] == [("sick",)] + [()] * 5
    assert [r.skipped for r in records] == [True] + [False] * 5
    named, _ = train(every, 1, fp32_modules=["sick"], offload=offload)
    assert all(map(torch.equal, healed, named))
