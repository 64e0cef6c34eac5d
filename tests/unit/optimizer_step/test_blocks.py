"""Masters stepped block by block beside torch's own kernels over whole tensors, bit for bit.

Blocks are cut small here, so that every history has whole parameters, pieces of one, and blocks of
several.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import same
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer
from accel_scaler.config import StepMode
from accel_scaler.optimizer_step import blocks

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
SHAPES = (5,), (3, 7), (129,), (16, 40), (), (0,), (33, 1), (2, 3, 3, 3), (1000,)
STEPS = 6

Make = Callable[[Any], torch.optim.Optimizer]
FUSED: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, weight_decay=0.1, amsgrad=True, fused=True),
    "maximize": lambda ps: torch.optim.AdamW(ps, lr=0.05, maximize=True, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, fused=True),
    "momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.05, momentum=0.9, dampening=0.25, weight_decay=0.1, fused=True
    ),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, fused=True),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "block_length", lambda _: 64)


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Of all shapes, in turn of these dtypes; the one of four dimensions is laid out otherwise."""
    torch.manual_seed(0)
    made = [torch.randn(shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
    return [
        nn.Parameter(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t) for t in made
    ]


LATE = {(1, 0), (2, 0)}
"""Parameter and step without a gradient, where torch's fused SGD needs one for all or none."""
MISSING = {(3, 2), (6, 3)}


def gradients(
    params: list[nn.Parameter], step: int, missing: set[tuple[int, int]]
) -> list[Tensor | None]:
    """Some are missing in some steps; that of four dimensions is laid out unlike its parameter."""
    generator = torch.Generator().manual_seed(step)
    found: list[Tensor | None] = []
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        found.append(None if (i, step) in missing else grad)
    return found


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]


class Whole:
    """torch's optimizer over float32 copies, each with a gradient of its own memory."""

    def __init__(self, kind: str, *dtypes: torch.dtype) -> None:
        self.missing = MISSING | (LATE if "ada" in kind else set())
        self.params = parameters(*dtypes)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = FUSED[kind](groups(self.masters))

    def gradients(self, step: int) -> list[Tensor | None]:
        return gradients(self.params, step, self.missing)

    def step(self, number: int) -> None:
        for master, grad in zip(self.masters, self.gradients(number), strict=True):
            # torch's fused kernels ignore how a gradient is laid out.
            master.grad = None if grad is None else torch.empty_like(master).copy_(grad)
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master.data)

    @property
    def state(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.state[master]) for master in self.masters]


def assert_equal(params: list[nn.Parameter], inner: torch.optim.Optimizer, whole: Whole) -> None:
    for i, (p, other) in enumerate(zip(params, whole.params, strict=True)):
        assert same(p, other), f"parameter {i}"
    for i, (p, entry) in enumerate(zip(params, whole.state, strict=True)):
        mine = inner.state.get(p, {})
        assert {k for k, v in mine.items() if v is not None} >= set(entry)
        for key, value in entry.items():
            assert mine[key] is None if value is None else same(mine[key], value), (i, key)


@pytest.mark.parametrize(
    ("mode", "dtypes"),
    [("sync", (HALF,)), ("overlap", (FULL,)), ("overlap", (HALF, FULL, BRAIN))],
    ids=["16", "32", "mixed"],
)
@pytest.mark.parametrize("kind", FUSED)
def test_blocks_give_the_numbers_of_whole_tensors(
    kind: str, dtypes: tuple[torch.dtype, ...], mode: StepMode
) -> None:
    params, whole = parameters(*dtypes), Whole(kind, *dtypes)
    inner = FUSED[kind](groups(params))
    with AsyncOptimizer(inner, step_mode=mode, master_weights="fp32") as optimizer:
        for step in range(STEPS):
            for p, grad in zip(params, whole.gradients(step), strict=True):
                p.grad = grad
            optimizer.step()
            whole.step(step)
            optimizer.synchronize()
            assert_equal(params, inner, whole)


@pytest.fixture
def trained() -> Iterator[tuple[list[nn.Parameter], torch.optim.Optimizer, Any]]:
    """Two steps of AdamW on float16 weights, all with gradients."""
    params = parameters(HALF)
    inner = FUSED["adamw"](groups(params))
    with AsyncOptimizer(inner, step_mode="sync", master_weights="fp32") as optimizer:

        def step(number: int) -> None:
            for p, grad in zip(params, gradients(params, 100 + number, set()), strict=True):
                p.grad = grad
            optimizer.step()

        for number in range(2):
            step(number)
        yield params, inner, step


