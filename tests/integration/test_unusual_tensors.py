"""Gradients, parameters and dtypes that few people have: each mode trains as torch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ["sync", "overlap"]
STEPS = 5


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Run:
    """The same loop under torch's scaler (``mode`` None) and ours."""

    def __init__(self, mode: str | None, optimizer: Any, model: nn.Module, **settings: Any) -> None:
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=settings.pop("scale", 1024.0))
        self.optimizer, self.ours = optimizer, mode is not None
        if mode is not None:
            self.scaler = GradScaler("cpu", init_scale=self.scaler.get_scale())
            self.optimizer = AsyncOptimizer(
                optimizer, model, scaler=self.scaler, step_mode=mode, **settings
            )

    def step(self, loss: Tensor, drop: Callable[[], Any] | None = None) -> None:
        self.scaler.scale(loss).backward()
        if self.ours:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        (drop or self.optimizer.zero_grad)()

    def close(self) -> None:
        if self.ours:
            self.optimizer.close()


def net(width: int = 300) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


# A default dtype that is not float32.


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_a_default_dtype_changes_no_number(default: torch.dtype, mode: str) -> None:
    """1 / 2**25 is nothing in float16."""

    def train(mode: str | None) -> list[Tensor]:
        torch.set_default_dtype(torch.float32)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        run = Run(mode, optimizer, model, scale=2.0**25)
        xs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
        torch.set_default_dtype(default)
        for x in xs:
            run.step(model(x).square().mean())
        run.close()
        return list(model.parameters())

    assert all(map(torch.equal, train(mode), train(None)))


# Gradients in another dtype than their parameters.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_in_float32_of_parameters_that_are_not(dtype: torch.dtype, mode: str) -> None:
    def train(mode: str | None, dtype: torch.dtype, **settings: Any) -> Tensor:
        p: Any = nn.Parameter(torch.ones(4, dtype=dtype))
        p.grad_dtype = torch.float32
        model = nn.Module()
        model.p = p
        run = Run(mode, torch.optim.SGD([p], lr=0.1), model, **settings)
        for _ in range(20):
            run.step((p.float() * 0.01).sum())
        run.close()
        return p.detach()

    ours = train(mode, dtype)
    assert torch.equal(ours, train(None, torch.float32).to(dtype))
    if dtype is torch.bfloat16:
        in_place = train(mode, dtype, master_weights="none")
        assert torch.equal(in_place, train(None, dtype))
        assert not torch.equal(in_place, ours)


# State that is laid out otherwise.


@pytest.mark.parametrize("mode", ["scaler", *MODES])
def test_fused_state_follows_a_parameter_to_another_layout(mode: str) -> None:
    """torch's fused CPU kernels ignore strides; the reference is not fused."""

    def train(mode: str, fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        run = Run(None if mode == "scaler" else mode, optimizer, model)
        if mode == "scaler":
            run.scaler = GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            if step == 3:
                model.to(memory_format=torch.channels_last)
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            run.step(model(x).square().mean())
        run.close()
        return list(model.parameters())

    for ours, reference in zip(train(mode, True), train(mode, False), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)


# One parameter of many gets other memory, or leaves.


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("how", ["moved", "leaves"])
def test_a_parameter_between_others_goes_its_own_way(mode: str, name: str, how: str) -> None:
    """Its neighbours keep their places, with a gap between them."""

    def train(mode: str | None) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
        more = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, fused=True, **more)
        run = Run(mode, optimizer, model)
        for i in range(3 * STEPS):
            if i == STEPS and how == "moved":
                model[2].weight.data = model[2].weight.data * 0.5
            elif i == STEPS:
                optimizer.param_groups[0]["params"].pop(2)
                model[2].weight.requires_grad_(False)
            run.step(model(torch.randn(3, 5)).square().sum())
        run.close()
        state = [dict(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]
        return list(model.parameters()), state

    (found, state), (expected, stock) = train(mode), train(None)
    assert all(map(torch.equal, found, expected))
    assert str(state) == str(stock)


def test_a_master_between_others_goes_its_own_way(mode: str) -> None:
    """An assignment of the same values changes nothing."""

    def train(is_moved: bool) -> list[Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        with AsyncOptimizer(optimizer, model, step_mode=mode, master_weights="fp32") as ours:
            for i in range(3 * STEPS):
                if i == STEPS and is_moved:
                    model[1].weight.data = model[1].weight.data.clone()
                model(torch.randn(3, 5).bfloat16()).float().square().sum().backward()
                ours.step()
                ours.zero_grad()
            saved = ours.state_dict()["state"]
        return [*model.parameters(), *(each["step"] for each in saved.values())]

    assert all(map(torch.equal, train(True), train(False)))
