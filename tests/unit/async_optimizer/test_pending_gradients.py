"""A gradient that a step beside still reads: each use waits; dropping it does not.

``lazy``: the worker updates a part when somebody waits for it, so what does not wait is seen.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from async_support import Gate, assert_same, lazy
from references import loss_of, network
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, StepError, attach, detach
from accel_scaler.async_optimizer.pending_parameter import PendingGradient, hold, release
from accel_scaler.optimizer_step.replica import Replica
from accel_scaler.optimizer_step.stepper import async_stepper_of
from unit.async_optimizer.test_pending_parameter import AFTER, BEFORE, USES, plain
from unit.async_optimizer.test_reads_unseen import READS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LIMIT_S = 20.0
LR, SCALE = 0.5, 64.0

OF_PARAMETERS = {*("nn.Parameter", "isinstance", "its own __class__"), "stack_module_state"}
"""They make or ask for a parameter."""


class Lent:
    """A gradient that another thread changes until it is waited for."""

    def __init__(self) -> None:
        self.grad = torch.full((2, 3), BEFORE)
        self.memory, self.waits, self.ref = self.grad.data, 0, weakref.ref(self)
        hold([self.grad], self.ref)

    def wait_for(self, t: Tensor) -> None:
        self.waits += 1
        thread = threading.Thread(target=self.memory.fill_, args=(AFTER,))
        thread.start()
        thread.join(LIMIT_S)
        release([t], self.ref)


def outcome(use: Callable[[Any], Any], value: Any) -> Any:
    """What it gives, or the class of its error: some uses want a tensor that needs gradients."""
    try:
        return plain(use(value))
    except RuntimeError as error:
        return type(error)


def problem_with(use: Callable[[Any], Any]) -> str | None:
    lent = Lent()
    result = outcome(use, lent.grad)
    expected = outcome(use, torch.full((2, 3), AFTER))
    if lent.waits != 1 or type(lent.grad) is not Tensor or lent.grad.__dict__:
        return f"waited {lent.waits} times, is a {type(lent.grad).__name__}"
    if isinstance(expected, Tensor) and isinstance(result, Tensor):
        same = torch.equal(result, expected) and type(result) is type(expected)
    else:
        same = result == expected
    return None if same else f"got {result}, expected {expected}"


def test_every_use_waits_once_and_sees_the_gradient_after_the_step() -> None:
    uses = {name: use for name, use in {**USES, **READS}.items() if name not in OF_PARAMETERS}
    problems = {name: problem_with(use) for name, use in uses.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_what_reads_no_element_does_not_wait() -> None:
    lent = Lent()
    assert (lent.grad.shape, lent.grad.dtype, lent.grad._version) == ((2, 3), torch.float32, 0)
    assert lent.waits == 0
    lent.grad.sum()


# The step.


def lent_by(model: nn.Module) -> list[bool]:
    return [type(p.grad) is PendingGradient for p in model.parameters()]


def stepped(scaled: bool) -> tuple[Any, AsyncOptimizer, Any]:
    model = network()
    scaler = GradScaler("cpu", init_scale=SCALE) if scaled else None
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    optimizer = AsyncOptimizer(inner, model, scaler=scaler)
    return model, optimizer, scaler


def backward(model: nn.Module, scaler: Any, number: int = 0) -> None:
    loss = loss_of(model, number)
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("scaled", [False, True])
def test_dropping_gradients_waits_for_nothing(scaled: bool) -> None:
    model, optimizer, scaler = stepped(scaled)
    with lazy() as gate, optimizer:
        backward(model, scaler)
        optimizer.step()
        assert lent_by(model) == [True] * 4
        optimizer.zero_grad()
        assert lent_by(model) == [False] * 4
        assert not done(gate)


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("zeroes", ["model", "optimizer"])
def test_what_ends_a_step_of_an_accelerator_waits_for_nothing(zeroes: str, precision: str) -> None:
    """A scheduler's step, and either way to drop the gradients."""
    accelerator: Any = Accelerator(cpu=True, mixed_precision=precision)
    attach(accelerator, step_mode="overlap")
    model: Any = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with lazy() as gate:
        for number in range(3):
            accelerator.backward(loss_of(model, number))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            (model if zeroes == "model" else optimizer).zero_grad()
            assert lent_by(model) == [False] * 4
            assert not done(gate)
        detach(accelerator)


