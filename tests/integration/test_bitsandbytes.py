"""bitsandbytes' optimizers and layers, on its CPU kernels: beside themselves, and with masters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from references import (
    INIT_SCALE,
    NEVER_STALE,
    OPTIMIZERS,
    assert_same_run,
    batch,
    loss_of,
    network,
    run_ours,
    run_reference,
    same,
)
from support import reset
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
WRAPPED = "__bnb_optimizer_quant_state__"


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They are known by name, and nobody's overrides stay."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    for name, make in KINDS.items():
        monkeypatch.setitem(OPTIMIZERS, name, make)
    yield
    manager.initialize()


def unwrapped(entry: dict[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in entry.items() if k not in (WRAPPED, "master")}
    return own | entry.get(WRAPPED, {})


def with_plain_state(seen: dict[str, Any]) -> dict[str, Any]:
    return seen | {"state": [unwrapped(entry) for entry in seen["state"]]}


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_it_is_what_it_is_by_itself(kind: str, mode: str) -> None:
    ours = run_ours(kind, mode)
    assert_same_run(with_plain_state(ours), run_reference(kind))


@pytest.mark.parametrize(
    ("mode", "offload"), [("sync", "none"), ("overlap", "cpu"), ("delayed", "none")]
)
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_with_masters_it_is_a_loop_with_masters(
    kind: str, dtype: torch.dtype, mode: str, offload: str
) -> None:
    prompt = 0 if mode == "delayed" else NEVER_STALE
    ours = run_ours(kind, mode, offload, make=lambda: network(dtype), clip={"max_norm": 0.5})
    reference = run_reference(kind, prompt, make=lambda: network(dtype), max_norm=0.5)
    assert_same_run(with_plain_state(ours), reference)
    if "8bit" in kind:
        assert any(entry["state1"].dtype is torch.uint8 for entry in reference["state"])


def train(model: Any, optimizer: Any, scaler: Any, steps: range) -> None:
    for step in steps:
        scaler.scale(loss_of(model, step, step == 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [FULL, BRAIN, HALF], ids=str)
@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("kind", ["adamw8bit", "sgd8bit", "adamw32bit"])
def test_a_run_goes_on_from_its_checkpoint(kind: str, mode: str, dtype: torch.dtype) -> None:
    """Its ``load_state_dict`` runs no hook of torch's, and casts what it does not know."""

    def begin() -> tuple[nn.Module, GradScaler, AsyncOptimizer]:
        model, scaler = network(dtype), GradScaler("cpu", init_scale=INIT_SCALE)
        inner = KINDS[kind](model.parameters())
        return (
            model,
            scaler,
            AsyncOptimizer(inner, model, scaler=scaler, mode=mode, delay_compensation="none"),
        )

    model, scaler, optimizer = begin()
    train(model, optimizer, scaler, range(4))
    saved = copy.deepcopy(optimizer.state_dict()), scaler.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    masters = [entry.get("master") for entry in saved[0]["state"].values()]
    assert all((m is None) is (dtype is FULL) for m in masters)
    train(model, optimizer, scaler, range(4, 8))
    whole = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    model, scaler, optimizer = begin()
    train(model, optimizer, scaler, range(2))  # what is there is replaced
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved[0])
    scaler.load_state_dict(saved[1])
    train(model, optimizer, scaler, range(4, 8))
    assert same(optimizer.state_dict(), whole[0])
    assert same([p.detach() for p in model.parameters()], whole[1])
    optimizer.close()


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_closed_its_state_is_as_it_wants_it(dtype: torch.dtype) -> None:
    """State in float32 by its own choice is not rounded like the parameters: it would not step."""
    model = network(dtype)
    inner = bnb.optim.AdamW32bit(model.parameters(), lr=0.01)
    with AsyncOptimizer(inner, model, mode="sync", master_weights="fp32") as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for entry in inner.state.values():
        assert entry["state1"].dtype is entry["state2"].dtype is FULL
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    inner.step()
    assert not same([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
def test_overrides_of_single_parameters_reach_their_masters(
    dtype: torch.dtype, by_module: bool
) -> None:
    """The Trainer asks for 32 bits for every embedding in this way."""
    model = network(dtype)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    if by_module:
        manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    else:
        manager.override_config(model[0].weight, "optim_bits", 32)
    ids = set(manager.pid2config)
    inner = KINDS["adamw8bit"](model.parameters())
    with AsyncOptimizer(inner, model, mode="sync", master_weights="fp32") as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        kinds = [entry["state1"].dtype for entry in inner.state.values()]
    assert kinds[:3] == [FULL, torch.uint8, torch.uint8]
    assert set(manager.pid2config) == ids | ({id(model[0].weight)} if by_module else set())


def test_it_is_said_that_nothing_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    with (
        caplog.at_level(logging.WARNING, "accel_scaler"),
        AsyncOptimizer(KINDS["adamw8bit"](model.parameters()), model, mode="overlap"),
    ):
        pass
    assert "AdamW8bit is stepped on the training thread" in caplog.text


def test_what_else_holds_a_parameter_is_refused_still() -> None:
    model = network(BRAIN)
    inner = KINDS["adamw8bit"](model.parameters())
    inner.args.favourite = model[0].weight
    with pytest.raises(UnsupportedError, match="'args' holds a parameter"):
        AsyncOptimizer(inner, model, mode="sync", master_weights="fp32")


# Quantised layers under LoRA-like adapters.


class Adapted(nn.Module):
    """A frozen layer in 4 or 8 bits, and an adapter beside it."""

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


@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize(
    ("mode", "offload"),
    [("sync", "none"), ("overlap", "none"), ("delayed", "none"), ("overlap", "cpu")],
)
def test_a_frozen_4_bit_layer_is_left_alone(mode: str, offload: str, dtype: torch.dtype) -> None:
    """All parameters are given to the optimizer, as some do; those in uint8 are never trained."""

    def run(settings: dict[str, Any] | None) -> tuple[list[str], Adapted, dict[str, Any]]:
        reset()
        torch.manual_seed(1)
        model = Adapted(quantised(), dtype)
        packed = model.layer.weight.detach().clone()
        assert packed.dtype is torch.uint8
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
        attach(accelerator, ScalerConfig(init_scale=INIT_SCALE, **(settings or {})))
        prepared, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        x = batch(0)[0].repeat(1, 8)
        for _ in range(6):
            loss = (prepared(x).float() - 1.0).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(str(float(loss.detach())))
        saved = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
        saved = {k: v.clone() for k, v in saved.items()}
        detach(accelerator)
        assert torch.equal(model.layer.weight, packed)
        assert float(losses[-1]) < float(losses[0])
        return losses, model, saved

    losses, model, saved = run({"step_mode": mode, "offload": offload})
    assert saved["layer.weight"].dtype is torch.uint8
    assert saved["up.weight"].dtype is dtype
    assert torch.equal(saved["up.weight"], model.up.weight)
    if mode != "delayed":
        assert losses == run(None)[0]
