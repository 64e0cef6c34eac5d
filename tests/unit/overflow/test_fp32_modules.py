"""A module in float32 within a model in float16, beside one that is written so by hand."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import UnsupportedError
from accel_scaler.overflow.fp32_modules import Fp32Module
from accel_scaler.overflow.module_names import modules_by_name

WIDTH = 8


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wo(torch.relu(self.wi(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.proj(x)
        out: Tensor = hidden + self.mlp(hidden)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = self.run(block, x)
        out: Tensor = self.head(x)
        return out

    def run(self, block: Any, x: Tensor) -> Tensor:
        out: Tensor = block(x)
        return out


class ByHand(Net):
    """Of the same seed: the middle block's MLP in float32."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        if block is not self.h[1]:
            out: Tensor = block(x)
            return out
        hidden = block.proj(x)
        with torch.autocast("cpu", enabled=False):
            wide = hidden.float()
            wi, wo = block.mlp.wi, block.mlp.wo
            wide = torch.relu(nn.functional.linear(wide, wi.weight.float(), wi.bias.float()))
            wide = nn.functional.linear(wide, wo.weight.float(), wo.bias.float())
        if not torch.is_autocast_enabled("cpu") and hidden.dtype is not torch.float32:
            wide = wide.clamp(-65504, 65504).to(hidden.dtype)
        result: Tensor = hidden + wide
        return result


def made(kind: type[Net] = Net) -> Any:
    torch.manual_seed(3)
    return kind()


def enable(model: nn.Module, *names: str) -> list[Fp32Module]:
    found = [Fp32Module(modules_by_name(model)[name], name) for name in names]
    for each in found:
        each.enable()
    return found


def trained(
    model: Any, *, amp: bool = True, steps: int = 3, call: Callable[..., Any] | None = None
) -> list[Tensor]:
    """Outputs, gradients and parameters of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    seen: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(5, WIDTH).to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.float16) if amp else nullcontext():
            out = (model if call is None else call)(x)
        (out.float().square().mean() * 64).backward()
        seen += [out.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("when", ["before", "in the midst"])
@pytest.mark.parametrize("half", [False, True])
def test_compiled(when: str, half: bool) -> None:
    """One graph, as of the model that is written so by hand."""
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    by_hand: Any = made(ByHand).half() if half else made(ByHand)
    expected = trained(by_hand, amp=not half, call=compiled(by_hand))
    model = made().half() if half else made()
    if when == "before":
        enable(model, "h.1.mlp")
    run: Any = compiled(model)
    if when == "in the midst":
        with torch.autocast("cpu", torch.float16) if not half else nullcontext():
            run(torch.ones(5, WIDTH).to(model.head.weight.dtype))
    if when != "before":
        enable(model, "h.1.mlp")
    assert_equal(trained(model, amp=not half, call=run), expected)


def test_a_copy_and_a_pickle_are_plain() -> None:
    x = torch.randn(4, WIDTH)
    for half in (False, True):
        model = made().half() if half else made()
        enable(model, "h.1.mlp", "h.2")
        plain = made().half() if half else made()
        data = x.to(plain.head.weight.dtype)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert b"accel_scaler" not in file.getvalue()
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ):
            with torch.autocast("cpu", torch.float16) if not half else nullcontext():
                assert torch.equal(other(data), plain(data))
                assert not torch.equal(model(data), plain(data))
            other.h[1].mlp.wo.weight.data.zero_()
            with torch.autocast("cpu", torch.float16) if not half else nullcontext():
                assert not torch.equal(other(data), plain(data)), "its own parameters"
            enable(other, "h.1.mlp")
            other(data)


def test_the_cache_of_autocast_is_kept() -> None:
    """A weight that is used in both: outside it stays the one that was cast for this region."""
    model = made()
    model.h[1].mlp.wi.weight = model.head.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    model.head.bias = None
    by_hand = made(ByHand)
    by_hand.head.bias = None
    by_hand.h[1].mlp.wi.weight = by_hand.head.weight = nn.Parameter(model.head.weight.detach() * 1)
    enable(model, "h.1.mlp")
    assert_equal(trained(model), trained(by_hand))


def test_tied_parameters_of_a_half_module_are_cast_once() -> None:
    torch.manual_seed(0)
    mlp = Mlp().half()
    mlp.wo.weight = mlp.wi.weight
    x = torch.randn(3, WIDTH).half()
    enable(mlp, "")
    mlp(x).float().sum().backward()
    w = mlp.wi.weight.detach().clone().requires_grad_()
    wide = w.float()
    out = torch.relu(nn.functional.linear(x.float(), wide, mlp.wi.bias.detach().float()))
    out = nn.functional.linear(out, wide, mlp.wo.bias.detach().float()).half()
    out.float().sum().backward()
    assert torch.equal(mlp.wi.weight.grad, w.grad)
    assert mlp.wi.weight is mlp.wo.weight


def test_buffers_written_in_the_call_are_kept_in_their_dtype() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH).half()
    wide = copy.deepcopy(norm).float()
    enable(norm, "")
    x = torch.randn(16, WIDTH).half()
    out = norm(x)
    assert torch.equal(out, wide(x.float()).half())
    assert norm.running_mean.dtype is norm.weight.dtype is torch.float16
    assert torch.equal(norm.running_mean, wide.running_mean.half())
    assert torch.equal(norm.running_var, wide.running_var.half())
    assert norm.num_batches_tracked == 1


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError


def test_a_forward_that_raises_leaves_the_parameters_in_place() -> None:
    module = Raising().half()
    weight = module.weight
    enable(module, "")
    with pytest.raises(ArithmeticError):
        module(torch.ones(2).half())
    assert module.weight is weight


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
        (lambda: Packed(torch.bool), "bool"),
        (lambda: Packed(torch.float8_e4m3fn), "float8_e4m3fn"),
        (with_two_tensors, "TwoTensor"),
        (prepared, "was prepared by itself"),
    ],
)
def test_what_cannot_be_cast_is_refused_by_name(make: Callable[[], nn.Module], why: str) -> None:
    model = made()
    model.h[1].mlp.wi = make()
    for name in ("h.1", "h.1.mlp.wi"):
        with pytest.raises(UnsupportedError, match=rf"'{name}' .*'h\.1\.mlp\.wi' .*{why}"):
            Fp32Module(model.get_submodule(name), name)
    Fp32Module(model.h[0], "h.0")
    with pytest.raises(UnsupportedError, match="has no forward"):
        Fp32Module(model.h, "h")