def done(gate: Gate) -> int:
    """Parts of the task in hand that are done."""
    with gate.changed:
        return sum(task.done for task in gate.order if not task.finished)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("when", ["graph before the step", "graph after it"])
def test_a_backward_adds_to_what_the_step_has_read(when: str, scaled: bool) -> None:
    """autograd asks nobody: a bias, which no backward reads, is stepped and added to."""

    def run(is_ours: bool) -> tuple[list[float], list[float]]:
        p = nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([p], lr=LR, momentum=0.5)
        kind = GradScaler if is_ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=SCALE, growth_interval=1, enabled=scaled)
        ours = AsyncOptimizer(inner, scaler=scaler if scaled else None) if is_ours else None

        def loss() -> Tensor:
            return (p + torch.arange(3.0)).sum() * 3.0

        first, second = loss(), loss()
        scaler.scale(first).backward()
        if ours is not None:
            ours.step()
        else:
            scaler.step(inner)
            scaler.update()
        scaler.scale(second if when == "graph before the step" else loss()).backward()
        assert p.grad is not None
        grads: list[float] = p.grad.tolist()
        if ours is not None:
            ours.close()
        return p.tolist(), grads

    with lazy():
        assert run(True) == run(False)


def test_an_accelerators_backward_adds_to_what_the_step_has_read() -> None:
    """Where nothing is scaled, too, and the graphs are from before the step."""

    def run(is_ours: bool) -> tuple[list[float], list[float]]:
        p = nn.Parameter(torch.ones(3))
        optimizer: Any = torch.optim.SGD([p], lr=LR, momentum=0.5)
        accelerator: Any = Accelerator(cpu=True, mixed_precision="no")
        if is_ours:
            optimizer = attach(accelerator, step_mode="overlap").prepare(optimizer)
        for loss in [(p + torch.arange(3.0)).sum() * 3.0 for _ in range(3)]:
            accelerator.backward(loss)
            optimizer.step()
        detach(accelerator)
        assert p.grad is not None
        return p.tolist(), p.grad.tolist()

    with lazy():
        found = run(True)
    assert found == run(False)


@pytest.mark.parametrize("how", ["step", "step, one has none", "submit"])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_in_a_buffer_of_the_scripts_may_be_overwritten_at_once(
    how: str, scaled: bool
) -> None:
    """As DDP's buckets: whoever writes to the buffer asks no gradient, so the step has a copy."""

    def run(is_ours: bool) -> list[Tensor]:
        model, buffer = network(), torch.zeros(161)
        params = list(model.parameters())
        parts = buffer.split([p.numel() for p in params])
        inner = torch.optim.SGD(params, lr=LR, momentum=0.5)
        kind = GradScaler if is_ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=SCALE, enabled=scaled)
        ours = AsyncOptimizer(inner, model, scaler=scaler if scaled else None) if is_ours else None
        params[0].requires_grad_(how != "step, one has none")
        for number in range(2):
            for p, part in zip(params, parts, strict=True):
                p.grad = part.view_as(p) if p.requires_grad else None
            scaler.scale(loss_of(model, number)).backward()
            if ours is None:
                scaler.step(inner)
                scaler.update()
            elif how == "submit":
                ours.submit((lambda: scaler.step(ours)) if scaled else ours.step)
                scaler.update()
            else:
                ours.step()
            buffer.zero_()
        if ours is not None:
            ours.close()
        return [p.detach() for p in params]

    with lazy():
        found = run(True)
    assert_same(found, run(False))


def test_the_memory_of_dropped_gradients_goes_part_by_part() -> None:
    """Not with the last part: the next backward needs it."""
    params = [nn.Parameter(torch.ones(1 << 13)) for _ in range(3)]
    with lazy() as gate, AsyncOptimizer(torch.optim.SGD(params, lr=LR)) as optimizer:
        memory = []
        for p in params:
            array = numpy.ones(1 << 13, dtype=numpy.float32)
            p.grad = torch.from_numpy(array)
            memory.append(weakref.ref(array))
        del array
        optimizer.step()
        optimizer.zero_grad()
        assert params[1].sum() == LR * (1 << 13)
        assert done(gate) == 2
        assert [ref() is None for ref in memory] == [True, False, False]


