"""A default device that is not the model's changes nothing: every allocation names its own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import mlp, weights
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = [("sync", "none"), ("overlap", "cpu"), ("delayed", "none")]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
Seen = tuple[Tensor, list[Any], list[Tensor]]


def tensors_of(optimizer: Any) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [v for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]


def train(default: str | None, mode: str, offload: str, kind: str, half: bool) -> Seen:
    model = mlp().to(torch.float16 if half else torch.float32)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen: list[Any] = []
    with torch.device(default) if default else nullcontext():
        inner = OPTIMIZERS[kind](model.parameters())
        with AsyncOptimizer(inner, model, scaler=scaler, mode=mode, offload=offload) as optimizer:
            for step, x in enumerate(batches):
                loss = model(x.to(torch.float16 if half else torch.float32)).float().square().mean()
                loss = loss * float("inf") if step == 3 else loss
                scaler.scale(loss).backward()
                if step % 2:
                    norm = optimizer.clip_grad_norm_(0.1)
                    seen += [] if step == 3 else [float(norm)]
                optimizer.step()
                optimizer.zero_grad()
                seen += [scaler.get_scale(), optimizer.step_was_skipped]
                if step == 4:
                    optimizer.load_state_dict(optimizer.state_dict())
                    scaler.load_state_dict(scaler.state_dict())
            state = [t.clone() for t in tensors_of(optimizer)]
    return weights(model), seen, state


@pytest.mark.parametrize(("kind", "half"), [("sgd", True), ("fused adamw", False)])
@pytest.mark.parametrize(("mode", "offload"), MODES)
def test_training_under_a_default_device_is_as_without(
    mode: str, offload: str, kind: str, half: bool
) -> None:
    mine = train("meta", mode, offload, kind, half)
    expected = train(None, mode, offload, kind, half)
    assert torch.equal(mine[0], expected[0])
    assert mine[1] == expected[1]
    assert all(map(torch.equal, mine[2], expected[2]))
    assert {t.device.type for t in mine[2]} == {"cpu"}


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_state_that_names_no_device_lies_beside_the_masters(offload: str) -> None:
    """torch makes Adamax's count of steps on the default device; with offload that is the host."""
    model = mlp()
    with torch.device("meta"):
        inner = torch.optim.Adamax(model.parameters(), lr=0.01, foreach=False)
        optimizer = AsyncOptimizer(inner, model, mode="overlap", offload=offload)
        model(torch.ones(2, 8, device="cpu")).sum().backward()
        optimizer.step()
        if offload == "cpu":
            optimizer.close()
            assert {entry["step"].device.type for entry in inner.state.values()} == {"cpu"}
        else:  # as in torch
            with pytest.raises(Exception, match="meta"):
                optimizer.close()


def test_the_norm_of_no_gradients_is_a_number() -> None:
    model = nn.Linear(2, 2)
    scaler = GradScaler("cpu")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.device("meta"), AsyncOptimizer(inner, model, scaler=scaler) as optimizer:
        assert float(optimizer.clip_grad_norm_(1.0)) == 0.0
