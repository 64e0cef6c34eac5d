"""Bad input of the asynchronous optimizer: a clear error or the right result, nothing lost."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import (
    AsyncOptimizer,
    ConfigError,
    GradScaler,
    OrderError,
    UnsupportedError,
)
from accel_scaler.config import StepMode
from accel_scaler.optimizer_step.stepper import async_stepper_of

pytestmark = pytest.mark.usefixtures("one_thread")

LR = 0.5
MODES = ["sync", "overlap"]


def one(value: float = 1.0, size: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.full((size,), value))


def sgd(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, **kwargs)


def give(p: Tensor, value: float = 1.0) -> None:
    p.grad = torch.full_like(p, value)


class Sam(torch.optim.Optimizer):
    """Holds another optimizer, as SAM and Lookahead do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=LR)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: AsyncOptimizer(None), ConfigError, "got a NoneType"),  # type: ignore[arg-type]
    "parameters": (
        lambda: AsyncOptimizer([one()]),  # type: ignore[arg-type]
        ConfigError,
        "got a list, expected a torch optimizer",
    ),
    "no model": (lambda: AsyncOptimizer(sgd([one()]), one()), ConfigError, "torch.nn.Module"),  # type: ignore[arg-type]
    "another model": (
        lambda: AsyncOptimizer(sgd([one()]), nn.Linear(2, 2)),
        ConfigError,
        "Linear has none of the optimizer's 1 parameters",
    ),
    "torch's scaler": (
        lambda: AsyncOptimizer(sgd([one()]), scaler=torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
        ConfigError,
        "expected our GradScaler",
    ),
    "a mode": (lambda: AsyncOptimizer(sgd([one()]), step_mode="later"), ConfigError, "'later'"),
    "a setting of the scale": (
        lambda: AsyncOptimizer(sgd([one()]), init_scale=2.0),  # type: ignore[call-arg]
        ConfigError,
        "arguments of GradScaler",
    ),
    "no parameters": (lambda: AsyncOptimizer(sgd([{"params": []}])), ConfigError, "no parameters"),
    "LBFGS": (lambda: AsyncOptimizer(torch.optim.LBFGS([one()])), UnsupportedError, "closure"),
    "SAM": (
        lambda: AsyncOptimizer(Sam([one()])),
        UnsupportedError,
        "not among the optimizers of torch",
    ),
}


def test_wrong_arguments_are_named_and_leave_nothing_behind() -> None:
    for name, (make, kind, text) in WRONG.items():
        with pytest.raises(kind, match=text):
            make()
        assert not any("accel_scaler" in t.name for t in threading.enumerate()), name


