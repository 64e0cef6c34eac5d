"""A module in float32 within a model in float16, beside ``functional_call`` with float32 copies."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support import same
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from accel_scaler import UnsupportedError
from accel_scaler.overflow.fp32_modules import Fp32Module
from accel_scaler.overflow.module_names import modules_by_name

WIDTH = 4


def enable(model: nn.Module, *names: str) -> list[Fp32Module]:
    found = [Fp32Module(modules_by_name(model)[name], name) for name in names]
    for each in found:
        each.enable()
    return found


def autocast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.float16) if enabled else nullcontext()


# Random models.


class Residual(nn.Module):
    """Passes tuples and dicts on, may checkpoint what is in it, may use one layer twice."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Any) -> Any:
        given = x["x"] if isinstance(x, dict) else x
        if self.kind == "checkpoint":
            out = checkpoint(self.inner, given, use_reentrant=False)
        elif self.kind == "twice":
            out = self.inner(self.inner(given) / 2) / 2
        elif self.kind == "dict":
            out = self.inner({"x": given} if isinstance(self.inner, Residual) else given)
        else:
            out = self.inner(given)
        return (given + out) / 2


class Reference(nn.Module):
    """Around a module that is to run in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        given = x["x"] if isinstance(x, dict) else x
        wide = given.float()
        wide = {"x": wide} if isinstance(x, dict) else wide
        amp = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            tensors = [*self.inner.named_parameters(), *self.inner.named_buffers()]
            out = functional_call(self.inner, {n: t.float() for n, t in tensors}, (wide,))
        if amp or given.dtype is torch.float32:
            return out
        return out.clamp(-65504, 65504).half()


def grown(rng: random.Random, depth: int) -> nn.Module:
    if depth == 0:
        kinds = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH, elementwise_affine=False)]
        return rng.choice(kinds)
    inner = nn.Sequential(*(grown(rng, depth - 1) for _ in range(rng.randint(1, 3))))
    return Residual(inner, rng.choice(["plain", "checkpoint", "twice", "dict"]))


def random_model(seed: int, half: bool) -> Any:
    """Every other one has two layers with one weight."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = nn.Sequential(grown(rng, 3), grown(rng, 3))
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    if seed % 2 and layers:
        layers[0].weight = layers[-1].weight
    return model.half() if half else model


def results(model: nn.Module, amp: bool, half: bool, call: Any = None) -> list[Tensor]:
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        x = (x.half() if half else x).requires_grad_()
        with autocast(amp):
            out = (call or model)(x)
        out.float().tanh().sum().backward()
        assert x.grad is not None
        found += [out, x.grad]
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("half", "amp"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(8))
def test_random_models_beside_functional_call(seed: int, half: bool, amp: bool) -> None:
    rng = random.Random(f"{seed} chosen")
    model, reference = random_model(seed, half), random_model(seed, half)
    names = [name for name in modules_by_name(model) if name]
    chosen = rng.sample(names, min(len(names), rng.randint(1, 5)))
    outer = [n for n in chosen if not any(n.startswith(f"{other}.") for other in chosen)]
    rng.shuffle(chosen)
    for each in reference.modules() if half else ():
        if getattr(each, "kind", "") == "checkpoint":
            each.kind = "plain"  # functional_call's parameters are gone when it runs again
    for name in outer:
        reference.set_submodule(name, Reference(reference.get_submodule(name)))
    before = [dict(vars(each)) for each in model.modules()]
    on = enable(model, *chosen)
    assert same(results(model, amp, half), results(reference, amp, half))
    rng.shuffle(on)
    for module in on:
        module.disable()
        assert not module.is_enabled
    for now, then in zip(model.modules(), before, strict=True):
        assert vars(now).keys() == then.keys()
        assert all(vars(now)[key] is then[key] for key in then)


# One model.


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wo(torch.tanh(self.wi(x)))
        return out


def mlps(half: bool = False) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mlp(), nn.Linear(WIDTH, WIDTH))
    return model.half() if half else model


@pytest.mark.parametrize(("enabled_before", "half"), [(True, False), (False, True)])
def test_a_compiled_model_is_one_graph_with_the_same_numbers(
    enabled_before: bool, half: bool
) -> None:
    torch._dynamo.reset()
    plain, model = mlps(half), mlps(half)
    enable(plain, "1")
    if enabled_before:
        enable(model, "1")
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    if not enabled_before:
        with autocast(not half):
            run(torch.ones(5, WIDTH).to(model[0].weight.dtype))
        enable(model, "1")
    assert same(results(model, not half, half, run), results(plain, not half, half))
    torch._dynamo.reset()


@pytest.mark.parametrize("half", [False, True])
def test_a_copy_and_a_pickle_are_plain(half: bool) -> None:
    model, plain = mlps(half), mlps(half)
    enable(model, "1")
    data = torch.randn(64, WIDTH).to(plain[0].weight.dtype)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"accel_scaler" not in file.getvalue()
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        with autocast(not half):
            assert torch.equal(other(data), plain(data))
            assert not torch.equal(model(data), plain(data))
        other[1].wo.weight.data.zero_()
        with autocast(not half):
            assert not torch.equal(other(data), plain(data)), "its own parameters"
        enable(other, "1")
        with autocast(not half):
            other(data)


class Counting(nn.Module):
    """Replaces its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(WIDTH), Counting])
def test_buffers_written_in_the_call_keep_their_dtype(make: Any) -> None:
    module = make().half()
    wide = copy.deepcopy(module).float()
    enable(module, "")
    x = torch.randn(16, WIDTH).half()
    assert torch.equal(module(x), wide(x.float()).half())
    for buffer, expected in zip(module.buffers(), wide.buffers(), strict=True):
        assert buffer.dtype in (torch.float16, torch.int64)
        assert torch.equal(buffer, expected.to(buffer.dtype))


# Refusals.


class Packed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2).to(dtype), requires_grad=False)


def prepared() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer._original_forward = layer.forward
    return layer


def with_two_tensors() -> nn.Module:
    from torch.testing._internal.two_tensor import TwoTensor

    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)))
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "ScriptModule"),
        (lambda: Packed(torch.int8), "int8"),
        (lambda: Packed(torch.float8_e4m3fn), "float8_e4m3fn"),
        (with_two_tensors, "TwoTensor"),
        (prepared, "was prepared by itself"),
    ],
)
def test_what_cannot_be_cast_is_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    model = mlps()
    model[1].wi = make()
    for name in ("1", "1.wi"):
        with pytest.raises(UnsupportedError, match=rf"'{name}' .*'1\.wi' .*{why}"):
            Fp32Module(model.get_submodule(name), name)
    Fp32Module(model[0], "0")
    with pytest.raises(UnsupportedError, match="has no forward"):
        Fp32Module(nn.ModuleList(), "h")
