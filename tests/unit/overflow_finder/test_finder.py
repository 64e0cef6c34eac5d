"""``OverflowFinder`` names the module that overflowed first, and changes and keeps nothing.

Each model is built so that the culprit is known. Forwards run under float16 autocast on the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from versions import before_torch

from accel_scaler.async_optimizer.pending_parameter import ParameterHold, PendingParameter
from accel_scaler.overflow_finder import trace
from accel_scaler.overflow_finder.finder import Origin, OverflowFinder
from accel_scaler.overflow_finder.ranges import Range

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
LIMIT = 65504.0


def squares(out: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def micro_batch(
    finder: OverflowFinder,
    model: nn.Module,
    *inputs: Any,
    loss_of: Callable[[Any], Tensor] = squares,
    scale: float = 1024.0,
) -> None:
    """One forward and backward, as the lead calls the finder."""
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model(*inputs))
    finder.note_loss(loss)
    (loss * scale).backward()


def first(model: nn.Module, *inputs: Any, **how: Any) -> Origin:
    """What is found after one micro-batch; the search must find something."""
    finder = OverflowFinder()
    finder.watch(model)
    micro_batch(finder, model, *inputs, **how)
    found = finder.find()
    finder.close()
    assert found is not None
    return found


def overflowing(module: Any, factor: float = 1e5) -> Any:
    """The same module with weights that are fine in float16, and outputs that are not."""
    with torch.no_grad():
        module.weight.copy_(torch.full_like(module.weight, factor))
    return module


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Apply(nn.Module):
    """A leaf module around a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Attention(nn.Module):
    """What breaks its backward is between its modules: a logarithm of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sqrt(self.query(x) * 0))


# The forward.


def test_a_linear_whose_output_overflows_is_named_with_its_ranges() -> None:
    bad = overflowing(nn.Linear(4, 4), 3e4)
    net = nn.Sequential(nn.Linear(4, 4), Residual(nn.LayerNorm(4), bad), nn.Linear(4, 2))
    net[1].body[0].bias.data.fill_(1.0)
    x, seen = torch.randn(3, 4), {}
    probe = bad.register_forward_hook(lambda m, a, out: seen.update(i=a[0], o=out))
    found = first(net, x)
    probe.remove()
    assert (found.where, found.module, found.cls) == ("forward", "1.body.1", "Linear")
    assert found.micro_batch == 0
    assert found.input == (float(seen["i"].min()), float(seen["i"].max()))
    assert found.output == (float(seen["o"].min()), float(seen["o"].max()))
    assert found.output[1] == INF
    assert "forward of 1.body.1 (Linear), micro-batch 0: input in [" in found.text


def test_the_sentence_says_what_was_reached() -> None:
    net = nn.Sequential(nn.Identity(), overflowing(nn.Linear(4, 4, bias=False), 4e4))
    found = first(net, torch.ones(2, 4))
    assert found.output == (INF, INF)
    assert found.text == (
        "forward of 1 (Linear), micro-batch 0: input in [1, 1], output reached inf"
    )


def test_the_first_of_two_overflows_is_named_not_the_second() -> None:
    bad = [overflowing(nn.Linear(4, 4), 4e4) for _ in range(2)]
    found = first(nn.Sequential(bad[0], Apply(torch.nan_to_num), bad[1]), torch.ones(2, 4))
    assert found.module == "2"  # the first one's was replaced on the way
    found = first(nn.Sequential(bad[0], nn.Tanh(), bad[1]), torch.ones(2, 4))
    assert found.module == "2"  # tanh(inf) is 1
    found = first(nn.Sequential(bad[0], nn.ReLU(), bad[1]), torch.ones(2, 4))
    assert found.module == "0"


def test_the_right_call_of_a_shared_module_is_told_by_its_input() -> None:
    shared = overflowing(nn.Linear(4, 4, bias=False), 10.0)
    found = first(nn.Sequential(*[shared] * 6), torch.ones(1, 4))
    # 1, 40, 1600, 64000, inf
    assert (found.module, found.input, found.output) == ("0", (64000.0, 64000.0), (INF, INF))


def test_the_model_itself_is_shown_as_its_class() -> None:
    found = first(overflowing(nn.Linear(4, 4)), torch.ones(2, 4))
    assert (found.module, found.cls) == ("", "Linear")
    assert found.text.startswith("forward of Linear, micro-batch 0: ")


def test_code_between_modules_is_blamed_on_the_module_around_it() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) * 0 + 1).half() * 6e4 * 2)

    found = first(nn.Sequential(nn.Identity(), Between()), torch.ones(2, 4))
    assert (found.where, found.module, found.cls) == ("forward", "1", "Between")
    assert found.output == (INF, INF)


def test_weights_that_are_broken_or_too_large_for_float16_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    overflowing(net[1], 1e5)
    assert "its weight is in [1e+05, 1e+05], beyond 65504" in first(net, torch.ones(1, 4)).text
    overflowing(net[1], math.nan)
    found = first(net, torch.ones(1, 4))
    assert found.text.endswith("; its weight is not finite itself")


def test_nan_in_the_data_is_called_that() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = math.nan
    found = first(nn.Sequential(nn.Linear(4, 4)), x)
    assert (found.where, found.module, found.cls) == ("forward", "", "Sequential")
    assert "look at the data" in found.text
    assert str(found.input) == "(nan, nan)"


def test_a_mask_of_minus_inf_is_not_broken_data() -> None:
    layer = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    overflowing(layer.linear1, 1e5)
    found = first(layer, torch.randn(1, 3, 4), mask)
    assert (found.where, found.module) == ("forward", "linear1")


def test_masked_scores_that_a_softmax_takes_are_not_the_culprit() -> None:
    fill = Apply(lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), -INF))
    bad = overflowing(nn.Linear(4, 4))
    found = first(nn.Sequential(nn.Linear(4, 4), fill, nn.Softmax(-1), bad), torch.randn(4, 4))
    assert found.module == "3"
    # And with a finite loss, what counts is the backward.
    root = Apply(lambda x: torch.sqrt(x * 0))
    net = nn.Sequential(nn.Linear(4, 4), fill, nn.Softmax(-1), root)
    found = first(net, torch.randn(4, 4))
    assert (found.where, found.module) == ("backward", "3")


def test_a_loss_that_is_nan_by_itself_is_named_with_its_dtype() -> None:
    found = first(nn.Linear(4, 4), torch.ones(2, 4), loss_of=lambda o: o.float().sum() * math.nan)
    assert (found.where, found.module, found.cls) == ("loss", "", "float32")
    assert str(found.output) == "(nan, nan)"


def test_a_scale_that_a_float16_loss_cannot_hold_is_named() -> None:
    def run(loss_of: Callable[[Any], Tensor]) -> Origin | None:
        finder, net = OverflowFinder(), nn.Linear(4, 4)
        finder.watch(net)
        micro_batch(finder, net, torch.ones(2, 4), loss_of=loss_of, scale=65536.0)
        return finder.find()

    found = run(lambda out: out.mean())
    assert found is not None
    assert (found.where, found.cls, found.input) == ("loss", "float16", (INF, INF))
    assert "compute the loss in float32" in found.text
    assert run(lambda out: out.float().mean()) is None


# The backward.


def test_a_module_whose_backward_overflows_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Apply(torch.sqrt), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].bias.fill_(-100.0)
    found = first(net, torch.randn(3, 4))
    assert (found.where, found.module, found.cls) == ("backward", "2", "Apply")
    assert found.output is not None
    assert all(map(math.isfinite, found.output))
    assert found.input is not None
    assert not all(map(math.isfinite, found.input))
    assert "(forward of 2 (Apply): input in [0, 0], output in [0, 0])" in found.text


def test_code_in_a_module_is_named_by_the_innermost_module_around_it() -> None:
    found = first(nn.Sequential(nn.Linear(4, 4), Residual(Attention())), torch.randn(2, 4))
    assert (found.where, found.module, found.cls) == ("backward", "1.body.0", "Attention")
    assert "after 1.body.0.query (Linear)" in found.text
    assert found.output is not None
    assert all(map(math.isfinite, found.output))


class Heads(nn.Module):
    """Several modules take one tensor, and so does code of its own."""

    def __init__(self, *functions: Callable[[Tensor], Tensor], own: Any = torch.tanh) -> None:
        super().__init__()
        self.heads, self.own = nn.ModuleList(map(Apply, functions)), own

    def forward(self, x: Tensor) -> Tensor:
        return sum((head(x) for head in self.heads), self.own(x))


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x * 0)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_of_modules_that_share_an_input_the_right_one_is_named(at: int) -> None:
    functions = [torch.tanh] * 3
    functions[at] = root
    net = nn.Sequential(nn.Linear(4, 4), Heads(*functions), nn.Linear(4, 4))
    found = first(net, torch.ones(2, 4))
    assert (found.where, found.module) == ("backward", f"1.heads.{at}")


def test_code_that_shares_an_input_with_sound_modules_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Heads(torch.tanh, torch.sin, own=root)))
    found = first(net, torch.ones(2, 4))
    # The linear's output is also the input of what holds the heads.
    assert (found.where, found.module, found.cls) == ("backward", "1.0", "Heads")


def test_a_sequential_has_no_code_to_blame() -> None:
    class Around(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x) + root(x)
            return y

    found = first(nn.Sequential(nn.Linear(4, 4), Around(nn.Tanh())), torch.ones(2, 4))
    assert (found.where, found.module, found.cls) == ("backward", "1", "Around")


def test_code_beside_a_sound_module_is_named() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.sound = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y: Tensor = self.sound(h) + root(h)
            return y

    found = first(nn.Sequential(nn.Linear(4, 4), Beside()), torch.ones(2, 4))
    assert (found.where, found.module, found.cls) == ("backward", "1", "Beside")
    assert "in its own code after 1.linear (Linear)" in found.text


def test_finite_shares_whose_sum_overflows_are_said_to_be_summed() -> None:
    large = lambda x: x * 4e4  # noqa: E731
    net = nn.Sequential(nn.Linear(4, 4), Heads(large, large))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    finder = OverflowFinder()
    finder.watch(net)
    micro_batch(finder, net, torch.ones(2, 4), loss_of=lambda o: o.float().sum() * 1e-3)
    found = finder.find()
    assert found is not None
    assert (found.where, found.module, found.cls) == ("backward", "1", "Heads")
    assert "from 1.heads.0 (Apply), 1.heads.1 (Apply)" in found.text
    assert found.input == (INF, INF)


def test_a_loss_whose_backward_overflows_is_outside_the_model() -> None:
    found = first(
        nn.Linear(4, 4), torch.ones(2, 4), loss_of=lambda o: torch.sqrt(o.float() * 0).sum()
    )
    assert (found.where, found.module, found.cls) == ("backward", "", "loss")
    assert "gradient of the output of Linear holds nan" in found.text


def test_a_weight_gradient_that_overflows_alone_names_its_parameter() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.full((2, 4), 3e4)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[1].weight.mul_(1e-3)
    found = first(net, x, loss_of=lambda out: out.float().mean(), scale=64.0)
    # 64/8 * 3e4 * 2 rows = 4.8e5
    assert (found.where, found.module, found.cls) == ("parameter", "1", "Linear")
    assert "parameter weight of 1 (Linear)" in found.text
    assert found.input is not None
    assert 2.9e4 < found.input[0] <= found.input[1] < LIMIT
    assert found.output == (8.0, 8.0)


def test_a_sum_of_finite_gradients_that_overflows_is_found() -> None:
    finder, net = OverflowFinder(), nn.Linear(2, 1, bias=False).half()
    finder.watch(net)
    for _ in range(2):
        micro_batch(finder, net, torch.full((1, 2), 6e4).half(), loss_of=torch.sum, scale=1.0)
    found = finder.find()
    assert found is not None
    assert (found.where, found.module, found.cls) == ("parameter", "", "Linear")
    assert "when it was summed" in found.text


# Windows.


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_micro_batch_is_counted_in_its_window(at: int) -> None:
    finder, net = OverflowFinder(), nn.Sequential(nn.Linear(4, 4), Apply(torch.sqrt))
    finder.watch(net)
    for window in range(2):
        finder.new_window()
        for number in range(4):
            bad = window == 1 and number == at
            net[0].weight.data.fill_(0.0 if bad else 1.0)
            net[0].bias.data.zero_()
            micro_batch(finder, net, torch.ones(1, 4))
        found = finder.find()
        assert (found is not None) == (window == 1)
    assert found is not None
    assert (found.where, found.module, found.micro_batch) == ("backward", "1", at)


def test_a_window_without_overflow_finds_nothing() -> None:
    finder, net = (
        OverflowFinder(),
        nn.Sequential(nn.Linear(4, 4), Residual(nn.Tanh()), nn.LayerNorm(4)),
    )
    finder.watch(net)
    assert finder.find() is None
    micro_batch(finder, net, torch.randn(2, 4))
    assert finder.find() is None


def test_an_evaluation_in_between_is_not_blamed() -> None:
    finder, net = OverflowFinder(), nn.Sequential(nn.Linear(4, 4), Apply(torch.sqrt))
    finder.watch(net)
    with torch.no_grad():
        net.eval()(torch.full((1, 4), math.nan))
    net(torch.full((1, 4), math.nan))  # with gradients, but no backward follows
    with torch.no_grad():
        net.train()[0].weight.zero_()
        net[0].bias.zero_()
    micro_batch(finder, net, torch.ones(1, 4))
    found = finder.find()
    assert found is not None
    assert (found.where, found.module) == ("backward", "1")


def test_a_forward_that_raises_leaves_nothing_open() -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("data")
            return x * 4e4 * 4

    finder, net = OverflowFinder(), nn.Sequential(nn.Sequential(nn.Linear(4, 4), Fails()))
    finder.watch(net)
    with pytest.raises(KeyError, match="data"):
        net(torch.ones(1, 4))
    net[0][1].fails = False
    with torch.no_grad():
        net[0][0].weight.fill_(1.0)
    micro_batch(finder, net, torch.ones(1, 4))
    found = finder.find()
    assert found is not None
    assert (found.where, found.module, found.cls) == ("forward", "0.1", "Fails")


def test_a_frozen_part_that_overflows_is_named() -> None:
    encoder = nn.Sequential(nn.Linear(4, 4), overflowing(nn.Linear(4, 4))).requires_grad_(False)
    assert first(nn.Sequential(encoder, nn.Linear(4, 1)), torch.ones(2, 4)).module == "0.1"


def test_parameters_thawed_after_the_watch_are_seen() -> None:
    finder, net = OverflowFinder(), nn.Linear(4, 1).requires_grad_(False)
    finder.watch(net)
    net.requires_grad_(True)
    micro_batch(
        finder, net, torch.full((4, 4), 6e4), loss_of=lambda o: (o.float() * 1e-5).sum() * 1e6
    )
    found = finder.find()
    assert found is not None
    assert found.where == "parameter"
    assert "summed" not in found.text  # seen as it came, not afterwards


def test_two_models_are_told_apart_and_a_generator_is_seen_through_a_detach() -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4)), nn.ModuleList([nn.Linear(4, 1)])
    critic.forward = lambda x: critic[0](x)  # type: ignore[method-assign]
    finder = OverflowFinder()
    finder.watch(generator)
    finder.watch(critic)
    overflowing(generator[0])
    with torch.autocast("cpu", torch.float16):
        fake = generator(torch.ones(2, 4))
    micro_batch(finder, critic, fake.detach())
    found = finder.find()
    assert found is not None
    assert (found.where, found.module) == ("forward", "0")
    assert "0 (Linear) of Sequential" in found.text


def test_a_backward_reaches_forwards_of_an_earlier_window() -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4), Apply(torch.sqrt)), nn.Linear(4, 1)
    with torch.no_grad():
        generator[0].weight.zero_()
        generator[0].bias.zero_()
    finder = OverflowFinder()
    finder.watch(generator)
    finder.watch(critic)
    with torch.autocast("cpu", torch.float16):
        fake = generator(torch.ones(2, 4))
    micro_batch(finder, critic, fake.detach())
    assert finder.find() is None
    finder.new_window()
    micro_batch(finder, critic, fake)
    found = finder.find()
    assert found is not None
    assert (found.where, found.module, found.cls) == ("backward", "1", "Apply")


# Kinds of values.


@dataclasses.dataclass
class Out:
    hidden: Tensor
    extra: Any = None


@pytest.mark.parametrize(
    ("wrap", "unwrap", "path"),
    [
        (lambda x: (None, x, x * 0), lambda v: v[1], "1"),
        (lambda x: {"y": x, "z": [x * 0]}, lambda v: v["y"], "y"),
        (lambda x: Out(x, (torch.ones(1, dtype=torch.int64), x * 0)), lambda v: v.hidden, "hidden"),
    ],
    ids=["tuple", "dict", "dataclass"],
)
def test_containers_are_looked_into(wrap: Any, unwrap: Any, path: str) -> None:
    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrap(torch.where(x > 0, x, x) * 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wraps = nn.Linear(4, 4), Wraps()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = unwrap(self.wraps(self.first(x)))
            return out

    net = Outer()
    with torch.no_grad():
        net.first.weight.fill_(0.0)
        net.first.bias.fill_(4e4)
    found = first(net, torch.ones(2, 4))
    assert (found.where, found.module) == ("forward", "wraps")
    assert str(found.output) == "(nan, nan)"  # of inf * 0, beside the inf
    assert f"output {path}" in found.text


def test_odd_tensors_pass_through() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)
            self.odd = Apply(lambda x: (x, x.to(torch.complex64), x[:0], x > 0, None, "text"))

        def forward(self, ids: Tensor) -> Tensor:
            x, spectrum, *_ = self.odd(self.table(ids))
            y: Tensor = self.out(x + spectrum.abs() + spectrum.conj().real)
            return y

    net, ids = Odd(), torch.tensor([[0, 3], [3, 4]])
    finder = OverflowFinder()
    finder.watch(net)
    micro_batch(finder, net, ids)
    assert finder.find() is None
    assert net.table.weight.grad is not None
    assert net.table.weight.grad.is_sparse


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
    assert of(torch.complex(x, x * -2).conj()) == (
        min(x.min().item(), (x * 2).min().item()),
        max(x.max().item(), (x * 2).max().item()),
    )
    assert of(x.to_sparse()) == (x.min().item(), x.max().item())
    assert of(torch.ones(2).to(torch.float8_e4m3fn)) == (1.0, 1.0)
    for nothing in (torch.ones(2, dtype=torch.int64), x[:0], x.to("meta"), x > 0):
        assert of(nothing) is None


def test_float16_parameters_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    overflowing(net[0], 1.0)
    overflowing(net[1], 4e4)
    finder = OverflowFinder()
    finder.watch(net)
    loss = net(torch.ones(2, 4).half()).float().sum()
    finder.note_loss(loss)
    loss.backward()
    found = finder.find()
    assert found is not None
    assert (found.where, found.module) == ("forward", "1")


@pytest.mark.parametrize("how", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gpt2_with_and_without_checkpointing(how: bool | None, where: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if how is not None:
        for block in model.transformer.h:
            block.forward = _checkpointed(block.forward, how)
    if where == "forward":
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.fill_(3e4)
            model.transformer.h[1].mlp.c_fc.bias.fill_(6e4)
            model.transformer.h[1].ln_2.bias.fill_(1.0)
        expected = "transformer.h.1.mlp.c_fc"
    else:
        model.transformer.h[1].mlp.act = Apply(lambda x: torch.sqrt(x * 0))
        expected = "transformer.h.1.mlp.act"
    ids = torch.randint(0, 50, (2, 8))
    found = first(model, ids, loss_of=lambda o: _language_loss(o.logits, ids))
    assert (found.where, found.module) == (where, expected)


def _checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *a: forward(*a, **kwargs), *args, use_reentrant=reentrant)

    return run


def _language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_named_once_and_in_the_right_order(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: torch.sqrt(F.relu(x) * 0)))
            self.b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            for part in (self.a, self.b):
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    x = torch.ones(2, 4, requires_grad=True)
    found = first(Net(), x)
    assert (found.where, found.module, found.cls) == ("backward", "a.1", "Apply")
    net = Net()
    overflowing(net.b[0])
    found = first(net, x)
    assert (found.where, found.module) == ("forward", "b.0")


@pytest.mark.parametrize("reentrant", [True, False])
def test_code_after_a_checkpoint_is_named_by_the_module_around_it(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return root(checkpoint(self.block, x, use_reentrant=reentrant))

    x = torch.ones(2, 4, requires_grad=True)
    found = first(nn.Sequential(nn.Identity(), Net()), x)
    assert (found.where, found.module, found.cls) == ("backward", "1", "Net")
    assert "in its own code after 1.block (Linear)" in found.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_second_run_of_a_checkpoint_is_no_forward_of_its_own(reentrant: bool) -> None:
    net, runs = nn.Sequential(nn.Linear(4, 4)), []
    net[0].register_forward_pre_hook(lambda *_: runs.append(0))
    finder = OverflowFinder()
    finder.watch(net)
    x = torch.ones(2, 4, requires_grad=True)
    outer = Apply(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    finder.watch(outer)
    micro_batch(finder, outer, x)
    calls = [call for forward in finder._window.forwards for left, call in forward.events if left]
    assert len(runs) == 2
    assert [call.place.cls for call in calls] == ["Linear", "Sequential", "Apply"]


def test_a_model_that_returns_its_loss_is_named_for_code_after_its_last_layer() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            logits = self.head(x)
            return {"loss": torch.sqrt(logits.float() * 0).sum(), "logits": logits}

    found = first(WithLoss(), torch.ones(2, 4), loss_of=lambda o: o["loss"])
    assert (found.where, found.module, found.cls) == ("backward", "", "WithLoss")
    assert "in its own code after head (Linear)" in found.text
    assert found.output == (1024.0, 1024.0)  # at the loss; not what came to the logits


def test_distributed_data_parallel_is_watched_from_inside(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        finder, net = OverflowFinder(), nn.parallel.DistributedDataParallel(inner)
        finder.watch(inner)
        overflowing(inner[1])
        micro_batch(finder, net, torch.ones(2, 4))
        found = finder.find()
    finally:
        torch.distributed.destroy_process_group()
    assert found is not None
    assert found.module == "1"


# What it must not do.


class Everything(nn.Module):
    """In-place activations, dropout, a shared module, a checkpoint, a container."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.shared = nn.Linear(4, 8), nn.Linear(8, 8)
        self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(8)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.act(self.shared(self.act(self.shared(self.inp(x)))))
        x = self.drop(self.norm(checkpoint(self.shared, x, use_reentrant=False)))
        x = checkpoint(self.frozen, x, use_reentrant=True)
        return {"y": self.out(x)}


