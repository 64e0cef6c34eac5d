"""One boundary at a time: what is unscaled, clipped, stepped, counted and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from boundary_support import models, one, ours
from support import LR, Linear
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Optimizer, SparseAdam

from accel_scaler import ScalerConfig

INF = float("inf")


def test_a_scale_too_small_to_divide_by_skips_finite_gradients() -> None:
    """Its reciprocal is out of float32's range: nothing of them has survived."""
    a = ours(ScalerConfig(init_scale=2.0**-130))
    model, optimizer = one(a)
    a.backward(model(1.0))
    assert float(a.clip_grad_norm_(model.parameters(), 1.0)) == INF
    optimizer.step()
    assert (optimizer.step_was_skipped, model.moved) == (True, 0.0)


@pytest.mark.parametrize("gradients", [(100.0, INF), (INF, 100.0)])
def test_a_spike_of_one_optimizer_hides_no_overflow_of_another(
    gradients: tuple[float, float],
) -> None:
    """An overflow halves the scale, a spike alone does not; both are one skip."""
    a = ours(ScalerConfig(init_scale=16.0, skip_norm_above=10.0, max_consecutive_skips=2))
    both, optimizers = models(a, 2)
    for given, scale in ((gradients, 8.0), ((100.0, 100.0), 8.0), ((1.0, 1.0), 8.0)):
        a.backward(both[0](given[0]) + both[1](given[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped is (given != (1.0, 1.0))
        assert a.scaler.get_scale() == scale
    assert [m.moved for m in both] == [1.0, 1.0]


@pytest.mark.parametrize("how", ["steps", "unscale_gradients", "by hand", "clip"])
def test_a_parameter_that_two_optimizers_share_is_unscaled_once(how: str) -> None:
    """Each of them steps it, by the same gradient."""
    a = ours()
    shared, *own = (nn.Parameter(torch.ones(2)) for _ in range(3))
    inner = [SGD([shared, p], lr=LR) for p in own]
    optimizers = a.prepare(*inner)
    for window in (1, 2):
        a.backward((3 * shared + 2 * own[0] + own[1]).sum())
        if how == "unscale_gradients":
            a.unscale_gradients()
        elif how == "clip":
            a.clip_grad_norm_([shared, *own], 1e6)
        for optimizer, raw in zip(optimizers, inner, strict=True):
            if how == "by hand":
                a.scaler.unscale_(raw)
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        moved = [((1 - p) / LR).tolist() for p in (shared, *own)]
        assert moved == [[6.0 * window] * 2, [2.0 * window] * 2, [1.0 * window] * 2]


class Table(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, rows: list[int], factor: float = 1.0) -> Tensor:
        return self.table(torch.tensor(rows)).sum() * factor


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.5), lambda p: SparseAdam(p, lr=0.5)])
def test_sparse_gradients(make: Any) -> None:
    """Only the rows that were used move, by what an unscaled step moves them."""
    a = ours()
    plain, reference = Table(), Table()
    model, optimizer = a.prepare(plain, make(list(plain.parameters())))
    torchs: Optimizer = make(list(reference.parameters()))
    for rows in ([1, 3], [3, 3, 5]):
        a.backward(model(rows))
        optimizer.step()
        optimizer.zero_grad()
        reference(rows).backward()
        torchs.step()
        torchs.zero_grad()
    before = plain.table.weight.detach().clone()
    assert torch.equal(before, reference.table.weight)
    assert torch.equal(before[[0, 2, 4]], torch.ones(3, 2))
    a.backward(model([1], INF))
    optimizer.step()
    assert optimizer.step_was_skipped is True
    assert torch.equal(plain.table.weight, before)
    assert a.scaler_history.last_overflow() == ("table.weight",)


def test_a_warning_names_an_optimizer_that_never_has_a_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once. Not one that had a gradient in some window, and is frozen again (GANs, adapters)."""
    a = ours()
    (model, turn), (optimizer, second) = models(a, 2)
    stale = a.prepare(SGD([nn.Parameter(torch.ones(3))], lr=LR))  # of the model as it was, say
    for step in range(30):
        a.backward(model(1.0) + turn(1.0) if step == 8 else model(1.0))
        for each in (optimizer, second, stale, stale):  # a second call is not a second window
            each.step()
            each.zero_grad()
        found = [text for text in caplog.messages if "never had a gradient" in text]
        assert len(found) == (step >= 9)
    assert found[0].startswith("SGD was due in 10 steps")
    assert (model.moved, turn.moved) == (30.0, 1.0)


def test_a_warning_names_the_only_optimizer_where_it_never_has_a_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No window closes then: what counts is what was scaled."""
    a = ours(gradient_accumulation_steps=2)
    model, frozen = Linear(), Linear().requires_grad_(False)
    model, frozen, stale = a.prepare(model, frozen, SGD(frozen.parameters(), lr=LR))
    for step in range(60):
        with a.accumulate(model):
            a.backward(model(1.0))
            stale.step()
        found = [text for text in caplog.messages if "never had a gradient" in text]
        assert len(found) == (step >= 19)


def test_torchs_checkpoints_make_state_after_a_run_that_only_skipped() -> None:
    """They step on zeros, in a window that is over."""
    a = ours()
    model: Any = Linear()
    model, optimizer = a.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
    a.backward(model(INF))
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    _, state = get_state_dict(model, optimizer)
    assert set(state["state"]["w"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(map(torch.equal, before, model.parameters()))
    a.backward(model(1.0))
    optimizer.step()
    assert not optimizer.step_was_skipped