@pytest.mark.parametrize("where", ["register_load_state_dict_pre_hook", "parameters", "manage"])
def test_whatever_ends_the_making_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C, or a foreign optimizer's own error: stepped as by torch then, and wrapped again."""
    model, scaler = nn.Linear(4, 1), GradScaler("cpu", init_scale=4.0)
    inner = sgd(model.parameters())
    before = {key: len(value) for key, value in vars(inner).items() if "hooks" in key}
    holders = (torch.optim.Optimizer, model, scaler)
    holder: Any = next(each for each in holders if hasattr(each, where))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(holder, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        AsyncOptimizer(inner, model, scaler=scaler, sharded=True)
    monkeypatch.undo()
    assert async_stepper_of(inner) is None
    assert {key: len(value) for key, value in vars(inner).items() if "hooks" in key} == before
    assert not scaler.managed
    assert not scaler.ranks.sharded
    AsyncOptimizer(inner, model, scaler=scaler).close()


@pytest.mark.parametrize("second", [AsyncOptimizer, lambda o: AsyncOptimizer(o, step_mode="sync")])
def test_one_optimizer_is_wrapped_once_at_a_time(second: Callable[[Any], Any]) -> None:
    w = one()
    inner = sgd([w])
    with AsyncOptimizer(inner) as optimizer:
        with pytest.raises(OrderError, match=r"already; close\(\) or detach\(\)"):
            second(inner)
        with pytest.raises(ConfigError, match="AsyncOptimizer"):
            second(optimizer)
        give(w)
        optimizer.step()
    assert torch.equal(w, torch.full((4,), 0.5))
    assert async_stepper_of(inner) is None
    with second(inner) as again:
        give(w)
        again.step()
    assert torch.equal(w, torch.zeros(4))


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_runs_first_and_its_loss_is_returned(mode: StepMode) -> None:
    w = one()

    def closure() -> float:
        give(w)
        return 3.0

    with AsyncOptimizer(sgd([w]), step_mode=mode) as optimizer:
        assert optimizer.step(closure) == 3.0
    assert torch.equal(w, torch.full((4,), 0.5))


@pytest.mark.parametrize("mode", MODES)
def test_after_close_step_is_refused_and_the_plain_optimizer_goes_on(mode: StepMode) -> None:
    w, plain = one(), one()
    inner, reference = sgd([w], momentum=0.9), sgd([plain], momentum=0.9)
    optimizer = AsyncOptimizer(inner, step_mode=mode)
    for step in range(3):
        for p in (w, plain):
            give(p, 1.0 + step)
        if step == 1:
            optimizer.close()
            calls = (
                optimizer.step,
                lambda: optimizer.clip_grad_norm_(1.0),
                lambda: optimizer.submit(lambda: None),
            )
            for call in calls:
                with pytest.raises(OrderError, match="closed"):
                    call()
            optimizer.close()
            optimizer.synchronize()
        (inner if step else optimizer).step()
        reference.step()
    assert torch.equal(w, plain)
    assert torch.equal(inner.state[w]["momentum_buffer"], reference.state[plain]["momentum_buffer"])
    assert optimizer.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_gradients_or_without_a_window_loses_nothing(mode: StepMode) -> None:
    w, scaler = one(), GradScaler("cpu", init_scale=4.0)
    with AsyncOptimizer(sgd([w]), scaler=scaler, step_mode=mode) as optimizer:
        optimizer.step()
        give(w)
        with pytest.raises(OrderError, match="no loss was scaled"):
            optimizer.step()
        assert torch.equal(w.grad, torch.ones(4))  # type: ignore[arg-type]
        optimizer.zero_grad()
        scaler.scale((w * 1.0).sum()).backward()
        optimizer.step()
    assert torch.equal(w, torch.full((4,), 0.5))


def sparse_loss(embedding: nn.Embedding) -> Tensor:
    return embedding(torch.tensor([1, 3, 3])).sum()


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("scaled", [False, True])
def test_sparse_gradients_train_as_in_torch(late: None, mode: StepMode, scaled: bool) -> None:
    ours, plain = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    plain.load_state_dict(ours.state_dict())
    reference = torch.optim.SparseAdam(plain.parameters(), lr=LR)
    scaler = GradScaler("cpu", init_scale=4.0) if scaled else None
    with AsyncOptimizer(
        torch.optim.SparseAdam(ours.parameters(), lr=LR), ours, step_mode=mode, scaler=scaler
    ) as optimizer:
        for _ in range(3):
            loss = sparse_loss(ours)
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sparse_loss(plain).backward()
            reference.step()
            reference.zero_grad()
        optimizer.synchronize()
        assert torch.equal(ours.weight, plain.weight)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_with_masters_are_refused_and_kept(mode: StepMode) -> None:
    embedding = nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    before = embedding.weight.detach().clone()
    with AsyncOptimizer(
        sgd(embedding.parameters()), embedding, step_mode=mode, master_weights="fp32"
    ) as optimizer:
        sparse_loss(embedding).backward()
        with pytest.raises(UnsupportedError, match=r"weight has a sparse gradient.*sparse=False"):
            optimizer.step()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        assert torch.equal(embedding.weight, before)
        embedding.weight.grad = embedding.weight.grad.to_dense()
        optimizer.step()
    expected = before.float()
    expected[1] -= LR
    expected[3] -= 2 * LR
    assert torch.equal(embedding.weight, expected.bfloat16())


class Own(nn.Parameter):
    """A subclass with a life of its own."""


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(4, requires_grad=True), lambda: Own(torch.ones(4))]
)
def test_tensors_whose_uses_cannot_be_seen_are_waited_for_at_once(
    late: None, make: Callable[[], Tensor]
) -> None:
    w = make()
    with AsyncOptimizer(sgd([w])) as optimizer:
        seen = []
        for _ in range(4):
            give(w)
            optimizer.step()
            seen.append(float(w.detach()[0]))
    assert seen == [0.5, 0.0, -0.5, -1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_stands_twice_is_refused(mode: StepMode) -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(UnsupportedError, match=r"twice, expected each once.*step_mode='sync'"):
        AsyncOptimizer(torch.optim.SGD([p, p], lr=0.1), step_mode=mode)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_async_optimizer_is_not_copied(how: Callable[[Any], Any]) -> None:
    refused = pytest.raises(UnsupportedError, match=r"not copied or pickled.*state_dict\(\)")
    with AsyncOptimizer(sgd([one()])) as optimizer, refused:
        how(optimizer)


def break_off(optimizer: AsyncOptimizer, w: nn.Parameter) -> None:
    with optimizer:
        give(w)
        optimizer.step()
        raise ZeroDivisionError


def test_an_exception_in_the_loop_finishes_the_step_and_is_not_replaced(late: None) -> None:
    w = one()
    with pytest.raises(ZeroDivisionError):
        break_off(AsyncOptimizer(sgd([w])), w)
    assert type(w) is nn.Parameter
    assert torch.equal(w, torch.full((4,), 0.5))
