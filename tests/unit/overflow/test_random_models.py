"""Random nests of modules, some of them in float32, beside the same with ``functional_call``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from accel_scaler.overflow.fp32_modules import Fp32Module
from accel_scaler.overflow.module_names import modules_by_name

WIDTH = 4


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


def results(model: nn.Module, half: bool) -> list[Tensor]:
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        x = torch.randn(3, WIDTH)
        x = (x.half() if half else x).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=not half):
            out = model(x)
        out.float().tanh().sum().backward()
        assert x.grad is not None
        found += [out, x.grad]
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_beside_functional_call(seed: int, half: bool) -> None:
    def made() -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(*(grown(rng, 3) for rng in [random.Random(seed)] * 2))
        return model.half() if half else model

    rng = random.Random(f"{seed} chosen")
    model, reference = made(), made()
    names = [name for name in modules_by_name(model) if name]
    chosen = rng.sample(names, min(len(names), rng.randint(1, 5)))
    outer = [n for n in chosen if not any(n.startswith(f"{other}.") for other in chosen)]
    rng.shuffle(chosen)
    for each in reference.modules() if half else ():
        if getattr(each, "kind", "") == "checkpoint":
            each.kind = "plain"  # functional_call's parameters are gone when it runs again
    for name in outer:
        reference.set_submodule(name, Reference(reference.get_submodule(name)))
    expected = results(reference, half)
    on = [Fp32Module(modules_by_name(model)[name], name) for name in chosen]
    before = [dict(vars(each)) for each in model.modules()]
    for each in on:
        each.enable()
    got = results(model, half)
    rng.shuffle(on)
    for each in on:
        each.disable()
    for now, then in zip(model.modules(), before, strict=True):
        assert vars(now).keys() == then.keys()
        assert all(vars(now)[key] is then[key] for key in then)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
