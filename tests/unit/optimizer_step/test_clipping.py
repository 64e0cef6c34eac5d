"""Clipping, of whose gradients and whenever: unscaled once, to torch's norm."""

from __future__ import annotations

import logging

import pytest
import torch
from boundary_support import SCALE, Two, models, one, ours
from support import LR
from torch.optim import SGD

from accel_scaler import ScalerConfig

INF = float("inf")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_off_the_boundary_nothing_changes(
    norm_type: float, caplog: pytest.LogCaptureFixture
) -> None:
    a = ours(gradient_accumulation_steps=3)
    model, optimizer = one(a)
    expected = {2.0: 2.0, 1.0: 4.0, INF: 1.0}[norm_type]
    with caplog.at_level(logging.WARNING, "accel_scaler"):
        for micro in (1, 2, 3):
            with a.accumulate(model):
                a.backward(model(3.0))
                assert model.w.grad is not None
                before = model.w.grad.clone()
                norm = a.clip_grad_norm_(model.parameters(), 1.5 * expected, norm_type)
                assert float(norm) == pytest.approx(micro * expected)
                if micro < 3:
                    a.clip_grad_value_(model.parameters(), 0.01)
                    a.unscale_gradients()
                    assert torch.equal(model.w.grad, before)
                optimizer.step()
    assert model.moved == pytest.approx(1.5, rel=1e-5)
    assert caplog.text.count("before the last micro-batch") == 1


@pytest.mark.parametrize("fold", [False, True])
def test_unscale_clip_unscale_step(fold: bool) -> None:
    """Each may come any number of times before the step."""
    a = ours(ScalerConfig(init_scale=SCALE, fold_unscale=fold))
    model, optimizer = one(a, fused=True)
    a.backward(model(3.0))
    for _ in range(2):
        a.clip_grad_norm_(model.parameters(), 4.0)
        a.unscale_gradients()
        a.unscale_gradients(optimizer)
        a.unscale_gradients([optimizer])
        assert model.w.grad is not None
        torch.testing.assert_close(model.w.grad, torch.full((4,), 2.0))
    assert float(a.clip_grad_norm_(model.parameters(), 2.0)) == pytest.approx(4.0)
    optimizer.step()
    assert model.moved == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_within_a_common_norm_skips_both(bad: int) -> None:
    """No finite norm, so nothing to clip either of them to."""
    a = ours()
    ms, optimizers = models(a, 2)
    a.backward(ms[bad](INF) + ms[1 - bad](1.0))
    assert float(a.clip_grad_norm_([m.w for m in ms], 4.0)) == INF
    for optimizer in optimizers:
        optimizer.step()
    assert [m.moved for m in ms] == [0.0, 0.0]
    assert [o.step_was_skipped for o in optimizers] == [True, True]
    assert a.scaler.get_scale() == SCALE / 2


def test_clip_of_some_parameters() -> None:
    """The rest is unscaled too, and not clipped."""
    a = ours()
    model = Two()
    model, optimizer = a.prepare(model, SGD(model.parameters(), lr=LR))
    a.backward(model(8.0, 3.0))
    assert float(a.clip_grad_norm_(model.first.parameters(), 2.0)) == 16.0
    optimizer.step()
    assert model.first.moved == pytest.approx(1.0, rel=1e-5)
    assert model.second.moved == 3.0


@pytest.mark.parametrize("first", ["stray", "all", "owned"])
def test_parameters_that_no_optimizer_owns(first: str) -> None:
    """They count for the norm, unscaled once a window, in whatever order clips come."""
    a = ours()
    model = Two()
    model, optimizer = a.prepare(model, SGD(model.first.parameters(), lr=LR))
    stray, owned = list(model.second.parameters()), list(model.first.parameters())
    for _ in range(3):
        a.backward(model(3.0, 4.0))
        start = {"stray": stray, "all": stray + owned, "owned": owned}[first]
        norms = {"stray": 8.0, "all": 10.0, "owned": 6.0}
        assert float(a.clip_grad_norm_(start, 1e6)) == norms[first]
        for params, norm in ((owned, 6.0), (stray, 8.0), (stray + owned, 10.0)):
            assert float(a.clip_grad_norm_(params, 1e6)) == norm
        optimizer.step()
        model.zero_grad()
    assert (model.first.moved, model.second.moved) == (9.0, 0.0)


@pytest.mark.parametrize("clipped", ["first", "both"])
def test_an_overflow_beside_the_clipped_or_in_what_no_optimizer_owns(clipped: str) -> None:
    a = ours()
    model = Two()
    owned = model if clipped == "first" else model.first
    model, optimizer = a.prepare(model, SGD(owned.parameters(), lr=LR))
    a.backward(model(1.0, INF))
    chosen = model.first if clipped == "first" else model
    assert float(a.clip_grad_norm_(chosen.parameters(), 1.0)) == INF
    optimizer.step()
    assert (optimizer.step_was_skipped, model.first.moved) == (True, 0.0)
    assert a.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("kind", ["tensor", "generator", "list"])
def test_what_may_be_given_as_parameters(kind: str) -> None:
    a = ours()
    model, optimizer = one(a)
    for clip in (a.clip_grad_norm_, a.clip_grad_value_):
        a.backward(model(8.0))
        clip({"tensor": model.w, "generator": model.parameters(), "list": [model.w]}[kind], 1.0)
        assert model.w.grad is not None
        assert model.w.grad.abs().max() <= 1.0
        optimizer.step()
        optimizer.zero_grad()


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
    assert a.scaler_history.max_grad_norm == pytest.approx(2e18)


@pytest.mark.parametrize("scale", [1000.0, 1024.0])
def test_after_a_clip_gradients_are_torchs_bit_for_bit_whatever_the_scale(scale: float) -> None:
    """With one that is no power of two, unscale and clip are two roundings, as there."""
    a = ours(ScalerConfig(init_scale=scale))
    stock = torch.amp.GradScaler("cpu", init_scale=scale)
    (mine, theirs), norms, values = (Two(), Two()), [], torch.tensor([0.1, 0.7, 1.3, 3.1])
    model, optimizer = a.prepare(mine, SGD(mine.parameters(), lr=LR))
    inner = SGD(theirs.parameters(), lr=LR)
    for each, scaler in ((model, a.scaler), (theirs, stock)):
        scaler.scale(
            (each.first.w * values).sum() + (each.second.w * values.sqrt()).sum()
        ).backward()
    norms.append(a.clip_grad_norm_(model.parameters(), 1.1))
    stock.unscale_(inner)
    norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.1))
    assert torch.equal(*norms)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    optimizer.step()
