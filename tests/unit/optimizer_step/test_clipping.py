"""Clipping, of whose gradients and whenever: unscaled once, to torch's norm."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from boundary_support import SCALE, Two, models, one, ours
from support import LR
from torch import Tensor, nn
from torch.optim import SGD

from accel_scaler import OrderError, ScalerConfig, detach

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


SMALL = 64.0
"""A scale at which elements that a clip makes smaller still are below what float16 can hold."""

Clips = list[tuple[list[int], float, float]]
"""Of a window: places of parameters, ``max_norm`` and ``norm_type``."""

PARTS: dict[str, Clips] = {
    "each": [([i], 1e-2, 2.0) for i in range(4)],
    "layers": [([0, 1], 1e-2, 2.0), ([2, 3], 1e-3, 2.0)],
    "one": [([2], 1e-3, 2.0)],
    "overlapping, twice": [([0, 1], 1.0, 2.0), ([1, 2], 1e-2, 2.0), ([0, 1], 1e-3, 2.0)],
    "parts, then all": [([0], 1e-2, 2.0), ([3, 0, 1, 2], 1e-2, 2.0)],
    "all, then parts": [([0, 1, 2, 3], 0.5, 2.0), ([1], 1e-2, 2.0), ([1, 3], 1e-3, 2.0)],
    "other norms": [([0, 1], 1e-2, INF), ([1, 2], 1e-2, 1.0), ([2, 3], 1e-2, 3.0)],
    "all, by another norm": [([0, 1, 2, 3], 1e-2, INF)],
    "one parameter twice": [([1, 1, 2], 1e-2, 2.0)],
}


def gradients(seed: int, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Scaled, with elements from far below to far above 1."""
    torch.manual_seed(seed)
    sizes = [10 ** torch.empty(5, 3).uniform_(-5, 2) for _ in dtypes]
    return [(torch.randn(5, 3) * size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


def float32_reference(
    params: list[Any], optimizers: list[SGD], clips: Clips, dtypes: list[torch.dtype], micros: int
) -> list[float]:
    """float32 weights, torch's own clip on float32 copies of the same gradients."""
    norms = []
    for step in range(3):
        for p, *grads in zip(
            params, *(gradients(10 * step + m, dtypes) for m in range(micros)), strict=True
        ):
            total = grads[0]
            for grad in grads[1:]:
                total = total + grad
            p.grad = total.float() / SMALL
        for places, max_norm, kind in clips:
            chosen = [params[i] for i in places]
            norms.append(float(torch.nn.utils.clip_grad_norm_(chosen, max_norm, kind)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms


def momenta(params: list[Any], optimizers: list[SGD]) -> list[Tensor]:
    states = [state for o in optimizers for p in params if (state := o.state.get(p))]
    return [state["momentum_buffer"].float() for state in states]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    ("mode", "offload"),
    [
        ("sync", "none"),
        ("overlap", "none"),
        ("delayed", "cpu"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("float16", {}),
        ("bfloat16", {}),
        ("mixed", {}),
        ("float32", {"fold_unscale": True}),
        ("two optimizers", {}),
        ("accumulated", {}),
    ],
    ids=["float16", "bfloat16", "mixed", "folded", "two", "accumulated"],
)
def test_parts_are_clipped_apart_as_with_float32_weights(
    kind: str, settings: dict[str, Any], mode: Any, offload: Any, parts: str
) -> None:
    """Elements that a coefficient takes below float16's smallest were lost: Adam moved by 0.90, not
    1.0. A second clip sees what the first one left, as with torch."""
    half = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(kind, torch.float16)
    dtypes = [half, torch.float32 if kind == "mixed" else half, half, half]
    folded = bool(settings) and half is torch.float32
    count, micros = (2 if kind == "two optimizers" else 1), (2 if kind == "accumulated" else 1)

    def optimizers_of(params: list[Any]) -> list[SGD]:
        return [
            SGD(params[i::count], lr=0.5, momentum=0.9, fused=folded or None) for i in range(count)
        ]

    wide = [nn.Parameter(torch.ones(5, 3)) for _ in dtypes]
    references = optimizers_of(wide)
    expected = float32_reference(wide, references, PARTS[parts], dtypes, micros)

    a = ours(
        ScalerConfig(
            init_scale=SMALL, step_mode=mode, offload=offload, optimizer_threads=1, **settings
        )
    )
    params: list[Any] = [nn.Parameter(torch.ones(5, 3, dtype=dtype)) for dtype in dtypes]
    inner = optimizers_of(params)
    optimizers = [a.prepare(o) for o in inner]
    norms = []
    for step in range(3):
        for micro in range(micros):
            a.scaler.scale(torch.ones(()))
            found = gradients(10 * step + micro, dtypes)
            for p, grad in zip(params, found, strict=True):
                p.grad = grad.clone() if p.grad is None else p.grad + grad
        for places, max_norm, norm_type in PARTS[parts]:
            norms.append(float(a.clip_grad_norm_([params[i] for i in places], max_norm, norm_type)))
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.step_was_skipped is False
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.synchronize()
    assert norms == pytest.approx(expected, rel=1e-5)
    mine, theirs = momenta(params, inner), momenta(wide, references)
    assert len(mine) == len(theirs) == 4
    for one_, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one_, other, rtol=1e-5, atol=1e-12)
    detach(a)


def test_a_value_clip_after_parts_were_clipped_apart() -> None:
    """Its limit is that of what the clips before left of each gradient."""
    a = ours(ScalerConfig(init_scale=SMALL))
    params: list[Any] = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(3)]
    inner = SGD(params, lr=1.0, momentum=0.5)
    optimizer = a.prepare(inner)
    a.scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.tensor([3.0, 4.0], dtype=torch.float16) * SMALL
    a.clip_grad_norm_(params[:1], 0.5)  # 0.3, 0.4
    a.clip_grad_norm_(params[1:2], 0.0)
    a.clip_grad_value_(params, 0.375)
    a.clip_grad_value_(params[2:], 0.25)
    optimizer.step()
    left = [inner.state[p]["momentum_buffer"].tolist() for p in params]
    assert left[0] == pytest.approx([0.3, 0.375], rel=1e-3)
    assert left[1:] == [[0.0, 0.0], [0.25, 0.25]]
    detach(a)


@pytest.mark.parametrize("change", ["a group", "a list", "another optimizer"])
def test_an_optimizer_that_gets_parameters_after_a_clip_is_seen(change: str) -> None:
    """Owners are looked up once a window, unless they change within it."""
    a = ours()
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = a.prepare(SGD([first], lr=LR))
    a.backward(first.sum() + second.sum())
    assert float(a.clip_grad_norm_(first, 1e6)) == pytest.approx(2**0.5)
    if change == "another optimizer":
        other = a.prepare(SGD([second], lr=LR))
        assert float(a.clip_grad_norm_(second, 1e-6)) == pytest.approx(2**0.5)
        optimizer.step()
        other.step()
        assert first.tolist() == [1.0 - LR] * 2
        assert second.tolist() == pytest.approx([1.0 - LR * 1e-6 / 2**0.5] * 2, abs=1e-7)
        return
    if change == "a group":
        optimizer.add_param_group({"params": [second]})
    else:
        optimizer.param_groups[0]["params"].append(second)
    with pytest.raises(OrderError, match="had 1 parameters"):
        a.clip_grad_norm_(second, 1.0)
    assert second.grad is not None
    assert second.grad.tolist() == [SCALE] * 2