def test_an_aliased_gradient_is_seen_by_autograd_as_changed() -> None:
    """As torch's product in place: a graph that has saved it says so instead of going on."""
    model, optimizer, scaler = stepped(True)
    with optimizer:
        backward(model, scaler)
        grad = model[0].weight.grad
        weight = torch.ones_like(grad, requires_grad=True)
        graph = (grad * weight).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


def test_gradients_of_a_failed_step_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scaler = stepped(True)

    def fail(self: Any, *args: Any) -> None:
        raise ValueError("planted")

    with optimizer:
        backward(model, scaler)
        held = model[0].weight.grad
        assert held is not None
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "step_part", fail)
            optimizer.step()
            with pytest.raises(StepError, match=r"planted.* As before"):
                held.sum()
        assert [p.grad for p in model.parameters()] == [None] * 4
        backward(model, scaler)
        optimizer.step()
        assert lent_by(model) == [True] * 4
        optimizer.synchronize()
        assert lent_by(model) == [False] * 4


def test_a_gradient_that_is_kept_keeps_no_optimizer() -> None:
    model, optimizer, scaler = stepped(True)
    backward(model, scaler)
    grad = model[0].bias.grad
    optimizer.step()
    stepper: Any = async_stepper_of(optimizer)
    stepper.worker.stop()
    gone = weakref.ref(stepper)
    del optimizer, stepper
    gc.collect()
    assert gone() is None
    assert type(grad) is PendingGradient
    reference = network()
    loss_of(reference, 0).backward()
    assert torch.equal(grad, reference[0].bias.grad)  # type: ignore[arg-type]
    assert type(grad) is Tensor


def test_a_hook_tells_of_a_backward_only_where_no_scaler_does_and_goes_with_the_optimizer() -> None:
    for scaled in (True, False):
        model, optimizer, scaler = stepped(scaled)
        with optimizer:
            for _ in range(2):
                backward(model, scaler)
                optimizer.step()
                optimizer.zero_grad()
            hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
            assert hooks == [0 if scaled else 1] * 4
            assert [p._backward_hooks for p in copy.deepcopy(model).parameters()] == [None] * 4
        assert [len(p._backward_hooks or ()) for p in model.parameters()] == [0] * 4


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_a_guarded_parameter_can_be_swapped_as_in_torch(mode: Any) -> None:
    model = network()
    twin, future = copy.deepcopy(model), torch.__future__
    plain_sgd = torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.9)
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    future.set_swap_module_params_on_conversion(True)
    try:
        with AsyncOptimizer(inner, model, step_mode=mode) as optimizer:
            for number in range(4):
                for one, steps in ((model, optimizer), (twin, plain_sgd)):
                    loss_of(one, number).backward()
                    steps.step()
                    steps.zero_grad()
                    optimizer.synchronize()
                    if number == 1:
                        one.to(torch.float64)
                        one.to(torch.float32)
                    elif number == 2:
                        one.load_state_dict({k: v / 2 for k, v in one.state_dict().items()})
    finally:
        future.set_swap_module_params_on_conversion(False)
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, expected)


def test_two_parameters_with_one_gradient_do_not_wait_for_themselves() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with AsyncOptimizer(torch.optim.SGD([a, b], lr=LR)) as optimizer:
        a.grad = b.grad = torch.ones(2)
        optimizer.step()
        optimizer.synchronize()
        assert (a.tolist(), b.tolist()) == ([0.5, 0.5], [0.5, 0.5])


def test_a_check_waits_for_a_step_that_reads_the_same_gradients() -> None:
    """Nothing was added to them since: two optimizers step twice, after one backward."""

    def weights(mode: str) -> list[Tensor]:
        accelerator = attach(
            Accelerator(cpu=True, mixed_precision="bf16"), step_mode=mode, master_weights="fp32"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models = [nn.Linear(4, 4).bfloat16() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        for model in prepared[:2]:
            accelerator.backward(model(torch.ones(1, 4)).float().square().mean())
        for optimizer in prepared[2:] * 2:
            optimizer.step()
        accelerator.end_training()
        found = [p.detach().clone() for model in models for p in model.parameters()]
        detach(accelerator)
        return found

    with lazy():
        found = weights("overlap")
    assert all(map(torch.equal, found, weights("sync")))
