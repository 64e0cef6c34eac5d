"""float16 products in float32, rounded once, beside torch's own float16 kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from support import mlp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.integrations import cpu_float16
from accel_scaler.integrations.cpu_float16 import emulate_float16

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = torch.float16
INF = float("inf")


@pytest.fixture(autouse=True)
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without float16 instructions, whatever this one has."""
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", lambda: False)


PRODUCTS = {*cpu_float16.PRODUCTS, cpu_float16.ATTENTION, f"{cpu_float16.ATTENTION}_backward"}


class Watch(TorchDispatchMode):
    """Names of the products that reach torch's float16 kernels, when entered first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is not None and first.dtype is HALF:
            self.seen += [name] if name in PRODUCTS else []
        return func(*args, **(kwargs or {}))


Run = tuple[Tensor, list[Tensor | None]]


def run(
    function: Callable[..., Tensor], inputs: list[Tensor], around: Callable[[], Any] = nullcontext
) -> Run:
    """Output and gradients of a float16 autocast run, its forward and backward ``around``."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    for leaf, x in zip(leaves, inputs, strict=True):
        leaf.requires_grad_(x.requires_grad)
    with around(), torch.autocast("cpu", dtype=HALF):
        out = function(*leaves)
    if out.requires_grad:
        with around():
            out.backward(whole(*out.shape, seed=9).to(out.dtype))
    return out.detach(), [leaf.grad for leaf in leaves]


