"""``AsyncOptimizer`` on a device beside torch's own loop there, bit for bit; and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import (
    DEVICE,
    KIND,
    adamw,
    fused_adamw,
    fused_sgd,
    peak_bytes,
    sgd,
    synchronize,
)
from support import mlp, weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.optimizer_step import offloaded

STEPS, ACCUMULATION, OVERFLOW, CLIP = 12, 2, 7, 0.5
SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 5}


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
        numbers.append([found, scaler.get_scale(), float(schedule.get_last_lr()[0]), skipped])
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


def capturable(params: Any) -> Any:
    """Its learning rate is a tensor on the device, which the schedule changes."""
    rate = torch.tensor(0.01, device=DEVICE)
    return torch.optim.AdamW(params, lr=rate, capturable=True)


@pytest.mark.parametrize("make", [sgd, fused_sgd, adamw, fused_adamw, capturable])
def test_a_step_equals_torchs(make: Any) -> None:
    assert_equal(trained(make, step_mode="sync"), trained(make))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"offload": "cpu"}),
        (torch.float16, {}),
        (torch.float16, {"offload": "cpu"}),
        # Whose gradients torch's check does not take on CUDA: with masters, and in place.
        (torch.bfloat16, {}),
        (torch.bfloat16, {"offload": "cpu"}),
        (torch.bfloat16, {"master_weights": "none"}),
    ],
)
def test_overlap_steps_as_sync(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """On a device there is nothing that a thread could step beside."""
    found = trained(fused_adamw, dtype, step_mode="overlap", **settings)
    assert_equal(found, trained(fused_adamw, dtype, step_mode="sync", **settings))


# Memory.

WIDTH, LAYERS = 512, 8
SIZE = WIDTH * WIDTH * LAYERS
"""Elements of all parameters."""
PIECE = 4 * WIDTH * WIDTH
"""Bytes of the largest parameter in float32."""


def wide(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


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
                synchronize()

    run(64, 1)
    with peak_bytes() as taken:
        run(WIDTH, LAYERS)
    return taken()


@pytest.mark.usefixtures("memory_counter")
def test_offload_takes_masters_and_state_off_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "SMALLEST_BLOCK", 1 << 14)
    with_state = peak_of(torch.float16, step_mode="sync", offload="none")
    without = peak_of(torch.float16, step_mode="sync", offload="cpu")
    # Master, exp_avg and exp_avg_sq: 12 bytes a parameter, of which a ring of four slots is up.
    assert without < with_state - 12 * SIZE + 4 * 12 * (SIZE // offloaded.BLOCKS + 1024)


@pytest.mark.usefixtures("memory_counter")
def test_a_state_dict_takes_no_device_memory() -> None:
    model = wide(WIDTH, LAYERS).to(DEVICE, torch.float16)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with AsyncOptimizer(inner, model, step_mode="sync") as optimizer:
        model(torch.ones(8, WIDTH, device=DEVICE).half()).float().mean().backward()
        optimizer.step()
        with peak_bytes() as taken:
            saved = optimizer.state_dict()
        assert {"exp_avg", "exp_avg_sq", "master"} < saved["state"][0].keys()
        assert taken() < PIECE