def test_training_is_the_same_bit_for_bit() -> None:
    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        net, finder = Everything(), OverflowFinder()
        if watched:
            finder.watch(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(6):
            finder.new_window()
            for _ in range(2):
                micro_batch(finder, net, torch.randn(5, 4), loss_of=lambda o: squares(o["y"]))
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.div_(1024.0)
            assert finder.find() is None
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach().clone() for t in net.state_dict().values()]

    plain, watched = train(False), train(True)
    assert any(bool(t.any()) for t in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_activations_are_freed_as_without_it() -> None:
    finder = OverflowFinder()
    alive: list[weakref.ref[Any]] = []
    keep = Apply(lambda x: alive.append(weakref.ref(y := x * 2)) or y)
    net = nn.Sequential(nn.Linear(4, 4), keep, nn.Linear(4, 4))
    finder.watch(net)
    gc.disable()
    try:
        micro_batch(finder, net, torch.ones(2, 4))
        assert len(alive) == 1
        assert alive[0]() is None
        out = net(torch.ones(2, 4))
        assert alive[1]() is not None  # the graph's
        del out
        assert alive[1]() is None
    finally:
        gc.enable()
    assert finder.find() is None


def test_an_interrupted_forward_is_forgotten_with_its_window() -> None:
    net, finder = nn.Sequential(nn.Linear(4, 4), Apply(torch.tanh)), OverflowFinder()
    finder.watch(net)

    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    net[1].function = interrupt
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(1, 4))
    net[1].function = root
    finder.new_window()
    micro_batch(finder, net, torch.ones(1, 4))
    (forward,) = finder._window.forwards
    assert [call.depth for left, call in forward.events if left] == [1, 1, 0]
    found = finder.find()
    assert found is not None
    assert (found.where, found.module) == ("backward", "1")