def whole(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    """Small whole numbers: whatever the order of a sum, float32 has it exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float().requires_grad_(grad)


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def attend(**kwargs: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs)


# name: the function, the shapes of its inputs
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(3, 5, 8), (4, 8), (4,)]),
    "linear, transposed": (
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
        [(5, 3, 8), (4, 8), (4,)],
    ),
    "mm": (torch.mm, [(5, 8), (8, 4)]),
    "matmul, batches broadcast": (torch.matmul, [(2, 1, 5, 8), (3, 8, 4)]),
    "matmul, vectors": (torch.matmul, [(8,), (8,)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), [(4,), (5, 8), (8, 4)]),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        [(2, 5, 4), (2, 5, 8), (2, 8, 4)],
    ),
    "addbmm": (torch.addbmm, [(5, 4), (2, 5, 8), (2, 8, 4)]),
    "einsum": (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(2, 5, 8), (4, 8)]),
    "conv2d, groups": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2),
        [(2, 4, 9, 9), (6, 2, 3, 3)],
    ),
    "conv2d, channels last": (
        lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w),
        [(2, 4, 9, 9), (6, 4, 3, 3)],
    ),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        [(2, 3, 5, 5), (3, 4, 3, 3)],
    ),
}
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "attention": attend(),
    "attention, causal and scaled": attend(is_causal=True, scale=0.5),
    "attention, added mask": attend(attn_mask=whole(2, 1, 6, 6, seed=5)),
}


def assert_same(ours: Run, torchs: Run) -> None:
    """Bit for bit, shapes, dtypes and strides too."""
    for a, b in zip((ours[0], *ours[1]), (torchs[0], *torchs[1]), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)


def assert_near(ours: Run, torchs: Run, spacings: int) -> None:
    """So many float16 spacings apart, of the largest value."""
    for a, b in zip((ours[0], *ours[1]), (torchs[0], *torchs[1]), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert float((a - b).abs().max() / b.abs().max()) <= spacings * 2**-10


@pytest.mark.parametrize("case", CASES)
def test_whole_numbers_are_those_of_torch_bit_for_bit(case: str) -> None:
    function, shapes = CASES[case]
    inputs = [whole(*shape, seed=i, grad=True) for i, shape in enumerate(shapes)]
    with Watch() as watch:
        ours = run(function, inputs, emulate_float16)
    assert not watch.seen, "a float16 kernel was called"
    assert_same(ours, run(function, inputs))


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: str) -> None:
    """torch also rounds the weights of the values to float16: 2 spacings, of the largest value."""
    inputs = [normal(2, 2, 6, 8, seed=i, grad=True) for i in range(3)]
    with Watch() as watch:
        ours = run(ATTENTION[case], inputs, emulate_float16)
    assert not watch.seen
    assert_near(ours, run(ATTENTION[case], inputs), 2)


def test_beyond_float16_is_inf_forward_and_backward() -> None:
    """A float32 product of the same operands is finite."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    a = torch.tensor([[300.0, 1.0], [-300.0, 1.0]], requires_grad=True)
    b = torch.tensor([[300.0, 0.5], [0.0, 0.5]], requires_grad=True)
    out, grads = run(product, [a, b], emulate_float16)
    assert out[:, 0].tolist() == [INF, -INF]
    assert out[:, 1].isfinite().all()
    large = torch.tensor([[40000.0]], requires_grad=True)
    (overflows,) = run(lambda x: x @ x.new_full((1, 1), 1e4), [large], emulate_float16)[1]
    assert overflows is not None
    assert overflows.isfinite().all()
    assert_same((out, grads), run(product, [a, b]))
    # In the backward the gradient, 9, times the other operand, 20,000, is the product.
    x, w = torch.ones(1, 1, requires_grad=True), torch.full((1, 1), 20000.0)
    with emulate_float16(), torch.autocast("cpu", dtype=HALF):
        y = F.linear(x, w)
    with emulate_float16():
        y.backward(torch.tensor([[9.0]], dtype=HALF))
    assert x.grad is not None
    assert x.grad.item() == INF


def test_what_torch_refuses_is_refused() -> None:
    a, b = torch.ones(2, 2, dtype=HALF), torch.ones(2, 2)
    for around in (nullcontext, emulate_float16):
        with around(), pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(a, b)
        with around(), pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(a, torch.ones(3, 2, dtype=HALF))


# --- where it is on, and where not ----------------------------------------------------------------


def depth() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_a_processor_with_the_kernels_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", lambda: True)
    with emulate_float16():
        assert depth() == 0


def test_nested_raising_and_another_thread() -> None:
    seen: list[int] = []
    with emulate_float16():
        with emulate_float16():
            assert depth() == 1
        assert depth() == 1
        thread = threading.Thread(target=lambda: seen.append(depth()))
        thread.start()
        thread.join()
    assert seen == [0]

    def fail() -> None:
        with emulate_float16():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert depth() == 0
    with emulate_float16():
        assert depth() == 1


# --- under Accelerate -----------------------------------------------------------------------------


def attached(**kwargs: Any) -> Any:
    """An attached fp16 accelerator on the CPU whose scale never moves."""
    config = ScalerConfig(init_scale=1024.0, growth_interval=10**6)
    return attach(Accelerator(cpu=True, mixed_precision="fp16", **kwargs), config)


def train(accelerator: Any, model: nn.Module, then: Callable[[Any], Any] = lambda m: m) -> Tensor:
    """Parameters after some steps of SGD; ``then``: done to the prepared model."""
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = then(model)
    for step in range(3):
        loss = model(normal(4, 8, seed=step)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch() as mode:
        yield mode


def test_training_reaches_no_float16_kernel_and_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Watch() as watch:
        ours = train(attached(), mlp())
    assert not watch.seen
    monkeypatch.setattr(cpu_float16, "has_float16_kernels", lambda: True)
    with Watch() as watch:
        torchs = train(attached(), mlp())
    assert "addmm" in watch.seen
    assert float((ours - torchs).abs().max()) < 1e-4


def test_the_block_autocast(watch: Watch) -> None:
    accelerator, w = attached(), whole(8, 8, grad=True)
    with accelerator.autocast():
        loss = F.linear(whole(2, 8), w).sum()
    accelerator.backward(loss)
    assert not watch.seen
    assert depth() == 1
    accelerator.scaler.abandon_window()
    detach(accelerator)
    with accelerator.autocast():
        assert depth() == 1, "only the watching one"


def test_compiled(watch: Watch) -> None:
    accelerator = attached(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
    assert torch.equal(train(accelerator, mlp()), train(attached(), mlp()))
    assert not watch.seen
