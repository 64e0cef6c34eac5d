"""``OverflowFinder`` names the module that overflowed first, and changes and keeps nothing.

Each model is built so that the culprit is known. Forwards run under float16 autocast on the CPU.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from versions import before_torch

from accel_scaler.overflow.finder import OverflowFinder
from accel_scaler.overflow.trace import Range
from accel_scaler.scaling import Origin

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
Seq = nn.Sequential


def squares(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def watching(*models: nn.Module) -> OverflowFinder:
    finder = OverflowFinder()
    for model in models:
        finder.watch(model)
    return finder


def micro_batch(
    finder: OverflowFinder,
    model: nn.Module,
    *inputs: Any,
    loss_of: Callable[[Any], Tensor] = squares,
    scale: float = 1024.0,
) -> None:
    """One forward and backward, as the recorder calls the finder."""
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model(*inputs))
    finder.before_backward(loss)
    (loss * scale).backward()


def origin(finder: OverflowFinder) -> Origin:
    found = finder.find()
    assert found is not None
    return found


def first(model: nn.Module, *inputs: Any, **how: Any) -> Origin:
    """What is found after one micro-batch; the search must find something."""
    finder = watching(model)
    micro_batch(finder, model, *inputs, **how)
    found = origin(finder)
    finder.close()
    return found


def overflowing(module: Any, factor: float = 1e5) -> Any:
    """The same module with weights that are fine in float16, and outputs that are not."""
    nn.init.constant_(module.weight, factor)
    return module


def zeroed(module: Any) -> Any:
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def filled(bias: float) -> Any:
    """A linear layer whose output is ``bias``, whatever comes."""
    layer = zeroed(nn.Linear(4, 4))
    nn.init.constant_(layer.bias, bias)
    return layer


def root(x: Tensor) -> Tensor:
    """0, with a gradient that is not finite."""
    return torch.sqrt(x * 0)


class Apply(nn.Module):
    """A leaf module around a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Code(nn.Module):
    """Modules, and code of its own around them: ``function(x, *modules)``."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(modules), function

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.parts)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def two() -> list[nn.Linear]:
    return [linear(), linear()]


def heads(*functions: Callable[[Tensor], Tensor], own: Any = torch.tanh) -> Code:
    """Several modules take one tensor, and so does code of its own."""
    return Code(lambda x, *parts: sum((part(x) for part in parts), own(x)), *map(Apply, functions))


def residual(*layers: nn.Module) -> Code:
    return Code(lambda x, body: x + body(x), Seq(*layers))


def masked() -> Apply:
    return Apply(lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), -INF))


SQUARE = torch.linspace(-1, 1, 16).view(4, 4)


def case(name: str, origin: str, words: str, build: Callable[[], nn.Module], **how: Any) -> Any:
    """``origin``: where, which module ("-": none), its class. ``words`` of the sentence."""
    return pytest.param(*origin.replace("-", "").split(" "), words, build, how, id=name)


FORWARD = [
    case("a linear", "forward 1 Linear", ": input in [1, 1], output reached inf",
         lambda: Seq(nn.Identity(), overflowing(nn.Linear(4, 4, bias=False), 4e4))),
    case("the model itself", "forward - Linear", "forward of Linear, micro-batch 0: ",
         lambda: overflowing(linear())),
    case("the fifth call of a shared module", "forward 0 Linear", "input in [6.4e+04, 6.4e+04], ",
         lambda: Seq(*[overflowing(nn.Linear(4, 4, bias=False), 10.0)] * 6)),
    case("code between modules", "forward 1 Code", "output reached inf",
         lambda: Seq(nn.Identity(), Code(lambda x, a, b: b((a(x) * 0 + 1) * 1e9), *two()))),
    case("data", "forward - Sequential", "the batch already contained NaN, micro-batch 0",
         lambda: Seq(linear()), x=torch.full((2, 4), math.nan)),
    case("behind a masked score", "forward 3 Linear", "",
         lambda: Seq(linear(), masked(), nn.Softmax(-1), overflowing(linear())), x=SQUARE),
    case("a dict", "forward 1 Apply", "output reached -inf",
         lambda: Seq(linear(), Apply(lambda x: {"z": x, "y": x.half() * 1e9})),
         loss_of=lambda out: squares(out["y"])),
    case("a frozen part", "forward 0.1 Linear", "",
         lambda: Seq(Seq(linear(), overflowing(linear())).requires_grad_(False), linear())),
]  # fmt: skip
LOSS = [
    case("nan by itself", "loss - float32", "look at how the loss is computed",
         linear, loss_of=lambda out: out.float().sum() * math.nan),
    case("a scale that float16 cannot hold", "loss - float16", "compute the loss in float32",
         linear, loss_of=lambda out: out.mean(), scale=65536.0),
]  # fmt: skip
BACKWARD = [
    case("masked logits under a finite loss", "backward 1 Apply", "",
         lambda: Seq(linear(), Apply(root), masked()), x=SQUARE,
         loss_of=lambda out: out.float().softmax(-1).pow(2).sum()),
    case("a module", "backward 2 Apply", "(forward of 2 (Apply): input in [0, 0], output in [0",
         lambda: Seq(filled(-9.0), nn.ReLU(inplace=True), Apply(torch.sqrt), linear())),
    case("code in the innermost", "backward 1.parts.0.0 Code", "after 1.parts.0.0.parts.0 (Linear)",
         lambda: Seq(linear(), residual(Code(lambda x, a, b: b(root(a(x))), *two())))),
    case("one of two with one input", "backward 1.parts.1 Apply", "backward of 1.parts.1 (Apply)",
         lambda: Seq(linear(), heads(torch.tanh, root), linear())),
    case("the loss's own", "backward - loss", "gradient of the output of Linear contains NaN",
         linear, loss_of=lambda out: root(out.float()).sum()),
    case("code after the last layer of a model that returns its loss", "backward - loss",
         "gradient of the output of Code contains NaN",
         lambda: Code(lambda x, a: {"loss": root((y := a(x)).float()).sum(), "y": y}, linear()),
         loss_of=lambda out: out["loss"]),
    case("a weight alone", "parameter 1 Linear", "parameter weight of 1 (Linear), micro-batch 0: r",
         lambda: Seq(filled(3e4), overflowing(linear(), 1e-3)),
         loss_of=lambda out: out.float().mean(), scale=64.0),  # 64/8 * 3e4 * 2 rows = 4.8e5
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "module", "cls", "words", "build", "how"), [*FORWARD, *LOSS, *BACKWARD]
)
def test_the_origin_is_named(
    where: str, module: str, cls: str, words: str, build: Any, how: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    found = first(build(), how.get("x", torch.ones(2, 4)), **{k: how[k] for k in how if k != "x"})
    assert (found.where, found.module, found.cls, found.micro_batch) == (where, module, cls, 0)
    assert words in found.text


# Windows.


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_micro_batch_is_counted_in_its_window(at: int) -> None:
    net = Seq(linear(), Apply(torch.sqrt))
    finder = watching(net)
    assert finder.find() is None
    for window in range(2):
        finder.new_window()
        for number in range(4):
            bad = window == 1 and number == at
            overflowing(zeroed(net[0]), 0.0 if bad else 1.0)
            micro_batch(finder, net, torch.ones(1, 4))
        assert (finder.find() is not None) == (window == 1)
    found = origin(finder)
    assert (found.where, found.module, found.micro_batch) == ("backward", "1", at)
    assert found.output == (0.0, 0.0)  # in the other micro-batches it was not


def test_a_forward_whose_backward_comes_after_another_one() -> None:
    net = Seq(nn.Identity(), overflowing(linear(), 4.0))
    finder = watching(net)
    with torch.autocast("cpu", torch.float16):
        losses = [squares(net(torch.full((1, 4), size))) for size in (1.0, 6e4)]
    for loss in losses:
        finder.before_backward(loss)
        loss.backward()
    assert (origin(finder).where, origin(finder).module) == ("forward", "1")


def test_an_evaluation_and_a_forward_without_backward_are_not_named() -> None:
    net = Seq(filled(0.0), Apply(torch.sqrt))
    finder = watching(net)
    with torch.no_grad():
        net.eval()(torch.full((1, 4), math.nan))
    net.train()(torch.full((1, 4), math.nan))
    micro_batch(finder, net, torch.ones(1, 4))
    found = origin(finder)
    assert (found.where, found.module) == ("backward", "1")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_nothing_open(error: type[BaseException]) -> None:
    net = Seq(Seq(linear(), Apply(torch.tanh)))
    finder = watching(net)

    def fail(x: Tensor) -> Tensor:
        raise error

    net[0][1].function = fail
    with pytest.raises(error):
        net(torch.ones(1, 4))
    net[0][1].function = root
    finder.new_window()
    micro_batch(finder, net, torch.ones(1, 4))
    assert origin(finder).module == "0.1"


def test_a_backward_reaches_forwards_of_an_earlier_window() -> None:
    generator, critic = Seq(nn.Identity(), Seq(filled(0.0), Apply(torch.sqrt))), nn.Linear(4, 1)
    finder = watching(generator, critic)
    with torch.autocast("cpu", torch.float16):
        fake = generator(torch.ones(2, 4))
    finder.new_window()
    micro_batch(finder, critic, fake)
    found = origin(finder)
    assert (found.where, found.module) == ("backward", "1.1")


def test_activations_are_freed_as_without_it() -> None:
    alive: list[weakref.ref[Any]] = []
    keep = Apply(lambda x: alive.append(weakref.ref(y := x * 2)) or y)
    net = Seq(linear(), keep, linear())
    finder = watching(net)
    gc.disable()
    try:
        micro_batch(finder, net, torch.ones(2, 4))
        assert alive[0]() is None
    finally:
        gc.enable()


# Kinds of values.


def test_a_range_is_that_of_the_values() -> None:
    def of(tensor: Tensor) -> Any:
        made = Range.of(tensor)
        if made is None:
            return None
        Range.read([made, made])
        return made.values

    x = torch.randn(7, 3)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        y = x.to(dtype, copy=True)
        assert of(y.t()) == (y.min().item(), y.max().item())
        y[3, 1], y[0, 0] = math.nan, INF
        assert str(of(y)) == "(nan, nan)"
        assert of(y[:1]) == (y[0].min().item(), INF)
    assert of(torch.tensor([1e300, 2e300], dtype=torch.float64)) == (1e300, 2e300)
    small = torch.ones(2).to(torch.float8_e4m3fn)
    others = (x[:0], x.to("meta"), x > 0, torch.complex(x, x), x.to_sparse(), small)
    for nothing in (torch.ones(2, dtype=torch.int64), *others):
        assert of(nothing) is None


# Activation checkpointing.


def checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *a: forward(*a, **kwargs), *args, use_reentrant=reentrant)

    return run


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_named_once_and_in_the_right_order(reentrant: bool) -> None:
    def net(after: Callable[[Tensor], Tensor] = lambda x: x) -> Code:
        a = Seq(linear(), Apply(torch.tanh))
        b = Seq(linear(), linear())
        runs = [checkpointed(a, reentrant), checkpointed(b, reentrant)]
        return Code(lambda x, *parts: after(runs[1](runs[0](x))), a, b)

    x = torch.ones(2, 4, requires_grad=True)
    model = net()
    model.parts[0][1].function = root
    assert first(model, x).module == "parts.0.1"
    model = net()
    overflowing(model.parts[1][0])
    assert first(model, x).module == "parts.1.0"
    found = first(Seq(nn.Identity(), net(root)), x)
    assert (found.where, found.module) == ("backward", "1")
    assert "in its own code after 1.parts.1" in found.text


# What it must not do.


def test_nothing_is_read_before_find_and_then_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    lists: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: lists.append(t.numel()) or tolist(t))
    net = Seq(*[linear() for _ in range(40)], overflowing(linear()))
    finder = watching(net)
    with Reads() as reads:
        for _ in range(4):
            micro_batch(finder, net, torch.ones(2, 4))
    synchronising = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")
    assert any("aminmax" in name for name in reads.names)
    assert [n for n in reads.names if any(f"aten.{s}." in n for s in synchronising)] == []
    assert lists == []
    assert origin(finder).module == "40"
    assert len(lists) == 1
    assert lists[0] > 1000


def test_a_second_watch_adds_nothing_and_close_removes_all_hooks() -> None:
    def hooks(net: nn.Module) -> int:
        own = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
            for m in net.modules()
        )
        return own + sum(len(p._backward_hooks or ()) for p in net.parameters())

    net = Seq(linear(), linear())
    finder = watching(net)
    once = hooks(net)
    assert once == 3 * 3 + 4
    finder.watch(net)
    assert hooks(net) == once
    net.append(overflowing(linear()))
    finder.watch(net)  # modules added later
    micro_batch(finder, net, torch.ones(1, 4))
    assert origin(finder).module == "2"
    out = net(torch.ones(1, 4))
    finder.close()
    finder.close()
    assert hooks(net) == 0
    assert finder.find() is None
    del finder
    (out * math.nan).sum().backward()  # hooks on its graph find nobody


@before_torch(2, 7, "torch 2.6: its compiler fails in itself, with SystemError, after other tests")
@pytest.mark.parametrize("inner", [True, False])
def test_the_graph_of_a_compiled_model_stays_whole(inner: bool) -> None:
    net, finder = Seq(linear(), overflowing(linear())), OverflowFinder()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    finder.watch(net if inner else compiled)  # inner: as unwrap_model gives it
    micro_batch(finder, compiled, torch.ones(1, 4))
    assert origin(finder).where in ({"loss"} if inner else {"forward", "loss"})
    finder.new_window()
    loss = compiled(torch.ones(1, 4)).sum() * 0
    (loss / loss).backward()
    assert origin(finder).where in ("parameter", "backward")
    torch._dynamo.reset()
