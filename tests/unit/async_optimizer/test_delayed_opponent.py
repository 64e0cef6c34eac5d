"""``delayed`` with its compensation, where it was broken: resumed, interrupted, copied, forked."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer
from accel_scaler.async_optimizer.replica import Replica
from accel_scaler.scaling import DeferredUnscale


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def delayed(
    model: nn.Module, make: Callable[[nn.Module], Any] = adamw, how: str = "auto", **settings: Any
) -> AsyncOptimizer:
    return AsyncOptimizer(make(model), model, mode="delayed", delay_compensation=how, **settings)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator)
        loss = (model(x) - torch.randn(6, 1, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def are_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_an_interrupt_where_a_preparation_is_handed_over_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    with delayed(model) as optimizer:
        train(model, optimizer, range(3))
        with monkeypatch.context() as patch:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr("accel_scaler.async_optimizer.worker.Worker.submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(1, 4))
        patch.undo()
        optimizer.synchronize()  # waited ten minutes for it
        train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupt_while_the_model_is_shown_previews_again_loses_neither(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, undisturbed = model_of(), model_of()
    with delayed(undisturbed) as other:
        train(undisturbed, other, range(7))
    with delayed(model) as optimizer:
        train(model, optimizer, range(4))
        optimizer.synchronize()
        exact, copied, plain = values(model), 0, Tensor.copy_

        def interrupt(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal copied
            if (copied := copied + 1) > number:
                raise KeyboardInterrupt
            return plain(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(1, 4))
        assert are_same([p.detach() for p in model.state_dict().values()], exact)
        train(model, optimizer, range(4, 7))
    assert are_same(values(model), values(undisturbed))


def test_a_clip_to_nearly_nothing_does_not_refuse_the_limit_of_a_share() -> None:
    model = model_of()
    with delayed(model) as optimizer:
        train(model, optimizer, range(3))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e30)
        before = values(model)
        optimizer._stepper.step(DeferredUnscale(multiply=torch.tensor(1e-42)))
        optimizer.synchronize()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not are_same(values(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["preview", "none"])
def test_a_frozen_parameter_that_still_has_a_gradient_is_stepped_through_its_master(
    how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch steps it all the same; beside the forward it may not."""
    seen: list[Tensor] = []
    plain, x = Replica.step_part, torch.eye(4, dtype=dtype)
    for is_slow in (False, True):
        model = model_of().to(dtype)
        frozen, *_ = model.parameters()
        with monkeypatch.context() as patch, delayed(model, adamw, how) as optimizer:
            started = threading.Event()

            def slow(*args: Any, **kwargs: Any) -> None:
                started.set()  # noqa: B023
                time.sleep(0.3)
                plain(*args, **kwargs)

            for step in range(4):
                model(x).sum().backward()
                frozen.requires_grad_(step < 1)
                frozen.grad = torch.ones_like(frozen)
                if is_slow and step == 3:
                    patch.setattr(Replica, "step_part", slow)
                optimizer.step()
            assert not is_slow or started.wait(30)
            seen.append(model[0](x).detach())
            optimizer.synchronize()
            seen.append(frozen.detach().clone())
    assert all(map(torch.equal, seen[:2], seen[2:]))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="no gradients of other dtypes")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("kind", [torch.float64, None])
def test_gradients_of_another_dtype_are_stepped_with(
    kind: torch.dtype | None, offload: str
) -> None:
    plain: Any = nn.Parameter(torch.ones(4))
    ours: Any = nn.Parameter(torch.ones(4))
    plain.grad_dtype = ours.grad_dtype = kind
    stock = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    inner = torch.optim.SGD([ours], lr=0.1, momentum=0.9)
    with AsyncOptimizer(inner, mode="delayed", offload=offload) as optimizer:
        for step in range(4):
            plain.grad = torch.arange(4, dtype=torch.float64) / (3 + step)
            ours.grad = plain.grad.clone()
            stock.step()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours, plain)  # a buffer of torch is float64 here


def test_a_module_trained_alone_goes_on_where_the_thread_that_trained_has_ended() -> None:
    found = []
    for is_fenced in (False, True):
        model = model_of()
        with delayed(model) as optimizer:
            thread = threading.Thread(target=train, args=(model[0], optimizer, range(4)))
            thread.start()
            thread.join()
            if is_fenced:
                optimizer.synchronize()
            train(model[0], optimizer, range(4, 7))
        found.append(values(model))
    assert are_same(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_of_a_parameter_that_is_frozen_while_it_is_loaded_is_not_rounded(
    dtype: torch.dtype,
) -> None:
    x = torch.eye(4, dtype=dtype)

    def run(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, resumed = model_of().to(dtype), model_of().to(dtype)
    with delayed(model) as optimizer, delayed(resumed) as other:
        run(model, optimizer, 4)
        next(model.parameters()).requires_grad_(False)
        next(resumed.parameters()).requires_grad_(False)
        run(model, optimizer, 2)
        resumed.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, its in ((model, optimizer), (resumed, other)):
            run(each, its, 2)
            next(each.parameters()).requires_grad_(True)
            run(each, its, 3)
        saved = [optimizer.state_dict()["state"], other.state_dict()["state"]]
    for index, entry in saved[0].items():
        for key, value in entry.items():
            assert torch.equal(value, saved[1][index][key]), key
