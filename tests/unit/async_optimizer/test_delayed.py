"""``step_mode="delayed"``: what random histories, interrupts and other threads have found wrong.

Its numbers in any order of calls: the random histories.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_run, loss_of, network, run_ours, run_reference
from support import same
from torch import Tensor, nn
from versions import UNGUARDED, before_torch

from accel_scaler import AsyncOptimizer, GradScaler
from accel_scaler.async_optimizer.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

each_compensation = pytest.mark.parametrize("compensation", ["none", "preview"])


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def delayed(model: nn.Module, compensation: str = "auto") -> AsyncOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    return AsyncOptimizer(inner, model, mode="delayed", delay_compensation=compensation)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("offload", ["none", "cpu"])
@each_compensation
def test_a_model_whose_optimizer_is_gone_still_gets_its_last_update(
    offload: str, compensation: Any
) -> None:
    """A function trains a model and returns it."""

    def train(is_closed: bool) -> nn.Module:
        model = network()
        optimizer = AsyncOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.05),
            model,
            mode="delayed",
            offload=offload,
            delay_compensation=compensation,
        )
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_closed:
            optimizer.close()
        return model

    model = train(is_closed=False)
    time.sleep(0.05)  # the thread is done with it, or keeps it
    gc.collect()
    assert same(model.state_dict(), train(is_closed=True).state_dict())


def test_a_float16_model_has_the_share_of_a_gradient_under_a_large_scale() -> None:
    """0.01 / 65536 is next to nothing in float16, in which torch takes the rate of an addition."""
    model, scale = network(torch.float16), 2.0**16
    scaler = GradScaler("cpu", init_scale=scale)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    with AsyncOptimizer(inner, model, scaler=scaler, mode="delayed") as optimizer:
        before = values(model)
        scaler.scale(model(torch.ones(4, 8).half()).float().square().mean() / 64.0).backward()
        grads = [p.grad.float() / scale for p in model.parameters() if p.grad is not None]
        optimizer.step()
        previews = [p.detach() + 0 for p in model.parameters()]
    for now, old, grad in zip(previews, before, grads, strict=True):
        assert torch.equal(now, (old.float() - 1e-2 * grad).half())
    assert not same(previews, before)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_limit_past_float16_limits_nothing(offload: str) -> None:
    make = partial(network, torch.float16)
    settings = {"make": make, "compensation": "preview", "scale": 2.0**17, "overflows": ()}
    ours = run_ours("adamw", offload=offload, **settings)
    assert_same_run(ours, run_reference("adamw", 0, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compensation", ["preview", "none"])
def test_a_frozen_parameter_that_still_has_a_gradient_is_stepped_through_its_master(
    compensation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch steps it all the same; beside the forward it may not."""
    seen: list[Tensor] = []
    plain, x = Replica.step_part, torch.eye(4, dtype=dtype)
    for is_slow in (False, True):
        model = model_of().to(dtype)
        frozen, *_ = model.parameters()
        with monkeypatch.context() as patch, delayed(model, compensation) as optimizer:
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
    assert same(seen[:2], seen[2:])


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="no gradients of other dtypes")
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
        optimizer.synchronize()  # waited ten minutes for it
        train(model, optimizer, range(3, 5))


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
    assert same(*found)


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
    with delayed(model, "none") as optimizer, delayed(resumed, "none") as other:
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


@pytest.mark.parametrize(
    "is_given", [True, pytest.param(False, marks=before_torch(2, 13, UNGUARDED))]
)
def test_a_compiled_model_that_is_not_the_given_one_is_logged(
    is_given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its forward runs no hooks, so its evaluations are not seen."""
    model = model_of()
    compiled: Any = torch.compile(model, backend="eager")
    with delayed(compiled if is_given else model) as optimizer:
        train(compiled, optimizer, range(5))
    assert caplog.text.count("calls are not watched") == (not is_given)
