"""Masters of float16 weights: gradients that are dropped, and state that is loaded.

Freezing and edits are among the operations of the random histories.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from async_support import one_part_each
from attached import cpu
from references import loss_of, network
from support import same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, UnsupportedError, attach, detach
from accel_scaler.optimizer_step import replica

STEPS = 8
WAYS = [{}, {"step_mode": "overlap"}]
HALF = torch.float16


class Squares(nn.Module):
    """A loss with gradients that depend on the parameters, computed in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = (6, 5), (5, 6), (70, 70), (6, 5), (3,)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        factors = torch.rand(len(self.weights), generator=generator)
        losses = [f * w.float().square().mean() for f, w in zip(factors, self.weights, strict=True)]
        return torch.stack(losses).sum()


def groups_of(model: Squares) -> list[dict[str, Any]]:
    """Two groups, which are not in the order of use."""
    first, *rest = model.weights
    return [{"params": rest, "weight_decay": 0.0}, {"params": [first]}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gradient_that_is_dropped_after_a_clip_is_left_out(way: dict[str, Any]) -> None:
    """DINO's last layer in its first epoch; the coefficient is that of all gradients."""
    model = Squares(HALF)
    plain = Squares(HALF)
    masters = [nn.Parameter(w.detach().float()) for w in plain.weights]
    reference = torch.optim.SGD(masters, lr=0.5)
    accelerator = attach(cpu(), init_scale=8.0, **way)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.weights, lr=0.5))
    for number in range(4):
        accelerator.backward(model(number))
        accelerator.clip_grad_norm_(model.parameters(), 0.25)
        accelerator.unwrap_model(model).weights[2].grad = None
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        (plain(number) * 8.0).backward()
        for w, master in zip(plain.weights, masters, strict=True):
            assert w.grad is not None
            master.grad = w.grad.float() / 8.0
        nn.utils.clip_grad_norm_(masters, 0.25)
        masters[2].grad = None
        reference.step()
        for w, master in zip(plain.weights, masters, strict=True):
            w.data.copy_(master.data)
    optimizer.synchronize()
    ours_, theirs = accelerator.unwrap_model(model).weights, plain.weights
    # Unscaled and clipped by one product, as docs/what-to-expect.md says.
    for one, other in zip(ours_, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-3)
    assert torch.equal(ours_[2], Squares(HALF).weights[2])
    detach(accelerator)


def adamw(model: Squares) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups_of(model), lr=1e-3)


def steps(accelerator: Any, model: Any, optimizer: Any, some: range) -> None:
    for step in some:
        accelerator.backward(1e-3 * model(step))  # second moments that float16 cannot hold
        optimizer.step()
        optimizer.zero_grad()


def loads_first(accelerator: Any, optimizer: Any, model: Any, saved: Any) -> None:
    """As a resume in plain torch: into the torch optimizer, which casts."""
    inner = adamw(model)
    inner.load_state_dict(saved)
    attach(cpu()).prepare(model, inner)


def attaches_again(accelerator: Any, optimizer: Any, model: Any, saved: Any) -> None:
    detach(accelerator)
    attach(accelerator)


def wraps_again(accelerator: Any, optimizer: Any, model: Any, saved: Any) -> None:
    detach(accelerator)
    AsyncOptimizer(optimizer.optimizer, model)


@pytest.mark.parametrize("again", [loads_first, attaches_again, wraps_again])
@pytest.mark.parametrize("way", WAYS)
def test_state_that_was_cast_to_float16_is_refused(way: dict[str, Any], again: Any) -> None:
    """Adam divides by the root of second moments, most of which are 0 in float16."""
    accelerator = attach(cpu(), init_scale=8.0, **way)
    model = Squares(HALF)
    model, optimizer = accelerator.prepare(model, adamw(model))
    steps(accelerator, model, optimizer, range(3))
    moments = [entry["exp_avg_sq"] for entry in optimizer.state_dict()["state"].values()]
    assert any((each > 0).any() and not each.half().any() for each in moments)
    saved, before = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"Load the state after prepare\(\)"):
        again(accelerator, optimizer, model, saved)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("way", WAYS)
