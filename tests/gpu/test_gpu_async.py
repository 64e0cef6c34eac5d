"""The asynchronous step on a device: numbers, the order of streams, memory.

``sleep`` keeps one stream busy, so that a wait that is missing shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    current_stream,
    event,
    fused_adamw,
    fused_sgd,
    module,
    on,
    sgd,
    sleep,
    synchronize,
)
from accelerators import (
    assert_same as assert_close,
)
from references import Reference, recording
from support import mlp, weights
from telemetry_runs import windows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.async_optimizer.streams import SideStreams
from accel_scaler.devices import Streams

STEPS, ACCUMULATION, OVERFLOW = 24, 2, 7
SCALE = 1024.0
Prepare = Callable[[AsyncOptimizer, int], None]


OPTIMIZERS = [sgd, fused_sgd, adamw, fused_adamw]


def batch_of(step: int, micro: int, half: bool = False) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(16, 8, generator=seeded).to(DEVICE)
    y = torch.randn(16, 1, generator=seeded).to(DEVICE)
    return (x.half(), y.half()) if half else (x, y)


def loss_of(model: Any, step: int, micro: int, half: bool) -> Tensor:
    x, y = batch_of(step, micro, half)
    with nullcontext() if half else torch.autocast(KIND, dtype=torch.float16):
        loss: Tensor = nn.functional.mse_loss(model(x).float(), y.float()) / ACCUMULATION
    return loss * float("inf") if step == OVERFLOW else loss


def train(
    mode: str,
    offload: str = "none",
    *,
    make: Callable[[Any], Any] = sgd,
    half: bool = False,
    before_backward: Prepare | None = None,
    before_step: Prepare | None = None,
    after_step: Prepare | None = None,
    model: nn.Module | None = None,
    steps: int = STEPS,
    telemetry: Path | None = None,
    **settings: Any,
) -> tuple[Tensor, list[bool], list[float], list[Tensor]]:
    """Weights, skips, learning rates, and every state tensor, after some steps.

    ``settings``: of the ``AsyncOptimizer``; an update is late without a preview by default.
    """
    settings = {"delay_compensation": "none", "mode": mode, "offload": offload, **settings}
    model = mlp(64) if model is None else model
    model = model.to(DEVICE, torch.float16 if half else torch.float32)
    inner = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + 0.1 * n))
    scaler = GradScaler(KIND, init_scale=SCALE, growth_interval=5)
    skipped, rates = [], []
    recorded = nullcontext() if telemetry is None else recording(scaler, telemetry, DEVICE)
    with recorded, AsyncOptimizer(inner, model, scaler=scaler, **settings) as optimizer:
        for step in range(steps):
            for micro in range(ACCUMULATION):
                loss = loss_of(model, step, micro, half)
                if before_backward is not None:
                    before_backward(optimizer, step)
                scaler.scale(loss).backward()
            optimizer.clip_grad_norm_(0.5)
            if before_step is not None:
                before_step(optimizer, step)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            if not skipped[-1]:
                schedule.step()
            rates.append(schedule.get_last_lr()[0])
            optimizer.zero_grad()
            if after_step is not None:
                after_step(optimizer, step)
        saved = optimizer.state_dict()["state"]
    state = [
        value.cpu()
        for entry in saved.values()
        for value in entry.values()
        if torch.is_tensor(value)
    ]
    return weights(model).cpu(), skipped, rates, state


def assert_same(mine: Any, expected: Any) -> None:
    assert mine[1:3] == expected[1:3]
    assert mine[1] == [step == OVERFLOW for step in range(len(mine[1]))]
    assert torch.equal(mine[0], expected[0])
    assert len(mine[3]) == len(expected[3])
    assert all(map(torch.equal, mine[3], expected[3]))


def busy_update(optimizer: AsyncOptimizer, step: int) -> None:
    """The update starts late: whoever does not wait for it reads old parameters."""
    streams = optimizer._stepper.streams
    if streams._work is not None:
        with on(streams._work):
            sleep()


def busy_copies(optimizer: AsyncOptimizer, step: int) -> None:
    """Gradients travel late: a host that does not wait reads what was there before."""
    streams = optimizer._stepper.streams
    if streams._down is not None:
        with on(streams._down):
            sleep()


def busy_backward(optimizer: AsyncOptimizer, step: int) -> None:
    """Gradients are written late: an update that does not wait reads memory of before."""
    sleep()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_overlap_equals_sync(make: Any, half: bool, offload: str) -> None:
    expected = train("sync", offload, make=make, half=half)
    assert_same(train("overlap", offload, make=make, half=half), expected)


@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize(
    ("mode", "offload", "wish"),
    [("overlap", "none", "auto"), ("overlap", "cpu", "auto"), ("overlap", "none", "none")],
)
def test_bfloat16_parameters(make: Any, mode: str, offload: str, wish: str) -> None:
    """Whose gradients torch's check does not take on CUDA: with masters, and in place."""

    def run(mode: str) -> tuple[Tensor, list[bool], list[Tensor | None]]:
        model = mlp(64).to(DEVICE, torch.bfloat16)
        scaler = GradScaler(KIND, init_scale=SCALE, growth_interval=5)
        settings = {"mode": mode, "offload": offload, "master_weights": wish}
        skipped = []
        with AsyncOptimizer(
            make(model.parameters()), model, scaler=scaler, **settings
        ) as optimizer:
            for step in range(STEPS):
                scaler.scale(loss_of(model, step, 0, False)).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                skipped.append(optimizer.step_was_skipped)
            entries = optimizer.state_dict()["state"].values()
        masters = [entry.get("master") for entry in entries]
        return weights(model).cpu(), skipped, masters

    found, skipped, masters = run(mode)
    assert skipped == [step == OVERFLOW for step in range(STEPS)]
    assert all((master is None) is (wish == "none") for master in masters)
    expected = run("sync")
    assert torch.equal(found, expected[0])
    for mine, other in zip(masters, expected[2], strict=True):
        assert mine is None or torch.equal(mine, other)


