"""Transforms of ``torch.func`` over an attached model: the numbers are the model's own, and what
watches it passes over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from support import reset
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from accel_scaler import attach, detach
from accel_scaler.integrations.cpu_float16 import emulating_float16

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "telemetry": {"telemetry": "scaler.jsonl"},
    "always": {"find_overflow": "always"},
    "replay": {"find_overflow": "replay"},
    "heal": {"heal": True},
}
X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
ONES = torch.ones(3, 2)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset()
    monkeypatch.chdir(tmp_path)


def net() -> nn.Module:
    torch.manual_seed(6)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 2))


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda params, x: functional_call(model, params, (x,)).square().mean()


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def per_sample(model: nn.Module) -> Any:
    return vmap(grad(loss_of(model)), (None, 0))(detached(model), X)


def jvp_of_parameters(model: nn.Module) -> Any:
    params = detached(model)
    ones = {name: torch.ones_like(p) for name, p in params.items()}
    return jvp(lambda p: loss_of(model)(p, X), (params,), (ones,))


def vjp_of_input(model: nn.Module) -> Any:
    output, pull = vjp(model, X)
    return output, pull(ONES)


def batched_backward(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    rows = torch.eye(6).reshape(6, 3, 2)
    return torch.autograd.grad(model(x), x, rows, is_grads_batched=True)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "per sample": per_sample,
    "jvp of parameters": jvp_of_parameters,
    "vjp": vjp_of_input,
    "jacrev": lambda model: jacrev(model)(X),
    "jacfwd": lambda model: jacfwd(model)(X),
    "vmap": lambda model: vmap(model)(X),
    "batched backward": batched_backward,
}


def by_hand(model: Any) -> Any:
    """Under fp16 autocast, as ``prepare`` puts it on."""
    cast = torch.autocast("cpu", torch.float16)(model.forward)
    model.forward = emulating_float16(convert_outputs_to_fp32(cast))
    return model


def attached(settings: dict[str, Any], mode: str) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    attach(accelerator, {"init_scale": 64.0, "step_mode": mode, **settings})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer))


def train(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(X).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "mode"), [("plain", "overlap"), *((name, "sync") for name in SETTINGS)]
)
def test_numbers_are_the_models_own(name: str, mode: str) -> None:
    accelerator, model, optimizer = attached(SETTINGS[name], mode)
    plain = by_hand(net())
    for call in TRANSFORMS.values():  # before a step, beside one that is due, within a window
        train(accelerator, model, optimizer)
        ours = tree_leaves(call(model))
        accelerator.backward(model(X).square().mean())
        again = tree_leaves(call(model))
        with torch.no_grad():
            for mine, p in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(p.data)
        theirs = tree_leaves(call(plain))
        optimizer.step()
        optimizer.zero_grad()
        assert len(ours) == len(theirs) > 0
        assert all(map(torch.equal, again, theirs))
        assert all(map(torch.equal, ours, theirs))
    assert accelerator.scaler_history.boundaries == 2 * len(TRANSFORMS)
    detach(accelerator)
