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
from accel_scaler.async_optimizer.pending_parameter import ParameterHold, PendingParameter

BEFORE, AFTER = 1.0, 3.0


class Source:
    """Parameters, one part each, whose update happens when somebody waits for it."""

    def __init__(self, count: int = 1, dtype: Any = None) -> None:
        self.params = [nn.Parameter(torch.full((2, 3), BEFORE, dtype=dtype)) for _ in range(count)]
        self.waited: list[int] = []
        self.errors: list[BaseException] = []
        self.memory = [p.detach() for p in self.params]
        self.hold = ParameterHold(
            self.params,
            list(range(1, count + 1)),
            {id(p): place for place, p in enumerate(self.params, 1)},
            self.wait,
        )

    def wait(self, parts: int) -> int:
        if self.errors:
            raise self.errors.pop()
        self.waited.append(parts)
        for memory in self.memory[:parts]:
            memory.fill_(AFTER)
        return parts

    @property
    def pending(self) -> list[bool]:
        return [type(p) is PendingParameter for p in self.params]


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
    if source.waited != [1] or type(p) is not nn.Parameter:
        source.hold.release()
        return f"waited for {source.waited}"
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
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is not None
    assert not p.grad.any()


def clipped(p: Tensor) -> None:
    p.grad = torch.ones(2, 3)
    torch.nn.utils.clip_grad_norm_([p], 1.0)


PASSIVE: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), p.dim(), p.ndim, len(p)),
    "numel": lambda p: (p.numel(), p.nelement(), p.element_size(), p.nbytes, p.itemsize),
    "dtype": lambda p: (p.dtype, p.device, p.layout, p.is_floating_point(), p.is_complex()),
    "strides": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset()),
    "requires_grad": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p._version),
    "frozen": lambda p: p.requires_grad_(False).requires_grad,
    "where it is": lambda p: (p.is_cuda, p.is_sparse, p.is_meta, p.get_device()),
    "grad": assigned_grad,
    "zero_grad": zeroed,
    "clip_grad_norm_": clipped,
    "hook": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove(),
    "hash": lambda p: len({p, p}),
    "identity": lambda p: p is not None,
}


def test_what_reads_no_element_does_not_wait() -> None:
    waited = {}
    for name, use in PASSIVE.items():
        source = Source()
        assert use(source.params[0]) == use(nn.Parameter(torch.full((2, 3), BEFORE))), name
        if source.waited or source.pending != [True]:
            waited[name] = source.waited
        assert source.params[0].sum() == 6 * AFTER
    assert waited == {}


def test_one_use_waits_only_for_the_parts_it_needs_and_frees_those_that_are_done() -> None:
    source = Source(4)
    source.params[1] + 1
    assert source.waited == [2]
    assert source.pending == [False, False, True, True]
    source.params[0] + 1
    assert source.waited == [2], "a parameter that is ready costs nothing"
    torch.cat([source.params[3], source.params[2]])
    assert source.waited == [2, 4]
    assert source.pending == [False] * 4


def test_a_failed_wait_is_raised_at_every_use_until_the_hold_is_released() -> None:
    source = Source(3)
    source.errors += [StepError("lost"), StepError("lost")]
    for p in source.params[:2]:
        with pytest.raises(StepError, match="lost"):
            p + 1
    assert source.pending == [True] * 3
    source.hold.release()
    assert source.pending == [False] * 3
    assert torch.equal(source.params[0] + 0, torch.full((2, 3), BEFORE))


def test_a_wait_that_is_interrupted_leaves_the_parameters_pending() -> None:
    source = Source(2)
    source.errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        source.params[1] + 1
    assert source.pending == [True, True]
    assert torch.equal(source.params[1] + 0, torch.full((2, 3), AFTER))
    assert source.pending == [False, False]


def test_a_parameter_of_two_steps_waits_for_both() -> None:
    source, other = Source(), list[int]()
    (p,) = source.params

    def wait(parts: int) -> int:
        other.append(parts)
        return parts

    hold = ParameterHold([p], [1], {id(p): 1}, wait)
    assert source.waited == [1]
    assert torch.equal(p + 0, torch.full((2, 3), AFTER))
    assert (source.waited, other) == ([1], [1])
    hold.release()


def test_a_released_or_dropped_hold_leaves_plain_parameters_and_keeps_none() -> None:
    source = Source(2)
    refs = [weakref.ref(p) for p in source.params]
    released, dropped = source.params
    source.hold.release(1)
    del source.hold
    gc.collect()
    assert (dropped.tolist(), source.waited) == ([[BEFORE] * 3] * 2, [])
    for p in (released, dropped):
        assert type(p) is nn.Parameter
        assert not vars(p)
    del source, released, dropped, p
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