@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_overlap_equals_torch(make: Any) -> None:
    model = mlp(64).to(DEVICE)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
    scaler = torch.amp.GradScaler(KIND, init_scale=SCALE, growth_interval=5)
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            scaler.scale(loss_of(model, step, micro, False)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
    assert torch.equal(train("overlap", make=make)[0], weights(model).cpu())


def delayed_reference(
    make: Callable[[Any], Any], half: bool, host: bool, compensation: str
) -> Tensor:
    """The one-step delay: publish what the step before computed, compensated, then step."""
    model = mlp(64).to(DEVICE, torch.float16 if half else torch.float32)
    params, scale, taken = list(model.parameters()), SCALE, 0
    delay = Reference(params, make, 0, compensation, "cpu" if host else None)
    masters, optimizer = delay.masters, delay.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.1 * n))
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            (loss_of(model, step, micro, half) * scale).backward()
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
        )
        if bool(norm.isfinite()):
            # All powers of two but the clipping, as in torch: (g / scale) * coefficient.
            factor = torch.clamp(0.5 / (norm / scale + 1e-6), max=1.0) / scale
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.to(master.device).float().mul_(factor.to(master.device))
            is_first = compensation == "preview" and not optimizer.state
            if not is_first:
                # Narrow ones stay scaled; the others are what a clip in torch leaves.
                delay.show(
                    grads if half else [m.grad.to(DEVICE) for m in masters],
                    [float(factor) if half else 1.0] * len(grads),
                )
            delay.before = {i: m.detach().clone() for i, m in enumerate(masters)}
            optimizer.step()
            if is_first:
                delay.publish()
            schedule.step()
            taken += 1
            scale *= 2.0 if taken % 5 == 0 else 1.0
        else:
            delay.publish()
            scale, taken = scale / 2.0, 0
        model.zero_grad()
    delay.publish()
    return weights(model).cpu()


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("make", [sgd, fused_adamw])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("compensation", ["none", "preview"])
def test_delayed_equals_the_reference(
    compensation: str, make: Any, half: bool, offload: str, busy: bool
) -> None:
    late = busy_update if busy else None
    settings: Any = {"make": make, "half": half, "delay_compensation": compensation}
    mine = train("delayed", offload, before_step=late, **settings)[0]
    expected = delayed_reference(make, half, offload == "cpu", compensation)
    if compensation == "none":
        assert torch.equal(mine, expected)
    else:  # in which kernels sum and multiply otherwise
        assert_close([mine], [expected])


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_what_is_measured_of_previews_is_what_the_model_saw(
    half: bool, offload: str, busy: bool, tmp_path: Path
) -> None:
    """Looked at from outside: the model before a fence and behind it. No number changes by it."""
    model, path = mlp(64), tmp_path / "run.jsonl"
    exact: dict[int, Tensor] = {}
    expected: dict[int, float] = {}

    def look(optimizer: AsyncOptimizer, step: int) -> None:
        if step % 4 < 2:
            return
        shown = weights(model).cpu().double()
        optimizer.synchronize()
        exact[step] = weights(model).cpu().double()
        if step % 4 == 3 and step != OVERFLOW:
            off, moved = (exact[step] - other for other in (shown, exact[step - 1]))
            expected[step] = float(off.norm() / moved.norm())

    def late(optimizer: AsyncOptimizer, step: int) -> None:
        if busy:
            busy_update(optimizer, step)
            busy_copies(optimizer, step)

    settings: Any = {"make": adamw, "half": half, "delay_compensation": "preview"}
    mine = train(
        *("delayed", offload),
        **settings,
        model=model,
        telemetry=path,
        before_step=late,
        after_step=look,
    )
    assert torch.equal(mine[0], train("delayed", offload, **settings)[0])
    errors = [line.get("preview_error") for line in windows_of(path)]
    assert [errors[step] for step in expected] == pytest.approx([*expected.values()], rel=1e-3)
    assert [n for n, error in enumerate(errors) if error is None] == [0, OVERFLOW]


