"""Clipping, of whose gradients and whenever: unscaled once, to torch's norm."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from boundary_support import SCALE, Two, one, ours
from references import loss_of, network
from support import LR, same, weights
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import (
    AsyncOptimizer,
    GradScaler,
    ScalerConfig,
    UnsupportedError,
    detach,
)

INF = float("inf")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 0.0])
def test_off_the_boundary_nothing_changes(
    norm_type: float, caplog: pytest.LogCaptureFixture
) -> None:
    a = ours(gradient_accumulation_steps=3)
    model, optimizer = one(a)
    expected, grows = {2.0: 2.0, 1.0: 4.0, INF: 1.0, 0.0: 1.0}[norm_type], norm_type > 0
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        for micro in (1, 2, 3):
            with a.accumulate(model):
                a.backward(model(3.0))
                assert model.w.grad is not None
                before = model.w.grad.clone()
                limit = (1.5 if grows else 0.5) * expected
                norm = a.clip_grad_norm_(model.parameters(), limit, norm_type)
                assert float(norm) == pytest.approx(micro * expected if grows else expected)
                if micro < 3:
                    a.clip_grad_value_(model.parameters(), 0.01)
                    a.unscale_gradients()
                    assert torch.equal(model.w.grad, before)
                optimizer.step()
    assert model.moved == pytest.approx(1.5, rel=1e-5)
    assert caplog.text.count("before the last micro-batch") == 1


@pytest.mark.parametrize("settings", [{}, {"step_mode": "overlap"}], ids=str)
def test_gradients_may_be_edited_after_a_value_clip_that_met_an_overflow(
    settings: dict[str, Any],
) -> None:
    a = ours(ScalerConfig(**{"init_scale": SCALE, **settings}))
    model, optimizer = one(a)
    a.backward(model(INF))
    a.clip_grad_value_(model.parameters(), 1.0)
    assert model.w.grad is not None
    model.w.grad.mul_(2.0)
    optimizer.step()
    assert (optimizer.step_was_skipped, model.moved) == (True, 0.0)


@pytest.mark.parametrize("scale", [1024.0, 1000.0, 0.3])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_clip_is_torchs_bit_for_bit_at_any_scale(mode: Any, scale: float) -> None:
    """Where it is no power of two, a product with it rounds."""

    def run(is_ours: bool) -> tuple[list[Any], Tensor]:
        model, norms = network(), []
        inner = SGD(model.parameters(), lr=LR, momentum=0.9)
        kind: Any = GradScaler if is_ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=scale, growth_factor=1.7, growth_interval=3)
        ours = AsyncOptimizer(inner, model, scaler=scaler, step_mode=mode) if is_ours else None
        for number in range(8):
            scaler.scale(loss_of(model, number)).backward()
            if ours is not None:
                norms.append(ours.clip_grad_norm_(0.1))
                ours.step()
            else:
                scaler.unscale_(inner)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                scaler.step(inner)
                scaler.update()
            norms += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            inner.zero_grad()
        if ours is not None:
            ours.close()
        return norms, weights(model)

    assert same(run(True), run(False))


def test_norms_of_masters_are_added_up_in_the_order_given() -> None:
    """As torch adds them up, though each optimizer has its own: the order changes the bits."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(40)]
    a = ours(ScalerConfig(init_scale=64.0))
    halves = a.prepare(*(SGD(params[i::2], lr=LR) for i in range(2)))
    gradients = [torch.randn(3, generator=generator) * 2.0 ** (n % 7) for n in range(40)]
    a.backward(sum((p.float() * g).sum() for p, g in zip(params, gradients, strict=True)))
    norms = torch.stack([torch.linalg.vector_norm(p.grad.float() / 64) for p in params])
    owners = torch.cat((norms[0::2], norms[1::2]))
    expected = [torch.linalg.vector_norm(each) for each in (norms, norms.flip(0), owners)]
    assert len({float(each) for each in expected}) == 3
    for order, norm in zip((params, params[::-1]), expected, strict=False):
        assert float(a.clip_grad_norm_(order, 1e9)) == float(norm)
    for optimizer in halves:
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "clip"),
    [({}, None), ({"step_mode": "overlap"}, 2.0), ({"init_scale": 1000.0}, 3.0)],
    ids=str,
)
def test_gradients_that_stay_after_a_skip_are_skipped_again(
    settings: dict[str, Any], clip: float | None
) -> None:
    """As with torch's scaler, whichever way they were checked."""
    a = ours(ScalerConfig(**{"init_scale": SCALE, **settings}))
    model, optimizer = one(a)
    for value in (INF, 1.0, 1.0):
        a.backward(model(value))
        if clip is not None:
            a.clip_grad_norm_(model.parameters(), 1.0, clip)
        optimizer.step()
        assert optimizer.step_was_skipped
    optimizer.zero_grad()
    a.backward(model(1.0))
    optimizer.step()
    assert model.moved == 1.0
    detach(a)


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_clip_of_parameters_that_no_optimizer_has_is_refused(call: str) -> None:
    a = ours()
    model = Two()
    model, optimizer = a.prepare(model, SGD(model.first.parameters(), lr=LR))
    a.backward(model(3.0, 4.0))
    with pytest.raises(UnsupportedError, match=r"clip: second\.w: no optimizer"):
        getattr(a, call)(model.parameters(), 1e6)
    assert model.second.w.grad is not None
    assert model.second.w.grad.tolist() == [4.0 * SCALE] * 4
    model.second.w.grad, a.scaler.ranks.sharded = None, True  # frozen, and ranks are asked
    assert float(a.clip_grad_norm_(model.parameters(), 1e6)) == 6.0
    optimizer.step()
    assert (model.first.moved, model.second.moved) == (3.0, 0.0)


def test_a_norm_beyond_float32_is_no_overflow() -> None:
    """Scaled elements of 6.5e22 are finite, their squares are not."""
    a = ours()
    model, optimizer = one(a)
    model.w.grad = None
    a.backward(model(1e18))
    norm = a.clip_grad_norm_(model.parameters(), 4.0)
    assert float(norm) == pytest.approx(2e18)
    optimizer.step()
    assert optimizer.step_was_skipped is False
    assert model.moved == pytest.approx(2.0, rel=1e-5)
    assert a.scaler.get_scale() == SCALE
    assert a.scaler_history.records[-1].grad_norm == pytest.approx(2e18)


def test_an_optimizer_that_is_prepared_after_a_clip_is_seen() -> None:
    a = ours()
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = a.prepare(SGD([first], lr=LR))
    a.backward(first.sum() + second.sum())
    assert float(a.clip_grad_norm_(first, 1e6)) == pytest.approx(2**0.5)
    other = a.prepare(SGD([second], lr=LR))
    assert float(a.clip_grad_norm_(second, 1e-6)) == pytest.approx(2**0.5)
    optimizer.step()
    other.step()
    assert first.tolist() == [1.0 - LR] * 2
    assert second.tolist() == pytest.approx([1.0 - LR * 1e-6 / 2**0.5] * 2, abs=1e-7)