def test_a_state_dict_is_no_views_of_a_larger_memory(trained: Any) -> None:
    _, inner, _ = trained
    ordered = [p for group in inner.param_groups for p in group["params"]]
    for p, entry in zip(ordered, inner.state_dict()["state"].values(), strict=True):
        assert entry["exp_avg"].data_ptr() == inner.state[p]["exp_avg"].data_ptr()  # no copy
        for value in entry.values():
            assert value.untyped_storage().nbytes() == value.nbytes
            file = io.BytesIO()
            torch.save(value, file)
            assert file.tell() < value.nbytes + 2000


def test_state_unlike_a_fused_kernel_s_is_stepped_by_the_optimizer_itself(trained: Any) -> None:
    params, inner, step = trained
    inner.state[params[3]]["exp_avg"] = None
    with pytest.raises(Exception, match=r"NoneType|exp_avg|Tensor"):
        step(2)


def test_the_kernel_is_called_once_a_block(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params, _, step = trained
    sizes: list[int] = []
    kernel = torch._fused_adamw_

    def counted(masters: list[Tensor], *rest: Any, **settings: Any) -> None:
        sizes.append(sum(map(Tensor.numel, masters)))
        kernel(masters, *rest, **settings)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    step(2)
    assert sum(sizes) == sum(map(Tensor.numel, params))
    assert max(sizes) <= 64
    assert len(sizes) < sum(p.numel() for p in params) / 64 + len(params)


def test_memory_that_cannot_be_had_is_an_error_before_anything_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zeros = torch.zeros

    def refusing(size: Any, *rest: Any, **settings: Any) -> Tensor:
        if size == 1 << 20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(size, *rest, **settings)

    params = [nn.Parameter(torch.ones(1 << 20, dtype=HALF))]
    inner = FUSED["adamw"](params)
    monkeypatch.setattr(torch, "zeros", refusing)
    with pytest.raises(RuntimeError, match="can't allocate"):
        AsyncOptimizer(inner)
    assert inner.state == {}
    assert "step" not in vars(inner)


def edited(make: Make, edits: dict[int, Callable[[Any, Any], None]], **options: Any) -> list[Any]:
    """Parameters and state after steps before which the optimizer's state was edited."""
    params = parameters(FULL)
    optimizer = make(params)
    used: Any = AsyncOptimizer(optimizer, **options) if options else optimizer
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for p in params:  # torch's kernel needs them laid out alike
            grad = torch.randn(p.shape, generator=generator)
            p.grad = torch.empty_like(p, requires_grad=False).copy_(grad)
        if options:
            used.synchronize()
        edits.get(step, lambda optimizer, params: None)(optimizer, params)
        used.step()
    if options:
        used.close()
    return [p.detach() for p in params] + [
        value for p in params for _, value in sorted(optimizer.state[p].items())
    ]


def take_out(optimizer: Any, params: Any) -> None:
    optimizer.taken = {p: dict(optimizer.state[p]) for p in params}
    for p in params[::2]:
        optimizer.state[p] = {}
    for p in params[1::2]:
        optimizer.state[p].clear()


def put_back(optimizer: Any, params: Any) -> None:
    optimizer.state.update(optimizer.taken)


def take_one_out(optimizer: Any, params: Any) -> None:
    optimizer.taken = {params[3]: optimizer.state[params[3]]}
    optimizer.state[params[3]] = {
        k: torch.zeros_like(v) for k, v in optimizer.state[params[3]].items()
    }


def assign_data(optimizer: Any, params: Any) -> None:
    for entry in optimizer.state.values():
        for value in entry.values():
            value.data = value.data * 0.5


EDITS: dict[str, dict[int, Callable[[Any, Any], None]]] = {
    "taken out": {2: take_out, 4: put_back},
    "one taken out": {2: take_one_out, 4: put_back},
    "data": {2: assign_data},
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("kind", ["adam", "momentum"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_state_that_was_replaced_stays_as_it_was(name: str, kind: str, mode: str) -> None:
    expected = edited(FUSED[kind], EDITS[name])
    got = edited(FUSED[kind], EDITS[name], step_mode=mode)
    assert len(got) == len(expected)
    assert all(map(same, got, expected))