BUSY: dict[str, dict[str, Prepare]] = {
    "backward": {"before_backward": busy_backward},
    "update": {"before_step": busy_update},
    "copies": {"before_backward": busy_copies},
    "update, after it was handed over": {"after_step": busy_update},
    "all": {
        "before_backward": busy_copies,
        "before_step": busy_update,
        "after_step": busy_backward,
    },
}


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_busy_stream_changes_no_number(mode: str, offload: str, half: bool, busy: str) -> None:
    expected = train("sync", offload, half=half, make=fused_adamw)
    assert_same(train(mode, offload, half=half, make=fused_adamw, **BUSY[busy]), expected)


@pytest.mark.races_allowed
@pytest.mark.usefixtures("side_streams")
def test_a_forward_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleep is long enough to show a race, so the tests above mean something."""
    expected = train("overlap", before_step=busy_update)
    monkeypatch.setattr(SideStreams, "follow", lambda self, event: None)
    assert not torch.equal(train("overlap", before_step=busy_update)[0], expected[0])


@pytest.mark.races_allowed
@pytest.mark.usefixtures("side_streams")
def test_a_host_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16: in float32 the factor that clips, read by the host, follows the copies anyway."""
    expected = train("overlap", "cpu", half=True, before_backward=busy_copies)
    monkeypatch.setattr(SideStreams, "wait_on_host", lambda self, event: None)
    mine = train("overlap", "cpu", half=True, before_backward=busy_copies)
    assert not torch.equal(mine[0], expected[0])


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_a_fence_sees_finished_parameters(mode: str, offload: str) -> None:
    """Between a step and the next forward: all parameters and the state, copied at once."""

    def seen_by(mode: str) -> list[Tensor]:
        seen = []

        def look(optimizer: AsyncOptimizer, step: int) -> None:
            if step % 5 == 0 and optimizer.model is not None:
                seen.extend(value.clone() for value in optimizer.model.state_dict().values())
                for entry in optimizer.state_dict()["state"].values():
                    seen.extend(v.clone() for v in entry.values() if torch.is_tensor(v))

        def publish_and_look(optimizer: AsyncOptimizer, step: int) -> None:
            optimizer.synchronize()  # with a fence at each step the one-step delay is none
            look(optimizer, step)

        after = publish_and_look if mode == "delayed" else look
        train(mode, offload, before_step=busy_update, after_step=after)
        return [value.cpu() for value in seen]

    expected, mine = seen_by("sync"), seen_by(mode)
    assert len(mine) == len(expected) > 0
    assert all(map(torch.equal, mine, expected))


