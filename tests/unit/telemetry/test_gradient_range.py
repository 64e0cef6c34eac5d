"""How much of float16's range scaled gradients take, whatever was done to them since."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp
from telemetry_runs import attached, loss_of, sgd, windows_of
from torch import Tensor, nn

from accel_scaler.scaling import Window
from accel_scaler.telemetry.gradient_range import measure

INF = math.inf


# Beside a plain look at what the backward left.


def largest_of(parameters: Iterable[Tensor]) -> float:
    """What a plain loop sees of scaled gradients: ``.grad`` right after the backward."""
    return max(float(p.grad.float().abs().max()) for p in parameters if p.grad is not None)


def everything(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params, max_norm)


def by_halves(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params[:2], max_norm)
    accelerator.clip_grad_norm_(params[2:], 2 * max_norm)


def twice(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params, max_norm)
    accelerator.clip_grad_norm_(params, max_norm / 3)


def part_first(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params[:2], max_norm)
    accelerator.clip_grad_norm_(params, max_norm)


def part_last(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.clip_grad_norm_(params, max_norm)
    accelerator.clip_grad_norm_(params[:2], max_norm)


def unscaled_first(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.unscale_gradients()
    accelerator.clip_grad_norm_(params, max_norm)


def unscaled(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    accelerator.unscale_gradients()


def nothing(accelerator: Any, params: Sequence[Tensor], max_norm: float) -> None:
    pass


Clip = Callable[[Any, Sequence[Tensor], float], None]
CLIPS = [everything, by_halves, twice, part_first, part_last, unscaled_first, unscaled, nothing]
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap": {"step_mode": "overlap"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_what_the_backward_left(
    clip: Clip, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if dtype is torch.float16 and clip in (unscaled, unscaled_first):
        pytest.skip("refused: they are unscaled within the step")
    # float16 gradients of which some only are clipped are multiplied in float16.
    clip_rounds = dtype is torch.float16 and clip in (by_halves, part_first, part_last)
    path, plain = tmp_path / "run.jsonl", mlp().to(dtype)
    looks = []
    with attached(path, underflow_interval=2, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number in range(5):
            accelerator.backward(loss_of(model, number))
            looks.append(largest_of(plain.parameters()))
            max_norm = 0.01 if number else 1e6
            clip(accelerator, list(model.parameters()), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        assert "scaler/headroom" in accelerator.scaler_history.metrics()
    found = windows_of(path)
    assert [line["step"] for line in found if "largest_gradient" in line] == [0, 2, 4]
    for number in (0, 2, 4):
        rounding = 1e-3 if clip_rounds and number else 1e-6  # clipping leaves one of float32
        assert math.isclose(found[number]["largest_gradient"], looks[number], rel_tol=rounding)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_of_clipped_elements_the_largest_is_not_known(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, underflow_interval=1, **settings) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
    (line,) = windows_of(path)
    assert "largest_gradient" not in line


def test_a_window_that_overflowed_is_not_measured_the_next_one_is(tmp_path: Path) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, underflow_interval=4) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        for number in range(10):
            accelerator.backward(loss_of(model, number) * (INF if number in (0, 1, 4) else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    measured = [line["step"] for line in windows_of(path) if "largest_gradient" in line]
    assert measured == [2, 5, 8]


def test_two_optimizers_are_one_window_and_the_largest_is_that_of_both(tmp_path: Path) -> None:
    path, body, head = tmp_path / "run.jsonl", nn.Linear(8, 4), nn.Linear(4, 1)
    with attached(path, underflow_interval=2) as accelerator:
        models = accelerator.prepare(body, head)
        pairs = [accelerator.prepare(sgd(m.parameters())) for m in models]
        looks = []
        for _ in range(3):
            accelerator.backward(models[1](models[0](torch.ones(2, 8))).sum())
            looks.append(largest_of(p for m in models for p in m.parameters()))
            for optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
    found = windows_of(path)
    for number in (0, 2):
        assert found[number]["largest_gradient"] == looks[number]
    assert "largest_gradient" not in found[1]


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_where_nothing_is_scaled_float32_gradients_say_nothing(
    precision: str, tmp_path: Path
) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, precision, underflow_interval=1) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        accelerator.backward(loss_of(model, 0))
        optimizer.step()
        assert "scaler/headroom" not in accelerator.scaler_history.metrics()
    (line,) = windows_of(path)
    assert "largest_gradient" not in line


def test_headroom_is_that_of_the_present_scale(tmp_path: Path) -> None:
    path, plain = tmp_path / "run.jsonl", mlp()
    with attached(path, underflow_interval=100) as accelerator:
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        seen = []
        for factor in (1.0, INF, INF):
            accelerator.backward(loss_of(model, 0) * factor)
            largest = max(float(p.grad.abs().max()) for p in plain.parameters())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            seen.append((largest, accelerator.scaler_history.metrics().get("scaler/headroom")))
    first = math.log2(65504 / seen[0][0])
    assert [room for _, room in seen] == pytest.approx([first, first + 1, first + 2], abs=1e-5)


# The measurement itself.


def measured(grads: Sequence[Tensor | None]) -> float | None:
    params = []
    for grad in grads:
        p = nn.Parameter(torch.zeros(()) if grad is None else torch.zeros_like(grad.to_dense()))
        p.grad = grad
        params.append(p)
    window = Window()
    record = window.record(torch.optim.SGD(params, lr=0.1))
    return measure(params, window, record, 1.0)


def test_other_gradients_are_not_measured() -> None:
    others = [None, torch.zeros(0), torch.ones(2, dtype=torch.bfloat16)]
    others += [torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta")]
    others += [torch.tensor([[0.0], [-8.0]]).to_sparse(1)]
    assert measured(others) is None
    assert measured([*others, torch.full((2,), 3.0), torch.full((1,), -4.0)]) == 4.0


def test_strides_do_not_matter() -> None:
    wide = torch.arange(12.0).reshape(3, 4).t()
    assert measured([wide, torch.zeros(1, 1, 1).expand(2, 3, 4)]) == 11.0