def test_recurrent_convolutional_and_reparametrised_modules_pass_through() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3, padding=1))
            self.norm, self.lstm = nn.BatchNorm2d(2), nn.LSTM(8, 4, batch_first=True)
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x.contiguous(memory_format=torch.channels_last)))
            packed = nn.utils.rnn.pack_padded_sequence(x.flatten(1, 2), [8, 5], batch_first=True)
            y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            out: Tensor = self.attn(y, y, y)[0]
            return out

    def train(watched: bool) -> tuple[list[Tensor], Origin | None]:
        torch.manual_seed(1)
        net, finder = Mixed(), OverflowFinder()
        if watched:
            finder.watch(net)
        x = torch.randn(2, 1, 4, 8, requires_grad=True)
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)  # a gradient penalty
        loss = out.pow(2).mean() + slope.pow(2).mean()
        finder.note_loss(loss)
        loss.backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return grads, finder.find()

    (plain, _), (watched, found) = train(False), train(True)
    assert found is None
    assert len(plain) == len(list(Mixed().parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_memory_is_bounded_where_no_boundary_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, net = OverflowFinder(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    finder.watch(net)
    with torch.no_grad():
        for _ in range(5):
            net(torch.ones(1, 4))
    assert finder._window.forwards == []
    monkeypatch.setattr(trace, "MOST", 100)
    for _ in range(50):
        net(torch.ones(1, 4))
    assert sum(forward.size for forward in finder._window.forwards) < 150
    assert len(finder._seen) <= 4
    micro_batch(finder, net, torch.ones(1, 4))
    reached = [forward for forward in finder._window.forwards if forward.got_gradient]
    for _ in range(50):
        net(torch.ones(1, 4))
    assert reached[0] in finder._window.forwards  # those with a backward go last


def test_nothing_is_read_before_find_and_then_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

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
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(40)], overflowing(nn.Linear(4, 4)))
    finder = OverflowFinder()
    finder.watch(net)
    with Reads() as reads:
        for _ in range(4):
            micro_batch(finder, net, torch.ones(2, 4))
    synchronising = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item")
    assert any("aminmax" in name for name in reads.names)
    assert [n for n in reads.names if any(f"aten.{s}." in n for s in synchronising)] == []
    assert lists == []
    found = finder.find()
    assert found is not None
    assert found.module == "40"
    assert len(lists) == 2  # the window's, and the weights of the module that was found
    assert lists[0] > 1000


def test_parameters_whose_update_is_due_are_not_waited_for() -> None:
    class Detached(nn.Module):
        """Uses its weight through an input, as a parametrization does; or not at all."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.inner = Apply(lambda x: x["x"] * 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner({"x": x, "weight": self.weight})
            return y

    net, finder = Detached(), OverflowFinder()
    waits: list[int] = []
    hold = ParameterHold([net.weight], [1], {id(net.weight): 1}, lambda n: waits.append(n) or n)
    finder.watch(net)
    x = torch.ones(2, 4, requires_grad=True)
    micro_batch(finder, net, x)
    assert type(net.weight) is PendingParameter
    assert waits == []
    hold.release()


def test_watching_twice_is_watching_once_and_close_removes_everything() -> None:
    def hooks(net: nn.Module) -> int:
        own = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
            for m in net.modules()
        )
        return own + sum(len(p._backward_hooks or ()) for p in net.parameters())

    net, finder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), OverflowFinder()
    finder.watch(net)
    once = hooks(net)
    assert once == 3 * 3 + 4
    finder.watch(net)
    assert hooks(net) == once
    out = net(torch.ones(1, 4))
    finder.close()
    finder.close()
    assert hooks(net) == 0
    (out * math.nan).sum().backward()  # hooks on its graph find nobody
    net.zero_grad()
    net(torch.full((1, 4), math.nan)).sum().backward()
    assert finder.find() is None


def test_modules_added_later_are_watched_by_a_second_call() -> None:
    net, finder = nn.Sequential(nn.Linear(4, 4)), OverflowFinder()
    finder.watch(net)
    net.append(overflowing(nn.Linear(4, 4)))
    finder.watch(net)
    micro_batch(finder, net, torch.ones(1, 4))
    found = finder.find()
    assert found is not None
    assert found.module == "1"


def test_copies_and_pickles_of_a_watched_model_are_free_of_it(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=5, bos_token_id=0, eos_token_id=0)
    net, finder = GPT2Model(config), OverflowFinder()
    finder.watch(net)
    ids = torch.tensor([[1, 2]])
    micro_batch(finder, net, ids, loss_of=lambda o: squares(o.last_hidden_state))
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(buffer, weights_only=False),
    ]
    net.save_pretrained(tmp_path)
    copies.append(GPT2Model.from_pretrained(tmp_path))
    finder.new_window()
    for each in copies:
        each(ids).last_hidden_state.sum().backward()
    assert finder._window.forwards == []
    assert len(finder._window.parameter_gradients) == 0
    for key, value in net.state_dict().items():
        assert torch.equal(copies[3].state_dict()[key], value)


@before_torch(2, 7, "torch 2.6: its compiler fails in itself, with SystemError, after other tests")
@pytest.mark.parametrize("inner", [True, False])
def test_a_compiled_model_is_warned_about_and_its_graph_stays_whole(inner: bool) -> None:
    net, finder = nn.Sequential(nn.Linear(4, 4), overflowing(nn.Linear(4, 4))), OverflowFinder()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    if inner:  # as unwrap_model gives it: nothing shows that it is compiled
        finder.watch(net)
    else:
        with pytest.warns(UserWarning, match="cannot see into compiled"):
            finder.watch(compiled)
    micro_batch(finder, compiled, torch.ones(1, 4))
    found = finder.find()
    torch._dynamo.reset()
    assert found is not None
    assert found.where in ({"loss"} if inner else {"forward", "loss"})
    finder.new_window()
    loss = compiled(torch.ones(1, 4)).sum() * 0
    (loss / loss).backward()
    found = finder.find()
    assert found is not None
    assert found.where in ("parameter", "backward")


def test_an_uncompiled_model_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OverflowFinder().watch(nn.Sequential(nn.Linear(2, 2)))


def test_transforms_and_scripts_go_unseen_and_unharmed() -> None:
    net, finder = nn.Linear(4, 1), OverflowFinder()
    finder.watch(net)
    params = dict(net.named_parameters())

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).sum()

    x = torch.ones(3, 4)
    per_sample = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(params, x)
    assert torch.equal(per_sample["weight"], x[:, None])
    assert torch.equal(torch.jit.trace(net, x)(x), net(x))
    assert finder.find() is None
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match="scripted"):
        finder.watch(script)
    script(torch.ones(1, 2)).sum().backward()


def test_a_first_goes_to_strict_json() -> None:
    made = Origin("forward", "a.b", "Linear", 2, (-1.5, 2.0), (-INF, INF), "text")
    assert json.dumps(made.as_json(), allow_nan=False) == (
        '{"where": "forward", "module": "a.b", "class": "Linear", "micro_batch": 2, '
        '"input": [-1.5, 2.0], "output": ["-inf", "inf"], "text": "text"}'
    )
    nan = Origin("loss", "", "float16", 0, None, (math.nan, math.nan), "text").as_json()
    assert (nan["input"], nan["output"]) == (None, ["nan", "nan"])