@pytest.mark.usefixtures("side_streams")
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_training_on_another_stream(offload: str) -> None:
    """And what looks at it from the one that was the present one before."""
    expected, home, side = train("sync", offload), current_stream(), torch.Stream(DEVICE)

    def look(optimizer: AsyncOptimizer, step: int) -> None:
        with on(home):
            optimizer.synchronize()

    side.wait_stream(home)
    with on(side):
        assert_same(train("overlap", offload, before_step=busy_update), expected)
        mine = train("overlap", offload, before_step=busy_update, after_step=look)
        assert_same(mine, expected)
    home.wait_stream(side)


class Recomputed(nn.Module):
    """Its layers run again in the backward, on autograd's own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_checkpointed_layers_wait_as_others_do(offload: str) -> None:
    expected = train("sync", offload)
    mine = train("overlap", offload, model=Recomputed(), before_step=busy_update)
    assert_same(mine, expected)


@pytest.fixture
def timed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(self: Streams) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)

    monkeypatch.setattr(Streams, "event", timed)


def order(first: Any, second: Any) -> float:
    """Positive where ``first`` came before ``second`` on the device."""
    synchronize()
    elapsed: float = first.elapsed_time(second)
    return elapsed


@pytest.mark.usefixtures("side_streams", "timed_events", "one_part_each")
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_forward_starts_while_later_parts_are_updated(
    monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    step_part = Replica.step_part

    def slowly(self: Replica, *args: Any) -> None:
        step_part(self, *args)
        sleep()

    model = mlp(64).to(DEVICE)
    scaler = GradScaler(KIND, init_scale=SCALE)
    with AsyncOptimizer(
        sgd(model.parameters()), model, scaler=scaler, offload=offload
    ) as optimizer:
        monkeypatch.setattr(Replica, "step_part", slowly)
        for step in range(4):
            x, _ = batch_of(step, 0)
            entered = model[0](x)
            begun = event(timed=True)
            inflight = optimizer._stepper._inflight
            scaler.scale(model[2](model[1](entered)).sum()).backward()
            if step > 1:  # the order of use is known by then
                optimizer._stepper.finish()
                assert len(inflight.events) == 4
                assert order(begun, inflight.events[-1]) > 0
            optimizer.step()
            optimizer.zero_grad()


def wide() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])


def peak_of(mode: str, offload: str, half: bool) -> int:
    """Bytes of GPU memory above what was there before, in the worst moment of some steps."""
    for dtype in (torch.float16, torch.float32):  # the workspaces of both threads stay
        warm = nn.Linear(64, 64).to(DEVICE, dtype)
        warm(torch.ones(8, 64, device=DEVICE, dtype=dtype)).sum().backward()
    del warm
    synchronize()
    module().empty_cache()
    before = module().memory_allocated()
    module().reset_peak_memory_stats()
    model = wide().to(DEVICE, torch.float16 if half else torch.float32)
    scaler = GradScaler(KIND, init_scale=1.0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, offload=offload) as optimizer:
        for _ in range(5):
            x = torch.ones(8, 1024, device=DEVICE, dtype=model[0].weight.dtype)
            scaler.scale(model(x).float().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = module().max_memory_allocated() - before
    del inner, optimizer, model
    return peak


@pytest.mark.usefixtures("real_device")
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_offload_takes_masters_and_state_off_the_gpu(mode: str) -> None:
    size = sum(p.numel() for p in wide().parameters())
    with_state, without = peak_of(mode, "none", half=True), peak_of(mode, "cpu", half=True)
    # Master, exp_avg and exp_avg_sq: 12 bytes a parameter; rounding of blocks aside.
    assert without < with_state - 11 * size
    # Weights and gradients, 2 bytes each, and the gradients that are still on their way.
    assert without < 7 * size


@pytest.mark.usefixtures("real_device")
def test_gradients_on_their_way_down_do_not_stay() -> None:
    """Once they have arrived, their memory is free, though the update may still run."""
    model = wide().to(DEVICE)
    size = sum(p.numel() for p in model.parameters()) * 4
    scaler = GradScaler(KIND, init_scale=1.0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with AsyncOptimizer(inner, model, scaler=scaler, offload="cpu") as optimizer:
        for _ in range(3):
            scaler.scale(model(torch.ones(8, 1024, device=DEVICE)).mean()).backward()
            full = module().memory_allocated()
            optimizer.step()
            synchronize()
            torch.empty(1, device=DEVICE)  # the allocator looks for what has become free
            assert module().memory_allocated() < full - size * 0.9
