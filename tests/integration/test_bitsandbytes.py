"""bitsandbytes' optimizers and layers, on its CPU kernels, beside themselves; not with masters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from references import INIT_SCALE, batch, network
from support import reset, stock_fp16_on_cpu
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, UnsupportedError, attach, detach

bnb = pytest.importorskip("bitsandbytes", "0.50", "earlier ones have no CPU kernels to step with")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
]

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
SMALL = {"lr": 0.01, "min_8bit_size": 16}
KINDS: dict[str, Any] = {
    "adamw8bit": lambda ps: bnb.optim.AdamW8bit(ps, **SMALL),
    "paged adamw8bit": lambda ps: bnb.optim.PagedAdamW8bit(ps, **SMALL),
    "lion8bit": lambda ps: bnb.optim.Lion8bit(ps, **SMALL),
    "sgd8bit": lambda ps: bnb.optim.SGD8bit(ps, momentum=0.9, **SMALL),
    "adamw32bit": lambda ps: bnb.optim.AdamW32bit(ps, lr=0.01),
}


@pytest.fixture(autouse=True)
def overrides() -> Iterator[None]:
    """Nobody's stay."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    yield
    manager.initialize()


def run(kind: str, accelerator: Any) -> list[Tensor]:
    torch.manual_seed(7)
    net = network()
    model, optimizer = accelerator.prepare(net, KINDS[kind](net.parameters()))
    for number in range(4):
        accelerator.backward(model(batch(number)[0]).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_attached_it_trains_as_in_stock(kind: str, mode: Any) -> None:
    stock = run(kind, stock_fp16_on_cpu(Accelerator(cpu=True, mixed_precision="fp16")))
    reset()
    ours = attach(Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig(step_mode=mode))
    assert all(map(torch.equal, run(kind, ours), stock))


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (BRAIN, {"step_mode": "sync", "master_weights": "fp32"}),
        (HALF, {"step_mode": "overlap"}),
    ],
)
def test_masters_are_refused(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    model = network(dtype)
    inner = KINDS["adamw8bit"](model.parameters())
    before = dict(vars(inner))
    with pytest.raises(UnsupportedError, match=r"not among the optimizers .*float32 copies"):
        AsyncOptimizer(inner, model, scaler=GradScaler("cpu"), **settings)
    assert vars(inner) == before


# Quantised layers under LoRA-like adapters.


class Adapted(nn.Module):
    """A frozen layer in 4 bits, and an adapter beside it."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(64, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, 64, bias=False, dtype=dtype)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x.to(self.down.weight.dtype)))
        return out


def quantised() -> nn.Module:
    torch.manual_seed(7)
    layer = bnb.nn.Linear4bit(64, 64, compute_dtype=HALF, quant_type="nf4")
    layer.load_state_dict(nn.Linear(64, 64).state_dict())
    moved: nn.Module = layer.to("cpu")  # quantises
    return moved


def trained(dtype: torch.dtype, **settings: Any) -> tuple[list[float], Adapted, dict[str, Any]]:
    """Losses, model and its state dict while attached. All parameters are given to the optimizer,
    as some do; those of the frozen layer are never trained."""
    reset()
    torch.manual_seed(1)
    model = Adapted(quantised(), dtype)
    packed = model.layer.weight.detach().clone()
    assert packed.dtype is torch.uint8
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    attach(accelerator, ScalerConfig(init_scale=INIT_SCALE, **settings))
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    x = batch(0)[0].repeat(1, 8)
    for _ in range(6):
        loss = (prepared(x).float() - 1.0).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    saved = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    saved = {k: v.clone() for k, v in saved.items()}
    detach(accelerator)
    assert torch.equal(model.layer.weight, packed)
    assert losses[-1] < losses[0]
    return losses, model, saved


@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_frozen_4_bit_layer_is_left_alone(mode: str, dtype: torch.dtype) -> None:
    losses, model, saved = trained(dtype, step_mode=mode)
    assert saved["layer.weight"].dtype is torch.uint8
    assert saved["up.weight"].dtype is dtype
    assert torch.equal(saved["up.weight"], model.up.weight)
    assert losses == trained(dtype)[0]
