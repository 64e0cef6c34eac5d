"""A parameter whose update still runs: every use of it waits, what reads no element does not."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import StepError
from accel_scaler.async_optimizer.pending_parameter import PendingParameter, hold, release

BEFORE, AFTER = 1.0, 3.0


class Source:
    """A parameter whose update happens when somebody waits for it."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.full((2, 3), BEFORE))]
        self.memory, self.waits = self.params[0].detach(), 0
        self.errors: list[BaseException] = []
        self.ref = weakref.ref(self)
        hold(self.params, self.ref)

    def wait_for(self, t: Tensor) -> None:
        if self.errors:
            raise self.errors.pop()
        self.waits += 1
        self.memory.fill_(AFTER)
        release([t], self.ref)

    @property
    def is_pending(self) -> bool:
        return type(self.params[0]) is PendingParameter


def fresh() -> Tensor:
    """What a use sees that does not know of any update."""
    return nn.Parameter(torch.full((2, 3), AFTER))


def in_place(p: Tensor) -> Tensor:
    with torch.no_grad():
        return p.add_(1.0)


def written_element(p: Tensor) -> Tensor:
    with torch.no_grad():
        p[0, 1] = 7.0
    return p.detach()


def as_out(p: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(p, 1.0, out=p)
    return p.detach()


def foreach(p: Tensor) -> Tensor:
    with torch.no_grad():
        return torch._foreach_mul([torch.ones(2, 3), p], 2.0)[1]


def saved(p: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"w": [p]}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"][0]


def gradient_of_square(p: Tensor) -> Tensor:
    (p * p).sum().backward()
    assert p.grad is not None
    return p.grad


def data_set(p: Tensor) -> Tensor:
    old = p.data
    p.data = torch.zeros(1)
    return old


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:  # type: ignore[override]
        return p * 2


def alias(p: Tensor) -> Tensor:
    """A view taken while the update is due is a view of the memory after it."""
    return p.detach().view(-1)[1:]


USES: dict[str, Callable[[Any], Any]] = {
    "an operator": lambda p: p + 1,
    "a function": lambda p: torch.exp(p),
    "a keyword": lambda p: nn.functional.linear(input=torch.ones(1, 3), weight=p),
    "a list": lambda p: torch.cat([torch.zeros(1, 3), p]),
    "an iterator": lambda p: torch.cat(tuple(t for t in (p, p))),
    "foreach": foreach,
    "out=": as_out,
    "in place": in_place,
    "setitem": written_element,
    "iteration": lambda p: next(iter(p)),
    "a view": lambda p: p.view(3, 2),
    "an alias": alias,
    "data": lambda p: p.data,
    "data set": data_set,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to another type": lambda p: p.to(torch.float64),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "__array__": lambda p: torch.from_numpy(p.requires_grad_(False).__array__()),
    "dlpack": lambda p: torch.from_dlpack(p.requires_grad_(False)),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "repr": repr,
    "norm": lambda p: torch.linalg.vector_norm(p),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved,
    "backward": gradient_of_square,
    "storage": lambda p: list(p.untyped_storage()),
    "jvp": lambda p: torch.func.jvp(torch.sin, (p.detach(),), (torch.ones(2, 3),))[1],
    "an autograd function": lambda p: Double.apply(p),
    "vmap, not mapped over": lambda p: torch.func.vmap(lambda x: x * p)(torch.ones(4, 2, 3)),
    "functional_call": lambda p: torch.func.functional_call(
        nn.Linear(3, 2, bias=False), {"weight": p}, (torch.ones(1, 3),)
    ),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(
        torch.mul, p, torch.ones(2, 3), use_reentrant=False
    ),
}


def plain(result: Any) -> Any:
    return result.detach().clone() if isinstance(result, Tensor) else result


def problem_with(use: Callable[[Any], Any]) -> str | None:
    source = Source()
    (p,) = source.params
    result, expected = use(p), use(fresh())
    if source.waits != 1 or type(p) is not nn.Parameter:
        release([p], source.ref)
        return f"waited {source.waits} times"
    if isinstance(expected, Tensor):
        same = torch.equal(plain(result), plain(expected)) and type(result) is type(expected)
    else:
        same = result == expected
    return None if same else f"got {result}, expected {expected}"


def test_every_use_waits_once_and_sees_the_value_after_the_update() -> None:
    problems = {name: problem_with(use) for name, use in USES.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def assigned_grad(p: Tensor) -> None:
    p.grad = torch.zeros(2, 3)
    assert p.grad is not None
    p.grad = None


def zeroed(p: Tensor) -> None:
    p.grad = torch.ones(2, 3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.param_groups[0]["params"] = [p]
    optimizer.zero_grad()
    assert p.grad is None


def clipped(p: Tensor) -> None:
    p.grad = torch.ones(2, 3)
    torch.nn.utils.clip_grad_norm_([p], 1.0)


PASSIVE: dict[str, Callable[[Any], Any]] = {
    "size": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.numel()),
    "type": lambda p: (p.dtype, p.device, p.is_floating_point(), p.requires_grad),
    "grad": assigned_grad,
    "zero_grad": zeroed,
    "clip_grad_norm_": clipped,
    "hash": lambda p: len({p, p}),
    "identity": lambda p: p is not None,
}


def test_what_reads_no_element_does_not_wait() -> None:
    waited = {}
    for name, use in PASSIVE.items():
        source = Source()
        assert use(source.params[0]) == use(nn.Parameter(torch.full((2, 3), BEFORE))), name
        if source.waits or not source.is_pending:
            waited[name] = source.waits
        assert source.params[0].sum() == 6 * AFTER
    assert waited == {}


def test_a_wait_that_fails_or_is_interrupted_leaves_the_parameter_pending() -> None:
    source = Source()
    source.errors += [StepError("lost"), KeyboardInterrupt()]
    for kind in (KeyboardInterrupt, StepError):
        with pytest.raises(kind):
            source.params[0] + 1
        assert source.is_pending
    assert torch.equal(source.params[0] + 0, torch.full((2, 3), AFTER))
    assert not source.is_pending


def test_a_step_that_is_gone_is_not_waited_for_and_keeps_no_parameter() -> None:
    source = Source()
    (p,) = source.params
    ref = weakref.ref(p)
    del source
    gc.collect()
    assert p.tolist() == [[BEFORE] * 3] * 2
    assert type(p) is nn.Parameter
    assert not vars(p)
    del p
    gc.collect()
    assert ref() is None
