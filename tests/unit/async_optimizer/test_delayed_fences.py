"""What ``delayed`` shows of a late update, where random histories have found it wrong."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from async_support import lazy
from references import assert_same_run, network, run_ours, run_reference
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, OrderError

pytestmark = pytest.mark.usefixtures("one_thread", "one_part_each")

SCALE = 2.0**16


def test_a_float16_model_has_the_share_of_a_gradient_under_a_large_scale() -> None:
    """0.01 / 65536 is next to nothing in float16, in which torch takes the rate of an addition."""
    model = network(torch.float16)
    scaler = GradScaler("cpu", init_scale=SCALE)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    with AsyncOptimizer(inner, model, scaler=scaler, mode="delayed") as optimizer:
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.ones(4, 8).half()).float().square().mean() / 64.0).backward()
        grads = [p.grad.float() / SCALE for p in model.parameters() if p.grad is not None]
        optimizer.step()
        shown = [p.detach() + 0 for p in model.parameters()]
    for now, old, grad in zip(shown, before, grads, strict=True):
        assert torch.equal(now, (old.float() - 1e-2 * grad).half())
    assert any(not torch.equal(now, old) for now, old in zip(shown, before, strict=True))


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_limit_past_float16_limits_nothing(offload: str) -> None:
    make = partial(network, torch.float16)
    settings = {"make": make, "compensation": "preview", "scale": 2.0 * SCALE, "overflows": ()}
    ours = run_ours("adamw", offload=offload, **settings)
    assert_same_run(ours, run_reference("adamw", 0, **settings))


class Two(nn.Module):
    """Two layers, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, step: int, used: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for layer in self.layers[:used]:
            x = layer(x)
        return x.square().mean()


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def train(model: Two, optimizer: AsyncOptimizer, steps: Iterable[int], used: int = 2) -> list[str]:
    losses = []
    for step in steps:
        loss = model(step, used)
        losses.append(str(float(loss.detach())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def opened(model: Two, **settings: Any) -> AsyncOptimizer:
    return AsyncOptimizer(adamw(model.parameters()), model, mode="delayed", **settings)


def test_a_first_update_behind_a_late_one_is_awaited() -> None:
    """Not only the late one, which the same task publishes before it."""
    with lazy():
        model = Two()
        with opened(model, delay_compensation="preview") as optimizer:
            train(model, optimizer, range(3), used=1)
            train(model, optimizer, [3])
            seen = float(model(4, 2).detach())
            optimizer.synchronize()
            assert float(model(4, 2).detach()) == seen


def test_nothing_is_shown_of_a_frozen_parameter() -> None:
    """A function may step anything, so its parameters all count as newer."""
    model = Two()
    with opened(model, delay_compensation="preview") as optimizer:
        train(model, optimizer, range(2))
        model.layers[0].requires_grad_(False)
        model(2, 2).backward()
        optimizer.submit(optimizer.step)
        state = optimizer.state_dict()["state"]
    assert ["preview" in state[index] for index in range(4)] == [False, False, True, True]


def test_forwards_on_several_threads_begin_after_it_is_shown_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that trained has ended: the first of them goes on, and the others wait for it."""
    model = Two()
    seen: list[str] = []

    def forward() -> None:
        seen.append(str(float(model(9, 2).detach())))

    def on_threads(count: int, fn: Callable[[], object]) -> None:
        threads = [threading.Thread(target=fn) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with opened(model, delay_compensation="preview") as optimizer:
        on_threads(1, lambda: train(model, optimizer, range(3)))
        on_threads(1, forward)
        optimizer.synchronize()
        monkeypatch.setattr(optimizer._stepper.streams, "wait_for_all", lambda: time.sleep(0.2))
        on_threads(3, forward)
    assert set(seen) == {seen[0]}
    forward()
    assert seen[-1] != seen[0]


def test_what_a_plain_optimizer_has_loaded_is_not_saved_again() -> None:
    """A state dict of ``delayed`` in torch's own optimizer, whose entries keep all of it."""
    model = Two()
    with opened(model, delay_compensation="preview") as optimizer:
        train(model, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
    assert "preview" in saved["state"][0]
    plain = adamw(model.parameters())
    plain.load_state_dict(saved)
    with AsyncOptimizer(plain, model, mode="delayed", delay_compensation="preview") as optimizer:
        assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_reader_that_comes_before_it_is_shown_again_publishes_nothing_after() -> None:
    model = Two()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            optimizer.synchronize()
        except OrderError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    with opened(model, delay_compensation="preview") as optimizer:
        train(model, optimizer, range(3))
        expected = float(model(9, 2).detach())
        optimizer.synchronize()
        with optimizer._stepper.lock:
            reader.start()
            time.sleep(0.2)  # it has come as far as it can
            assert float(model(9, 2).detach()) == expected
        reader.join()
        assert float(model(9, 2).detach()) == expected
    assert len(errors) == 1