def test_adagrad_begins_as_over_float32_masters(way: dict[str, Any]) -> None:
    """torch makes its state in ``__init__``, in float16."""

    def adagrad(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.1)

    accelerator = attach(cpu(), init_scale=8.0, **way)
    ours, plain = Squares(HALF), Squares(HALF)
    model, optimizer = accelerator.prepare(ours, adagrad(ours.parameters()))
    steps(accelerator, model, optimizer, range(STEPS))
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference = adagrad(masters)
    for step in range(STEPS):
        (plain(step) * 1e-3 * 8.0).backward()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float() / 8.0, None
            reference.step()
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(master)
    assert same(ours.state_dict(), plain.state_dict())
    sums = [entry["sum"] for entry in optimizer.state_dict()["state"].values()]
    assert same(sums, [reference.state[master]["sum"] for master in masters])


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_masters_are_saved_also_where_the_optimizer_has_no_state(mode: Any) -> None:
    """Each step of plain SGD is less than half a float16's last bit: only the sum shows."""

    def loaded(saved: Any) -> tuple[nn.Module, AsyncOptimizer]:
        model = network(torch.float16)
        inner = torch.optim.SGD(model.parameters(), lr=1e-5)
        optimizer = AsyncOptimizer(inner, model, step_mode=mode)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return model, optimizer

    def go(model: nn.Module, optimizer: AsyncOptimizer, numbers: range) -> Any:
        for number in numbers:
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return deepcopy((model.state_dict(), optimizer.state_dict()))

    with one_part_each():
        whole = go(*loaded(None), range(40))
        half = go(*loaded(None), range(20))
        assert same(go(*loaded(half), range(20, 40)), whole)
    assert len(whole[1]["state"]) == 4
    assert not same(dict(whole[0]), dict(network(torch.float16).state_dict()))


def test_a_clip_leaves_out_parameters_that_no_optimizer_has() -> None:
    """Where nothing is scaled they are no mistake: a head is trained, the rest is not frozen."""
    found = []
    for chosen in (lambda net: net.parameters(), lambda net: net[1].parameters()):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
        accelerator: Any = attach(Accelerator(cpu=True), master_weights="fp32")
        optimizer = accelerator.prepare(torch.optim.SGD(net[1].parameters(), lr=0.5))
        accelerator.backward(net(torch.ones(5, 3).bfloat16()).float().square().mean())
        norm = accelerator.clip_grad_norm_(chosen(net), 0.01)
        optimizer.step()
        found.append([norm, *net.state_dict().values()])
        detach(accelerator)
    assert same(*found)


def test_momentum_of_a_parameter_whose_first_gradient_comes_late() -> None:
    """torch's fused SGD takes none beside parameters that have some."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(3, 4).bfloat16()
        accelerator = attach(Accelerator(cpu=True), master_weights="fp32")
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
        optimizer = accelerator.prepare(inner)
        for step in range(4):
            accelerator.backward(net(torch.ones(2, 3).bfloat16()).float().square().sum())
            net.bias.grad = net.bias.grad if step > 1 else None
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(net.state_dict().values()))
        detach(accelerator)
    assert all(torch.allclose(*each, rtol=0.01) for each in zip(*found, strict=True))


def test_two_optimizers_over_the_same_masters_step_in_overlap_as_in_sync() -> None:
    """The second one waits until the first one has read the gradients."""

    def train(mode: str) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        accelerator = attach(Accelerator(cpu=True), step_mode=mode, master_weights="fp32")
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).bfloat16()
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01)]
        model, *both = accelerator.prepare(model, *optimizers)
        skipped = []
        for _ in range(4):
            accelerator.backward(model(torch.randn(3, 6).bfloat16()).float().square().mean())
            for each in both:
                each.step()
                skipped.append(each.step_was_skipped)
            both[0].zero_grad()
        weights = [p.detach().clone() for p in model.parameters()]
        detach(accelerator)
        return weights, skipped

    (found, skipped), (expected, other) = train("overlap"), train("sync")
    assert all(map(torch.equal, found, expected))
    assert skipped == other == [False] * 8


def test_an_overflow_skips_two_optimizers_over_the_same_parameters() -> None:
    accelerator = attach(cpu(), step_mode="overlap", init_scale=1024.0)
    model = nn.Linear(6, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01)]
    model, *both = accelerator.prepare(model, *optimizers)
    accelerator.backward(model(torch.full((3, 6), float("inf"))).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for each in both:
        each.step()
    assert [each.step_was_skipped for each in both] == [True, True]
    assert accelerator.scaler.get_scale() == 512.0
    detach(accelerator)


def test_an_interrupt_while_settings_are_copied_leaves_the_next_step_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(value: Any) -> Any:
        raise KeyboardInterrupt

    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=0.5)
    with AsyncOptimizer(optimizer, step_mode="sync", master_weights="fp32") as ours:
        p.grad = torch.ones_like(p)
        with monkeypatch.context() as patch:
            patch.setattr(replica, "frozen", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ours.step()
        ours.step()
    assert torch.equal(p, torch.full_like(p, 0.5))
