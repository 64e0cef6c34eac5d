"""Reads that torch does not pass to ``__torch_function__``: each sees the update in flight.

``test_pending_parameter.py`` has the reads that torch does pass (numpy, storage, copies, ...), and
``test_compiled_modules.py`` compiled code. The worker is ``lazy``: it updates a part when somebody
waits for it, so that a read which does not wait surely gets the value before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from async_support import assert_same, lazy
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, StepError
from accel_scaler.async_optimizer.pending_parameter import PendingParameter
from accel_scaler.optimizer_step.replica import Replica

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:torch.asarray"),
]


class Scaled(nn.Module):
    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.w = p

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def functional_call(p: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor]) -> Tensor:
        inner = nn.Linear(3, 2, bias=False)
        return torch.func.functional_call(inner, params, (torch.ones(1, 3),)).square().sum()

    return torch.func.grad(loss)({"weight": p})["weight"]


def collective(p: Tensor) -> Tensor:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gathered = [torch.zeros(2, 3)]
        dist.all_gather(gathered, p.requires_grad_(False))
        return gathered[0]
    finally:
        dist.destroy_process_group()


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


READS: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p),
    "FloatTensor": lambda p: torch.FloatTensor(p),
    "as_tensor": lambda p: torch.as_tensor(p),
    "asarray": lambda p: torch.asarray(p),
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "set_ of its own": lambda p: p.requires_grad_(False).set_(torch.ones(2)),
    "set_": lambda p: torch.zeros(1).set_(p.requires_grad_(False)),
    "to_dlpack": lambda p: torch.from_dlpack(torch.to_dlpack(p.requires_grad_(False))),
    "nn.Parameter": lambda p: nn.Parameter(p.data),
    "nn.Buffer": lambda p: nn.Buffer(p.requires_grad_(False)),
    "a scripted function": lambda p: torch.jit.script(nn.functional.softsign)(p),
    "a traced function": lambda p: torch.jit.trace(lambda x: x * 2, torch.ones(2, 3))(p),
    "scripting a module": lambda p: torch.jit.script(Scaled(p))(torch.ones(2, 3)),
    "grad": lambda p: torch.func.grad(square)(p),
    "grad of a tree": lambda p: torch.func.grad(lambda d: square(d["a"][0]))({"a": [p]})["a"][0],
    "grad around it": lambda p: torch.func.grad(lambda x: (x * p * p).sum())(torch.ones(2, 3)),
    "vjp": lambda p: torch.func.vjp(torch.sin, p)[0],
    "jacfwd": lambda p: torch.func.jacfwd(lambda x: (x * x).sum(0))(p),
    "functionalize": lambda p: torch.func.functionalize(lambda x: x + 1)(p),
    "vmap": lambda p: torch.func.vmap(lambda x: x * 2)(p),
    "functional_call": functional_call,
    "stack_module_state": lambda p: torch.func.stack_module_state([Scaled(p)])[0]["w"],
    "flatten_dense_tensors": lambda p: torch._C._nn.flatten_dense_tensors([p]),
    "a collective": collective,
    "isinstance": lambda p: (isinstance(p, Tensor), isinstance(p, nn.Parameter)),
    "its own __class__": lambda p: issubclass(p.__class__, nn.Parameter),
    "its __dict__": lambda p: p.__dict__,
}
"""``test_pending_gradients.py`` reads gradients in these ways, too."""


@pytest.mark.parametrize("name", READS)
def test_a_read_in_overlap_sees_the_newest_value(name: str) -> None:
    p, expected = nn.Parameter(torch.zeros(2, 3)), READS[name](nn.Parameter(torch.ones(2, 3)))
    with lazy(), AsyncOptimizer(torch.optim.SGD([p], lr=0.5), step_mode="overlap") as optimizer:
        p.grad = torch.full((2, 3), -2.0)
        optimizer.step()
        assert type(p) is PendingParameter
        found = READS[name](p)
        assert type(p) is nn.Parameter
        assert type(found) is type(expected)
        assert_same(found, expected)
        assert getattr(found, "requires_grad", None) == getattr(expected, "requires_grad", None)


def test_a_failed_wait_is_raised_where_torch_asks_for_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("lost")

    monkeypatch.setattr(Replica, "step_part", fail)
    for name in ("torch.tensor", "a scripted function", "grad", "isinstance"):
        p = nn.Parameter(torch.ones(2, 3))
        with AsyncOptimizer(torch.optim.SGD([p], lr=0.5)) as optimizer:
            p.grad = torch.ones(2, 3)
            optimizer.step()
            with pytest.raises(StepError, match="lost"):
                READS[name](p)


# An evaluation waits for all of them at once.


class WithView(nn.Linear):
    """It reads its weight through a view from before the training."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept = self.weight.detach().t()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.is_grad_enabled() and self.training else x @ self.kept


def encoder() -> nn.Module:
    """In an evaluation torch runs it by a kernel of its own, which asks for plain tensors."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(
    ("trains", "context"),
    [(False, nullcontext), (False, torch.no_grad), (True, torch.no_grad)],
    ids=["eval", "eval, no_grad", "no_grad"],
)
@pytest.mark.parametrize("make", [WithView, encoder])
def test_an_evaluation_is_that_of_a_plain_loop(
    make: Callable[[], nn.Module], trains: bool, context: Callable[[], Any]
) -> None:
    def run(is_ours: bool) -> Tensor:
        torch.manual_seed(0)
        model, x = make(), torch.randn(2, 3, 8)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = AsyncOptimizer(sgd, model, step_mode="overlap") if is_ours else sgd
        model(x).square().sum().backward()
        optimizer.step()
        model.train(trains)
        with context():
            found: Tensor = model(x).detach().clone()
        if isinstance(optimizer, AsyncOptimizer):
            optimizer.close()
        assert not any(m._forward_pre_hooks for m in model.modules())
        return found

    with lazy():
        found = run(True)
    assert torch.equal(found, run(False))


# A backward reads the parameters that its forward has saved.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_gradient_may_still_be_needed_by_a_backward(dtype: Any) -> None:
    used, unused = nn.Linear(4, 1, dtype=dtype), nn.Linear(4, 1, dtype=dtype)
    params = [*used.parameters(), *unused.parameters()]
    with AsyncOptimizer(torch.optim.SGD(params, lr=0.5), step_mode="overlap") as optimizer:
        x = torch.ones(1, 4, dtype=dtype, requires_grad=True)
        later = unused(x).sum()
        used(x.detach()).sum().backward()
        optimizer.step()
        later.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, unused.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_through_what_a_step_has_changed_is_refused_as_in_torch(dtype: Any) -> None:
    layer = nn.Linear(4, 1, dtype=dtype)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
    with AsyncOptimizer(sgd, step_mode="overlap") as optimizer:
        later = layer(torch.ones(1, 4, dtype=dtype, requires_grad=True)).square().sum()
        layer.weight.grad = torch.ones(1, 4, dtype=dtype)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()
