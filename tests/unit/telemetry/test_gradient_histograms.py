"""Histograms of unscaled gradients: what the backward left, whatever was done to it since."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import mlp, weights
from telemetry_runs import attached, loss_of, sgd
from torch import Tensor, nn
from tracker_fakes import KeepingTracker, Writer

from accel_scaler.scaling import Window
from accel_scaler.telemetry import gradient_histograms
from accel_scaler.telemetry.gradient_histograms import BINS, Histogram, spread_of

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "folded": {"fold_unscale": True},
    "overlap": {"step_mode": "overlap"},
    "delayed on the host": {"step_mode": "delayed", "offload": "cpu"},
    "an odd scale": {"init_scale": 3000.0},
}


def everything(accelerator: Any, params: Sequence[Tensor]) -> None:
    accelerator.clip_grad_norm_(params, 0.01)


def by_halves(accelerator: Any, params: Sequence[Tensor]) -> None:
    accelerator.clip_grad_norm_(params[:2], 0.01)
    accelerator.clip_grad_norm_(params[2:], 0.02)


def twice(accelerator: Any, params: Sequence[Tensor]) -> None:
    accelerator.clip_grad_norm_(params, 0.01)
    accelerator.clip_grad_norm_(params, 0.001)


def unscaled(accelerator: Any, params: Sequence[Tensor]) -> None:
    accelerator.unscale_gradients()


def nothing(accelerator: Any, params: Sequence[Tensor]) -> None:
    pass


def assert_tells(said: dict[str, Any], values: Tensor, rounding: float) -> None:
    """The histogram is that of ``values``, but for what lies on the edge of two bins."""
    values = values.double().reshape(-1)
    low, high = float(values.min()), float(values.max())
    blur = rounding * max(abs(low), abs(high))
    assert said["num"] == sum(said["counts"]) == values.numel()
    assert (said["min"], said["max"]) == pytest.approx((low, high), rel=1e-6 + rounding)
    assert said["sum"] == pytest.approx(float(values.sum()), abs=blur * values.numel() + 1e-9)
    squares = float(values.square().sum())
    assert said["sum_squares"] == pytest.approx(squares, rel=1e-4 + 4 * rounding)
    assert len(said["limits"]) == len(said["counts"]) == BINS
    below = 0
    for limit, count in zip(said["limits"][:-1], said["counts"][:-1], strict=True):
        below += count
        assert int((values < limit - blur).sum()) <= below <= int((values <= limit + blur).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("clip", [everything, by_halves, twice, unscaled, nothing])
def test_they_are_of_unscaled_gradients_before_a_clip(
    clip: Callable[..., None], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    if dtype is torch.float16 and clip is unscaled:
        pytest.skip("refused: they are unscaled within the step")
    writer, plain = Writer(), mlp().to(dtype)
    fused = {"fused": True} if "fold_unscale" in settings and dtype is torch.float32 else {}
    looks = []
    with attached(tracker_interval=2, **settings) as accelerator:
        accelerator.trackers.append(KeepingTracker(writer))
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters(), **fused))
        for number in range(5):
            accelerator.backward(loss_of(model, number))
            scale = accelerator.scaler.get_scale()
            looks.append({n: p.grad.float() / scale for n, p in plain.named_parameters()})
            clip(accelerator, list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    names = [name for name, _ in plain.named_parameters()]
    assert list(writer.histograms) == [
        (f"scaler/gradients/{name}", window) for window in (0, 2, 4) for name in names
    ]
    # Those of which some only are clipped are multiplied in float16.
    rounding = 2e-3 if dtype is torch.float16 and clip is by_halves else 1e-5
    for (tag, window), said in writer.histograms.items():
        assert_tells(said, looks[window][tag.removeprefix("scaler/gradients/")], rounding)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_they_change_no_number_and_keep_no_gradient(mode: str) -> None:
    """Of the run with them, beside the one without."""
    ends, kept = [], []
    for interval in (None, 1):
        plain = mlp()
        with attached(step_mode=mode, tracker_interval=interval) as accelerator:
            accelerator.trackers.append(KeepingTracker(Writer()))
            model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
            for number in range(6):
                factor = float("inf") if number == 3 else 1.0
                accelerator.backward(loss_of(model, number) * factor)
                kept = [weakref.ref(p.grad) for p in plain.parameters()]
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.scaler_history.summary()
            optimizer.synchronize()
            loss_of(model, 9).backward()  # what was looked at last is not waited for
            assert [ref() for ref in kept] == [None] * len(kept)
            ends.append((weights(plain), accelerator.scaler.get_scale()))
            optimizer.zero_grad()
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def look(*grads: Tensor, window: Window | None = None) -> list[Histogram]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    window = Window() if window is None else window
    record = window.record(torch.optim.SGD(params))
    spreads, _ = spread_of(params, [str(i) for i in range(len(params))], window, record, True)
    return [each for spread in spreads for each in spread.read()]


def test_large_ones_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [
        torch.randn(7, 5, 3, 2).to(memory_format=torch.channels_last),
        torch.randn(40, 30).t(),
        torch.randn(60, 4)[::2, 1:3],  # with gaps
        torch.randn(3, 1).expand(3, 9),
        torch.tensor(2.5),
    ]
    whole = look(*grads)
    monkeypatch.setattr(gradient_histograms, "BATCH", 16)
    assert look(*grads) == whole
    for found, grad in zip(whole, grads, strict=True):
        assert found.elements == sum(found.counts) == grad.numel()
        assert (found.lowest, found.highest) == (float(grad.min()), float(grad.max()))
        assert found.norm == pytest.approx(float(grad.norm()), rel=1e-5)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 6e4])
def test_one_whose_elements_are_all_alike_has_a_narrow_bin(value: float) -> None:
    (found,) = look(torch.full((5,), value))
    assert found.counts == (5,) + (0,) * (BINS - 1)
    edges = found.edges
    assert edges == sorted(edges)
    low, high = float(torch.tensor(value)), edges[1]
    assert edges[0] < low < high
    assert high - edges[0] <= max(4e-6 * abs(value), 4e-12)


def test_what_cannot_be_told_is_left_out() -> None:
    """A gradient with an element that is not finite, which only a run without scaling steps on; a
    sparse one, a double, an empty one."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
    bad = torch.tensor([1.0, math.inf, 2.0]), torch.tensor([math.nan, 1.0])
    found = look(*bad, sparse, torch.ones(3).double(), torch.ones(0), torch.ones(2))
    assert [each.name for each in found] == ["5"]


def test_a_norm_is_told_only_of_all_of_them() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    record = Window().record(torch.optim.SGD([p, q]))
    assert spread_of([p, q], ["p", "q"], Window(), record, False)[1]
    q.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    spreads, is_whole = spread_of([p, q], ["p", "q"], Window(), record, False)
    assert not is_whole
    assert [each.counts for spread in spreads for each in spread.read()] == [()]
